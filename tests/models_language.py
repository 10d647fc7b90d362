"""Small language models: transformers of several makes, experts, recurrent networks, adapters.

Texts of model files; see models_of_all_kinds.
"""

from __future__ import annotations

_MEAN_SQUARE = """
def loss(out):
    return out.square().mean()
"""

_ATTENTION = """
class Attention(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, causal=True, mask=None):
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in self.qkv(x).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)
        return self.out(y.transpose(1, 2).reshape(b, t, d))
"""

MODELS: dict[str, str] = {}

MODELS["gpt"] = (
    _ATTENTION
    + """
class Block(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(d), Attention(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(p))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers=4, d=16, vocabulary=32, length=8, p=0.1):
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(vocabulary, d), nn.Embedding(length, d), nn.Dropout(p)
        self.h = nn.ModuleList(Block(d, p) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def build_model():
    return GPT()

def example_inputs(batch=1):
    text = torch.randint(32, (batch, 9))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
"""
)

MODELS["gpt_hand_written_attention"] = """
class Block(nn.Module):
    def __init__(self, d=16, heads=2, length=8):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.register_buffer("causal", torch.tril(torch.ones(length, length, dtype=torch.bool)), persistent=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        b, t, d = x.shape
        y = self.norm(x)
        q, k, v = (m(y).view(b, t, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        score = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        score = score.masked_fill(~self.causal[:t, :t], float("-inf"))
        y = self.drop(score.softmax(-1)) @ v
        return x + self.o(y.transpose(1, 2).contiguous().view(b, t, d))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 30, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].reshape(-1, 30), tokens[:, 1:].reshape(-1))


def build_model():
    return Net()

def example_inputs(batch=1):
    return {"tokens": torch.randint(30, (batch, 8))}
"""

MODELS["encoder_with_mask"] = (
    _ATTENTION
    + """
class Layer(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.attn, self.norm_1 = Attention(d), nn.LayerNorm(d)
        self.up, self.down, self.norm_2 = nn.Linear(d, 32), nn.Linear(32, d), nn.LayerNorm(d)

    def forward(self, x, mask):
        x = self.norm_1(x + self.attn(x, causal=False, mask=mask))
        return self.norm_2(x + self.down(F.gelu(self.up(x), approximate="tanh")))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.kind = nn.Embedding(40, 16, padding_idx=0), nn.Embedding(2, 16)
        self.register_buffer("positions", torch.arange(6)[None], persistent=False)
        self.place = nn.Embedding(6, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, tokens, kinds, attention_mask, labels):
        x = self.word(tokens) + self.kind(kinds) + self.place(self.positions)
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        mask = mask.expand(-1, -1, x.shape[1], -1)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x[:, 0].tanh()), labels)


def build_model():
    return Net()

def example_inputs(batch=1):
    mask = torch.ones(batch, 6, dtype=torch.long)
    mask[:, 4:] = 0
    tokens, kinds, labels = torch.randint(1, 40, (batch, 6)), torch.randint(2, (batch, 6)), torch.randint(2, (batch,))
    return dict(tokens=tokens, kinds=kinds, attention_mask=mask, labels=labels)
"""
)

MODELS["encoder_decoder_shared_embedding"] = """
class Cross(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, memory, causal=False):
        k, v = self.kv(memory).chunk(2, -1)
        return self.o(F.scaled_dot_product_attention(self.q(x), k, v, is_causal=causal))


class Encoder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn, self.ff = Cross(d), nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.attn(x, x)
        return x + self.ff(x)


class Decoder(Encoder):
    def __init__(self, d):
        super().__init__(d)
        self.cross = Cross(d)

    def forward(self, x, memory):
        x = x + self.attn(x, x, True)
        x = x + self.cross(x, memory)
        return x + self.ff(x)


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.table = nn.Embedding(50, d)
        self.enc = nn.ModuleList(Encoder(d) for _ in range(2))
        self.dec = nn.ModuleList(Decoder(d) for _ in range(2))
        self.head = nn.Linear(d, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, source, target):
        memory = self.table(source)
        for layer in self.enc:
            memory = layer(memory)
        x = self.table(target)
        for layer in self.dec:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x).transpose(1, 2), target)


def build_model():
    return Net()

def example_inputs(batch=1):
    return torch.randint(50, (batch, 7)), torch.randint(50, (batch, 5))
"""

