"""A GPT-2 style language model with a tied embedding.  The default size has 15.3 billion parameters.

Plan it:        mpress-plan examples/gpt.py --gpus 8
A small one:    mpress-plan examples/gpt.py --gpus 4 --model-arg layers=4 --model-arg hidden=64 --model-arg heads=4
"""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)

    def forward(self, x):
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2) for part in self.c_attn(x).split(hidden, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, hidden))


class MLP(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.c_proj = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads)
        self.drop_1 = nn.Dropout(dropout)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)
        self.drop_2 = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop_1(self.attn(self.ln_1(x)))
        return x + self.drop_2(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self, layers, hidden, heads, sequence, vocabulary, dropout, tied):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, hidden)
        self.wpe = nn.Embedding(sequence, hidden)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        self.apply(self.initialise)

    @staticmethod
    def initialise(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens, targets):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(layers=75, hidden=4096, heads=32, sequence=2048, vocabulary=50304, dropout=0.1, tied=True):
    return GPT(layers, hidden, heads, sequence, vocabulary, dropout, tied)


def twin():
    """The same model at a size that runs on a laptop in no time: what is planned is proven on it."""
    return {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocabulary": 64}


def example_inputs(batch=1, sequence=2048, vocabulary=50304):
    text = torch.randint(vocabulary, (batch, sequence + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
