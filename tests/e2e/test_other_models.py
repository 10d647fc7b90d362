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
    "a U-Net with skips and in-place activations": """
def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU(inplace=True))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.mid = block(3, 4), block(4, 8), block(8, 8)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.join2, self.join1, self.head = block(16, 8), block(8, 4), nn.Conv2d(4, 2, 1)
    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.mid(F.max_pool2d(b, 2))
        c = self.join2(torch.cat([self.up2(c), b], 1))
        return self.head(self.join1(torch.cat([self.up1(c), a], 1)))
def build_model():
    return Net()
def example_inputs(batch=1):
    return (torch.randn(batch, 3, 16, 16),)
def loss(out):
    return out.square().mean()
""",
    "an encoder whose output all decoder layers read, one table at three places": """
class Decoder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.own, self.cross_q, self.cross_kv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * d, d))
    def forward(self, x, memory):
        q, k, v = self.own(self.n1(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        k, v = self.cross_kv(memory).chunk(2, -1)
        x = x + self.out(F.scaled_dot_product_attention(self.cross_q(self.n2(x)), k, v))
        return x + self.mlp(self.n3(x))
class Encoder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))
class Net(nn.Module):
    def __init__(self, d=16, words=24):
        super().__init__()
        self.table = nn.Embedding(words, d)
        self.encoder = nn.ModuleList(Encoder(d) for _ in range(3))
        self.decoder = nn.ModuleList(Decoder(d) for _ in range(3))
        self.head = nn.Linear(d, words, bias=False)
        self.head.weight = self.table.weight
    def forward(self, source, target):
        memory = self.table(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.table(target)
        for layer in self.decoder:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
def build_model():
    return Net()
def example_inputs(batch=1):
    return {"source": torch.randint(0, 24, (batch, 6)), "target": torch.randint(0, 24, (batch, 5))}
""",
    "rotary tables made once, a mask for all layers": """
class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.LayerNorm(d)
    def forward(self, x, cos, sin, mask):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        turn = lambda t: t * cos + torch.cat([-t[..., 8:], t[..., :8]], -1) * sin
        scores = turn(q) @ turn(k).transpose(1, 2) / 4 + mask
        return x + self.out(scores.softmax(-1) @ v)
class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.first = nn.Linear(d, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(4))
    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        angles = torch.outer(places, 0.5 ** torch.arange(16, device=x.device, dtype=x.dtype))
        cos, sin = angles.cos(), angles.sin()
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)[None].expand(x.shape[0], -1, -1)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return x.square().mean()
def build_model():
    return Net()
def example_inputs(batch=1):
    return {"x": torch.randn(batch, 6, 16)}
""",
    "equal blocks that draw in their own forward": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(16, 16)
    def forward(self, x):
        return x + F.dropout(torch.relu(self.f(x)), 0.3, self.training) * torch.rand_like(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
def build_model():
    return Net()
def example_inputs(batch=1):
    return {"x": torch.randn(batch, 16)}
""",
    "a penalty on gradients, differentiated twice": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
    def forward(self, x):
        x = self.c(x)
        inside = x.clone().requires_grad_(True)
        out = self.b(torch.tanh(self.a(inside)))
        slope, = torch.autograd.grad(out.pow(2).sum(), inside, create_graph=True)
        return (slope ** 2).mean() + out.mean()
def build_model():
    return Net()
def example_inputs(batch=1):
    return {"x": torch.randn(batch, 8)}
""",
    "frozen first blocks": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(6))
        for p in (*self.stem.parameters(), *self.blocks[:3].parameters()):
            p.requires_grad_(False)
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
        with keyed_dropout(model, 0, 0, k):  # the same draws as the emitted program
            out = model(**batch) if not hasattr(user, "loss") else user.loss(model(*batch.values()))
        (out / MICRO_BATCHES).backward()
        total += float(out.detach()) / MICRO_BATCHES
    expected = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    made = outcome.gradients[0]
    assert set(made) >= set(expected)
    tied = [set(names) for names in program.ALIASES]
    assert all(any({key} <= names for names in tied) for key in set(made) - set(expected))
    for key, gradient in expected.items():
        assert gradient is not None
        if any(key in names for names in tied):  # the pipeline adds up the uses of a tied parameter in another order
            torch.testing.assert_close(made[key], gradient, rtol=1e-6, atol=1e-8)
        else:
            assert torch.equal(made[key], gradient), key
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