MODELS["experts_dense"] = (
    """
class Experts(nn.Module):
    def __init__(self, d=8, count=4):
        super().__init__()
        self.gate = nn.Linear(d, count)
        self.up, self.down = nn.Parameter(torch.randn(count, d, 2 * d) / 8), nn.Parameter(torch.randn(count, 2 * d, d) / 8)

    def forward(self, x):
        weight = self.gate(x).softmax(-1)
        top, where = weight.topk(2, dim=-1)
        weight = torch.zeros_like(weight).scatter(-1, where, top / top.sum(-1, keepdim=True))
        hidden = F.gelu(torch.einsum("btd,edh->bteh", x, self.up))
        return x + torch.einsum("bteh,ehd,bte->btd", hidden, self.down, weight)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 6, 8),)
"""
    + _MEAN_SQUARE
)

MODELS["experts_known_routing"] = (
    """
class Experts(nn.Module):
    def __init__(self, d=8, count=3):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU()) for _ in range(count))

    def forward(self, x):
        flat = x.flatten(0, 1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):  # token i goes to expert i mod count
            rows = torch.arange(index, flat.shape[0], len(self.experts), device=x.device)
            out.index_add_(0, rows, expert(flat.index_select(0, rows)))
        return x + out.view_as(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 6, 8),)
"""
    + _MEAN_SQUARE
)

MODELS["lstm"] = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        states, _ = self.rnn(self.table(tokens))
        return F.cross_entropy(self.head(states[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randint(20, (batch, 5)),)
"""

MODELS["gru_cells_in_a_loop"] = (
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(6, 6) for _ in range(3))

    def forward(self, x):
        states = [torch.zeros(x.shape[0], 6, device=x.device, dtype=x.dtype) for _ in self.cells]
        for step in x.unbind(1):
            for index, cell in enumerate(self.cells):
                states[index] = step = cell(step, states[index])
        return step


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 3, 6),)
"""
    + _MEAN_SQUARE
)

MODELS["lora_frozen_backbone"] = """
class Adapted(nn.Module):
    def __init__(self, d=16, rank=2):
        super().__init__()
        self.base = nn.Linear(d, d).requires_grad_(False)
        self.a, self.b = nn.Linear(d, rank, bias=False), nn.Linear(rank, d, bias=False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.b(self.a(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(24, 16).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16).requires_grad_(False), Adapted(), nn.SiLU()) for _ in range(4))
        self.head = nn.Linear(16, 24).requires_grad_(False)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randint(24, (batch, 6)),)
"""

MODELS["keywords_none_and_dataclass"] = """
@dataclass
class Result:
    loss: Optional[torch.Tensor] = None
    logits: Optional[torch.Tensor] = None
    hidden: Optional[tuple] = None


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.mix, self.ff = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, mask=None):
        y = torch.tanh(self.mix(self.norm(x)))
        if mask is not None:
            y = y * mask[..., None]
        return x + self.ff(y)


class Net(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.emb, self.blocks, self.head = nn.Embedding(17, d), nn.ModuleList(Block(d) for _ in range(4)), nn.Linear(d, 17)

    def forward(self, input_ids, attention_mask=None, position_bias=None, labels=None, keep_hidden=False):
        x = self.emb(input_ids)
        if position_bias is not None:
            x = x + position_bias
        seen = ()
        for block in self.blocks:
            x = block(x, mask=attention_mask)
            if keep_hidden:
                seen = seen + (x,)
        logits = self.head(x)
        cost = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) if labels is not None else None
        return Result(loss=cost, logits=logits, hidden=seen or None)


def build_model():
    return Net()

def example_inputs(batch=1):
    ids = torch.randint(17, (batch, 5))
    return dict(input_ids=ids, attention_mask=torch.ones(batch, 5), position_bias=None, labels=ids.clone(), keep_hidden=True)

def loss(out):
    return out.loss
"""
