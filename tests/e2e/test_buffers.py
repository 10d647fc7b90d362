"""Models with buffers: what an emitted program trains, writes and holds equals the user's module, whatever the plan recomputes or swaps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpress.errors import InputError
from mpress.graph_file import read_graph, write_graph
from mpress.recipe import Precision
from mpress.runtime.parameters import Knobs
from mpress.runtime.schedule_file import RunError
from mpress.runtime.session import Outcome, Settings, run_virtual
from mpress.trace.record import trace
from tiny_models import write_model
from tiny_plans import Emitted, emit_model
from user_training import Batches, train

STEPS, MICRO_BATCHES = 3, 4
BATCH_NORM = """
class Net(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()) for _ in range(blocks))
        self.head = nn.Linear(6, 4)
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3))).square().mean()
def example_inputs(batch=1):
    return {"x": torch.randn(batch, 3, 8, 8)}
"""
BLOCKS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        make = maker()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(make(i) for i in range(4))
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()
def example_inputs(batch=1):
    return {"x": torch.randn(batch, 6, 8)}
"""
MODELS = {
    "batch norm": BATCH_NORM,
    "a causal mask in every layer": BLOCKS
    + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16, dtype=torch.bool)))
    def forward(self, x):
        t = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(~self.mask[:t, :t], float("-inf"))
        return scores.softmax(-1) @ v
maker = lambda: lambda i: Block()
""",
    "rotary frequencies shared by the layers": BLOCKS
    + """
class Block(nn.Module):
    def __init__(self, inv):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("inv", inv, persistent=False)
    def forward(self, x):
        angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.inv)
        return self.lin(x * torch.cat((angle.cos(), angle.sin()), -1))
def maker():
    inv = 1.0 / (100 ** (torch.arange(0, 8, 2).float() / 8))
    return lambda i: Block(inv)
""",
    "literals that differ from layer to layer, and integers": BLOCKS
    + """
class Block(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.lin, self.table = nn.Linear(8, 8), nn.Embedding(4, 8)
        self.register_buffer("scale", torch.tensor([0.5 * (i + 1)] * 8))
        self.register_buffer("position", torch.arange(6) % 4)
        self.register_buffer("nobody", torch.full((3,), 2.0))
    def forward(self, x):
        return self.lin(x) * self.scale + self.table(self.position)
maker = lambda: Block
""",
    "spectral norm": BLOCKS
    + """
def maker():
    return lambda i: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
""",
    "a running scale of our own": BLOCKS
    + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        with torch.no_grad():
            self.seen += 1
            self.scale.mul_(0.9).add_(x.abs().mean((0, 1)), alpha=0.1)
        return self.lin(x / self.scale.clone())
maker = lambda: lambda i: Block()
""",
    "one written buffer in two blocks": BLOCKS
    + """
class Block(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("seen", seen)
    def forward(self, x):
        self.seen += 1
        return self.lin(x) * self.seen.clone()
def maker():
    seen = torch.zeros(8)
    return lambda i: Block(seen if i in (1, 2) else torch.zeros(8))
""",
}
BUILD = "\ndef build_model(**kw):\n    return Net(**kw)\n"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(path: str) -> Any:
    user: dict[str, Any] = {"__name__": "user_net"}
    exec(compile(Path(path).read_text(), path, "exec"), user)
    return user


def user_side(path: str) -> tuple[nn.Module, Batches]:
    user = load(path)
    torch.manual_seed(5)
    model: nn.Module = user["build_model"]()
    return model, [[user["example_inputs"](batch=2) for _ in range(MICRO_BATCHES)] for _ in range(STEPS)]


def run(emitted: Emitted, model: nn.Module, data: Batches) -> Outcome:
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    settings = Settings(len(data), 5, Knobs(""), state_dict=weights, data=data, account=True, keep_gradients=True)
    return run_virtual(emitted.program, emitted.schedule, settings)


def equal(mine: Tensor, theirs: Tensor, exact: bool = True) -> bool:
    same = torch.equal(mine, theirs) if exact else torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    return mine.dtype == theirs.dtype and same


@pytest.mark.parametrize(("kind", "stages"), [("keep", 2), ("recompute", 3), ("all", 3)])
@pytest.mark.parametrize("name", list(MODELS))
def test_training_equals_the_user_s_module(tmp_path: Path, name: str, kind: str, stages: int) -> None:
    path = write_model(tmp_path, MODELS[name] + BUILD)
    emitted = emit_model(tmp_path, path, {}, kind, stages, MICRO_BATCHES)
    model, data = user_side(path)
    outcome = run(emitted, model, data)
    losses, gradients = train(model, data, "adamw", 5)
    # a normalised weight is used twice: autograd adds the two parts of its gradient before it adds them to earlier micro-batches
    exact = name != "spectral norm"
    assert outcome.losses == losses if exact else outcome.losses == pytest.approx(losses, rel=1e-6)
    for mine, theirs in zip(outcome.gradients, gradients, strict=True):
        assert set(mine) == set(theirs)
        for key, gradient in theirs.items():
            assert equal(mine[key], gradient, exact), key
    used = {name for cell in emitted.chain.cells for name in cell.buffers}
    assert used
    for key, value in model.named_buffers():
        assert equal(outcome.buffers[key], value, exact) if key in used else key not in outcome.buffers, key
    kept = {key: value for key, value in model.state_dict().items() if "nobody" not in key}
    assert set(outcome.weights) == set(kept) and all(equal(outcome.weights[key], value, exact) for key, value in kept.items())
    for rank, stage in enumerate(emitted.replay.stages):
        assert 0.98 * stage.peak_bytes <= outcome.peak[rank] <= stage.peak_bytes, f"rank {rank} at {outcome.peak_action[rank]}"


