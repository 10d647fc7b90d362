"""Models nobody prepared: planned by the command, emitted, run, and held against plain autograd, gradient by gradient."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpress.runtime.parameters import Knobs
from mpress.runtime.reference import keyed_dropout
from mpress.runtime.schedule_file import read_schedule
from mpress.runtime.session import Settings, run_virtual
from tiny_plans import load_program

MODELS = {
    "sequential convolutions, equal shapes and other activations": """
def build_model():
    c = lambda: nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(c(), nn.ReLU(), c(), nn.GELU(), c(), nn.Tanh(), nn.MaxPool2d(2), c(), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
def example_inputs(batch=1):
    return (torch.randn(batch, 4, 8, 8),)
def loss(out):
    return out.square().mean()
""",
    "equal layers with activations in turn": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.ls = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
    def forward(self, x):
        for i, layer in enumerate(self.ls):
            x = (torch.relu if i % 2 else F.gelu)(layer(x))
        return x.square().mean()
def build_model():
    return Net()
def example_inputs(batch=1):
    return {"x": torch.randn(batch, 16)}
""",
    "dropout outside the blocks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.ls = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(5))
    def forward(self, x):
        for layer in self.ls:
            x = x + F.dropout(layer(x), 0.3, self.training)
        return x.square().mean()
def build_model():
    return Net()
def example_inputs(batch=1):
    return {"x": torch.randn(batch, 16)}
""",
    "thirty layers": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(30))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x
def build_model():
    return Net()
def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
def loss(out):
    return out.mean()
""",
    "a frozen first layer": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(4))
        self.stem.weight.requires_grad_(False)
        self.stem.bias.requires_grad_(False)
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()
def build_model():
    return Net()
def example_inputs(batch=1):
    return {"x": torch.randn(batch, 8)}
""",
}
MICRO_BATCHES = 4


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("stages", [2, 3])
def test_gradients_equal_plain_autograd(tmp_path: Path, name: str, stages: int) -> None:
    path = tmp_path / "net.py"
    path.write_text("import torch\nimport torch.nn.functional as F\nfrom torch import nn\n" + MODELS[name])
    flags = [
        "--gpus",
        str(stages),
        "--micro-batch",
        "2",
        "--micro-batches",
        str(MICRO_BATCHES),
        "--precision",
        "fp32",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run([sys.executable, "-m", "mpress_cli", str(path), *flags], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

    user = _user_module(path)
    torch.manual_seed(5)
    model: nn.Module = user.build_model()
    program, schedule = load_program(tmp_path / "net_mpress.py"), read_schedule(tmp_path / "net.schedule.json")
    batches = [_named(user.example_inputs(batch=2), list(program.INPUTS)) for _ in range(MICRO_BATCHES)]
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    settings = Settings(1, 0, Knobs("adamw"), state_dict=weights, data=[batches], account=True, keep_gradients=True)
    outcome = run_virtual(program, schedule, settings)

    total = 0.0
    for k, batch in enumerate(batches):
        with keyed_dropout(model, 0, 0, k):
            out = model(**batch) if not hasattr(user, "loss") else user.loss(model(*batch.values()))
        (out / MICRO_BATCHES).backward()
        total += float(out.detach()) / MICRO_BATCHES
    expected = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    assert set(outcome.gradients[0]) == set(expected)
    for key, gradient in expected.items():
        assert gradient is not None and torch.equal(outcome.gradients[0][key], gradient), key
    assert outcome.losses[0] == pytest.approx(total, rel=1e-6)
    for index, stage in enumerate(schedule.stages):
        assert outcome.peak[index] <= stage.peak_bytes


def _user_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("user_net", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _named(given: Any, names: list[str]) -> dict[str, Tensor]:
    return dict(given) if isinstance(given, dict) else dict(zip(names, given, strict=True))
