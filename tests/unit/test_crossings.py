"""What the plan says crosses from stage to stage: by name, and against what a run of the emitted program gives to its sends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import models_of_all_kinds
from mpress.emit.crossings import Crossing, Crossings
from mpress.runtime.parameters import Knobs
from mpress.runtime.session import Settings, run_virtual
from mpress.runtime.transport import raw
from mpress.runtime.wires import Local, Message
from mpress.units import Bytes
from tiny_plans import Emitted, emit_model

MICRO_BATCHES = 2
NAMES = (
    "gpt", "encoder_with_mask", "encoder_decoder_shared_embedding", "experts_known_routing", "lora_frozen_backbone", "unet", "lstm",
    "no_gradient_part", "several_inputs_of_all_types", "deep_supervision", "in_place_and_views", "checkpoint", "a_parameter_used_directly",
    "custom_function", "custom_function_of_two_results",
)  # fmt: skip
STRANGE = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))

class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        small = x.to(torch.float16)
        ctx.save_for_backward(small, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        small, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).t() @ small.float().flatten(0, -2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        for parameter in self.blocks[0].parameters():
            parameter.requires_grad_(False)
        self.skip = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        keep = x > 0
        best = x.argmax(-1)
        x = self.blocks[1](self.blocks[0](x))
        side = torch.sin(x)
        x = self.blocks[3](self.blocks[2](x))
        x = Half.apply(x, self.weight)
        x = torch.where(keep, self.skip(torch.cat([side, x], -1)[..., 4:12]), x)
        return F.cross_entropy(x.flatten(0, 1), best.flatten())

def build_model():
    return Net()

def example_inputs(batch=2):
    return (torch.randn(batch, 4, 8),)
"""


def run_counted(
    emitted: Emitted, monkeypatch: pytest.MonkeyPatch
) -> Counter[tuple[int, str, tuple[tuple[tuple[int, ...], str, int], ...]]]:
    """(sender, word, tensors as (shape, dtype, bytes of the storage)) -> number of sends in one step."""
    sent: Counter[tuple[int, str, tuple[tuple[tuple[int, ...], str, int], ...]]] = Counter()
    send = Local.send

    def counted(self: Local, stage: int, word: str, micro_batch: int, tensors: Sequence[Tensor]) -> Message:
        rows = tuple((tuple(t.shape), str(t.dtype).removeprefix("torch."), raw(t).numel()) for t in tensors)
        sent[(stage, word, rows)] += 1
        return send(self, stage, word, micro_batch, tensors)

    monkeypatch.setattr(Local, "send", counted)
    torch.set_num_threads(1)
    weights = {name: torch.randn(shape) for stage in emitted.program.STAGES for name, shape in stage.PARAMS.items()}
    run_virtual(emitted.program, emitted.schedule, Settings(1, 0, Knobs("adamw"), state_dict=weights))
    return sent


@pytest.mark.parametrize("name", NAMES)
def test_the_cuts_are_what_the_program_sends(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted = emit_model(tmp_path, models_of_all_kinds.write(name, tmp_path), {}, "recompute", 4, MICRO_BATCHES)
    cuts = Crossings(emitted.graph, emitted.chain).cuts(emitted.plan)
    sent = run_counted(emitted, monkeypatch)
    assert sum(sent.values()) == 2 * MICRO_BATCHES * len(cuts)
    assert set(sent.values()) == {MICRO_BATCHES}
    for stage, word, rows in sent:
        cut = cuts[stage if word == "F" else stage - 1]
        if word == "F":
            assert [(row.shape, row.dtype, row.bytes) for row in cut.tensors if row.bytes] == list(rows)
        else:
            assert cut.gradient_bytes == sum(size for _, _, size in rows)
            assert all(row.bytes and row.name != "gradient" for row in cut.tensors)  # each gradient was found a tensor


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Emitted:
    """Seven stages: four blocks, the first frozen, a mask and integers for the end, and a skip whose gradient is part of a larger one."""
    folder = tmp_path_factory.mktemp("strange")
    (folder / "strange.py").write_text(STRANGE)
    return emit_model(folder, str(folder / "strange.py"), {}, "keep", 7, MICRO_BATCHES)


def test_each_tensor_is_named_with_what_comes_back_for_it(strange: Emitted) -> None:
    cuts = Crossings(strange.graph, strange.chain).cuts(strange.plan)
    x, wide = 2 * 4 * 8 * 4, 2 * 4 * 16 * 4  # bytes of (2, 4, 8), and of the concatenation whose gradient comes back whole
    for cut in cuts:
        handed = cut.after > 0  # the stages between the first and the last only hand these two on
        assert cut.tensors[-2:] == (
            Crossing("argmax", (2, 4), "int64", Bytes(2 * 4 * 8), Bytes(0), 0, handed),
            Crossing("gt", (2, 4, 8), "bool", Bytes(2 * 4 * 8), Bytes(0), 0, handed),
        )
    assert [[(row.name, row.gradient_bytes, row.made_by, row.passed) for row in cut.tensors[:-2]] for cut in cuts] == [
        [],  # block 0 reads the input itself
        [("blocks.0 add", 0, 1, False)],  # frozen until here
        [("blocks.1 add", x, 2, False)],
        [("blocks.2 add", x, 3, False), ("sin", wide, 3, False)],
        [("blocks.3 add", x, 4, False), ("sin", wide, 3, True)],
        [("Half mm", x, 5, False), ("sin", wide, 3, True)],
    ]


def test_the_schedule_file_names_what_crosses(strange: Emitted) -> None:
    edges = json.loads((strange.module_path.parent / "gpt.schedule.json").read_text())["edges"]
    assert [row["name"] for row in edges[0]["forward"]] == ["argmax", "gt"]
    assert edges[1]["gradients"] == []
    assert sorted(row["name"] for row in edges[4]["gradients"]) == ["blocks.3 add", "sin"]