@pytest.mark.parametrize("name", list(MODELS))
def test_a_graph_file_keeps_first_values_and_writes(tmp_path: Path, name: str) -> None:
    graph = trace(write_model(tmp_path, MODELS[name] + BUILD), model_args={}, micro_batch=2, precision="fp32")
    assert graph.setup or name == "spectral norm"
    assert read_graph(write_graph(graph), "graph.json") == graph


def test_recomputing_does_not_count_a_batch_twice(tmp_path: Path) -> None:
    path = write_model(tmp_path, BATCH_NORM + BUILD)
    emitted = emit_model(tmp_path, path, {}, "recompute", 2, MICRO_BATCHES)
    assert "# recompute" in emitted.module_path.read_text()
    model, data = user_side(path)
    outcome = run(emitted, model, data)
    for i in range(4):
        assert outcome.buffers[f"blocks.{i}.1.num_batches_tracked"].item() == STEPS * MICRO_BATCHES
    expected = torch.zeros(6)  # by hand, from the input of the first block at the first step
    with torch.no_grad():
        for batch in data[0]:
            x = model.get_submodule("blocks.0.0")(model.get_submodule("stem")(batch["x"]))
            expected = 0.9 * expected + 0.1 * x.mean((0, 2, 3))
    first = run(emitted, model, data[:1])
    assert torch.allclose(first.buffers["blocks.0.1.running_mean"], expected, rtol=1e-5, atol=1e-7)


def test_without_a_state_dict_buffers_start_as_the_constructor_makes_them(tmp_path: Path) -> None:
    path = write_model(tmp_path, MODELS["rotary frequencies shared by the layers"] + BUILD)
    emitted = emit_model(tmp_path, path, {}, "keep", 2, MICRO_BATCHES)
    outcome = run_virtual(emitted.program, emitted.schedule, Settings(0, 0, Knobs("")))
    model, _ = user_side(path)
    assert equal(outcome.buffers["blocks.3.inv"], model.get_buffer("blocks.3.inv"))
    assert not any("inv" in key for key in outcome.weights)


def test_equal_constructions_are_written_once(tmp_path: Path) -> None:
    path = write_model(tmp_path, BATCH_NORM + BUILD)
    text = emit_model(tmp_path, path, {"blocks": "9"}, "keep", 1, MICRO_BATCHES).module_path.read_text()
    assert text.count("def make_") == 3 and text.count('**layers("blocks.{}.", range(0, 8), BLOCKS_BUFFERS),') == 1
    literals = write_model(tmp_path, MODELS["literals that differ from layer to layer, and integers"] + BUILD, "literals.py")
    text = emit_model(tmp_path, literals, {}, "keep", 1, MICRO_BATCHES).module_path.read_text()
    assert text.count("def make_scale") == 4 and text.count("def make_position") == 1


def test_bf16_casts_floating_buffers_as_the_module_does(tmp_path: Path) -> None:
    path = write_model(tmp_path, MODELS["literals that differ from layer to layer, and integers"] + BUILD)
    emitted = emit_model(tmp_path, path, {}, "keep", 2, MICRO_BATCHES, precision=Precision.BF16)
    outcome = run_virtual(emitted.program, emitted.schedule, Settings(0, 0, Knobs("")))
    model = user_side(path)[0].to(torch.bfloat16)
    for key in ("blocks.1.scale", "blocks.2.position"):
        assert equal(outcome.buffers[key], model.get_buffer(key))


def test_the_command_saves_and_reads_buffers(tmp_path: Path) -> None:
    path = write_model(tmp_path, MODELS["literals that differ from layer to layer, and integers"] + BUILD)
    emitted = emit_model(tmp_path, path, {}, "keep", 2, MICRO_BATCHES)
    (tmp_path / "gpt_mpress.py").rename(tmp_path / "again.py")
    saved = tmp_path / "saved.pt"

    def start(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "again.py"), "--virtual", "--schedule", str(tmp_path / "gpt.schedule.json"), *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    done = start("--steps", "1", "--account", "--save-state-dict", str(saved))
    assert done.returncode == 0, done.stderr
    model, _ = user_side(path)
    state = torch.load(saved)
    model.load_state_dict(state, strict=True)
    assert state["blocks.2.nobody"].tolist() == [2.0, 2.0, 2.0]
    assert start("--steps", "1", "--state-dict", str(saved)).returncode == 0
    state["blocks.2.more"] = state.pop("blocks.2.scale")
    torch.save(state, saved)
    refused = start("--state-dict", str(saved))
    assert refused.returncode == 2 and "lacks blocks.2.scale and has the unknown blocks.2.more" in refused.stderr
    assert len(emitted.graph.buffers) == 12


def test_random_buffers_need_a_state_dict(tmp_path: Path) -> None:
    path = write_model(tmp_path, MODELS["spectral norm"] + BUILD)
    emitted = emit_model(tmp_path, path, {}, "keep", 2, MICRO_BATCHES)
    with pytest.raises(RunError, match="is random or unknown; pass --state-dict"):
        run_virtual(emitted.program, emitted.schedule, Settings(1, 0, Knobs("")))


def test_a_later_value_that_the_backward_of_an_earlier_micro_batch_would_see_is_refused(tmp_path: Path) -> None:
    model = MODELS["a running scale of our own"].replace("self.scale.clone()", "self.scale")
    path = write_model(tmp_path, model + BUILD)
    with pytest.raises(InputError, match=r"'blocks.0.scale' is written in the forward.*needed in the backward, for div") as caught:
        emit_model(tmp_path, path, {}, "keep", 2, MICRO_BATCHES)
    assert caught.value.code == "buffer" and caught.value.where == "model.py:28"
