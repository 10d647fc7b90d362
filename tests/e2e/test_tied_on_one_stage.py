"""A stage that knows one parameter by several names holds it once: weight, gradient and optimizer state, as the plan counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mpress.runtime.parameters import Knobs
from mpress.runtime.session import Settings, run_virtual
from tiny_models import write_model
from tiny_plans import emit_model
from written_plans import user_module

MODEL = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear(16, 16), nn.ModuleList(Block() for _ in range(4))
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        {ties}

    def forward(self, x, tokens):
        {first}
        for block in self.blocks:
            x = block(x)
        {last}
        return F.cross_entropy(self.head(x), tokens)

def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 16), torch.randint(40, (batch,)))
"""
HEAD = "self.head.weight = self.embed.weight"
EARLY, LATE = "x = self.stem(x) + self.embed(tokens)", "x = self.stem(x) + self.embed(tokens)"
CASES = {  # ties, what runs before and after the blocks, stages
    "embedding and head on the only stage": (HEAD, EARLY, "pass", 1),
    "embedding and head on the last stage": (HEAD, "pass", LATE, 2),
    "embedding and head on both stages": (HEAD, EARLY, "pass", 2),
    "one weight in all layers": ("[setattr(b.up, 'weight', self.blocks[0].up.weight) for b in self.blocks]", EARLY, "pass", 1),
    "one weight in all layers, both stages": ("[setattr(b.up, 'weight', self.blocks[0].up.weight) for b in self.blocks]", EARLY, "pass", 2),
    "one module in all layers": ("[setattr(b, 'up', self.blocks[0].up) for b in self.blocks]", EARLY, "pass", 2),
    "a head that is a layer's weight": (
        "self.blocks[3].up = self.blocks[1].up; self.stem.bias = self.blocks[2].down.bias",
        EARLY,
        "pass",
        2,
    ),
}


@pytest.mark.parametrize("kind", ["keep", "recompute", "all"])
@pytest.mark.parametrize("name", CASES)
def test_a_tied_weight_is_held_once(tmp_path: Path, name: str, kind: str) -> None:
    torch.set_num_threads(1)
    ties, first, last, stages = CASES[name]
    path = write_model(tmp_path, MODEL.format(ties=ties, first=first, last=last))
    emitted = emit_model(tmp_path, path, {}, kind, stages, 2)
    user = user_module(Path(path))
    torch.manual_seed(3)
    model: nn.Module = user.build_model()
    names = list(emitted.program.INPUTS)
    given = [dict(zip(names, user.example_inputs(batch=2), strict=True)) for _ in range(2)]
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    settings = Settings(1, 0, Knobs("adamw"), state_dict=weights, data=[given], account=True, keep_gradients=True)
    outcome = run_virtual(emitted.program, emitted.schedule, settings)
    for one in given:
        (model(*one.values()) / 2).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.gradients[0][key], parameter.grad, rtol=1e-5, atol=1e-7)
    for index, stage in enumerate(emitted.schedule.stages):
        assert outcome.peak[index] <= stage.peak_bytes, f"stage {index} holds {outcome.peak[index] - stage.peak_bytes} more than predicted"
