"""Few recorded layers stand for all: the graph equals the recording of every layer, or every layer is recorded and the reason is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpress.graph import Graph
from mpress.options import Depth
from mpress.peak import step_peak
from mpress.trace.model_file import build, load
from mpress.trace.record import trace
from mpress.trace.recorder import Recorder
from mpress.trace.stacks import find_stacks, truncated
from tiny_models import GPT, gpt_args, write_model

BLOCK = """
    class Block(nn.Module):
        def __init__(self, d=8, p=0.0):
            super().__init__()
            self.norm, self.up, self.down, self.p = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d), p

        def forward(self, x):
            return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p)

    def example_inputs(batch=1):
        return (torch.randn(batch, 4, 8),)

    def loss(out):
        return out.square().mean()
"""
EXACT = {
    "residual stages of equal blocks in Sequential": """
    class Bottleneck(nn.Module):
        def __init__(self, c, stride=1):
            super().__init__()
            self.a, self.b = nn.Conv2d(c // stride, c, 3, stride, 1, bias=False), nn.Conv2d(c, c, 3, 1, 1, bias=False)
            self.na, self.nb = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
            self.short = nn.Conv2d(c // stride, c, 1, stride) if stride > 1 else None

        def forward(self, x):
            y = self.nb(self.b(F.relu(self.na(self.a(x)))))
            return F.relu(y + (x if self.short is None else self.short(x)))

    def build_model():
        stage = lambda c, n, s: nn.Sequential(Bottleneck(c, s), *(Bottleneck(c) for _ in range(n)))
        return nn.Sequential(nn.Conv2d(3, 4, 3), stage(4, 11, 1), stage(8, 10, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    def example_inputs(batch=1):
        return (torch.randn(batch, 3, 10, 10),)

    def loss(out):
        return out.logsumexp(-1).mean()
    """,
    "an encoder and a decoder that reads it": """
    class Cross(Block):
        def __init__(self):
            super().__init__()
            self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)

        def forward(self, x, memory, mask):
            k, v = self.kv(memory).chunk(2, -1)
            return super().forward(x + F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=mask))

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList(Block() for _ in range(12))
            self.decoder = nn.ModuleList(Cross() for _ in range(11))
            self.register_buffer("mask", torch.zeros(4, 4))

        def forward(self, x):
            memory = x
            for layer in self.encoder:
                memory = layer(memory)
            bias = self.mask + 1.0
            for layer in self.decoder:
                x = layer(x, memory, bias)
            return x

    def build_model():
        return Pair()
    """,
    "two kinds of blocks in turn": """
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x):
            return x * self.mix(x.transpose(1, 2)).transpose(1, 2).sigmoid()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.blocks = nn.ModuleList([Block(p=0.1), *(kind() for _ in range(10) for kind in (Mixer, Block)), Mixer(), nn.Linear(8, 8)])

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = F.dropout(block(x), 0.2)
            return x

    def build_model():
        return Net()
    """,
    "mixtures of experts and the sum of their losses": """
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            weight = self.gate(x).softmax(-1)
            y = sum(weight[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
            return x + y, weight.mean((0, 1)).square().sum()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Experts() for _ in range(10))

        def forward(self, x):
            extra = 0.0
            for layer in self.layers:
                x, added = layer(x)
                extra = extra + added
            return x.square().mean() + 0.01 * extra

    def build_model():
        return Net()
    """,
    "the upper layers trained, the lower ones frozen with adapters": """
    class Adapted(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.layer_idx, self.block = index, Block().requires_grad_(index >= 12)
            self.a, self.b = (nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)) if index < 12 else (None, None)

        def forward(self, x):
            return self.block(x) if self.a is None else self.block(x) + self.b(self.a(x))

    def build_model():
        return nn.Sequential(nn.Linear(8, 8).requires_grad_(False), *(Adapted(i) for i in range(23)), nn.LayerNorm(8))
    """,
    "frozen layers below trained ones": """
    def build_model():
        return nn.Sequential(*(Block(p=0.1).requires_grad_(i >= 10) for i in range(21)))
    """,
    "layers numbered, wrapped and written into": """
    class Numbered(Block):
        def __init__(self, layer_idx):
            super().__init__()
            self.layer_idx, self.act = layer_idx, nn.ReLU(inplace=True)

        def forward(self, x):
            return self.act(super().forward(x)), None, [x]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Numbered(i) for i in range(12))
            self.kinds = ["even", "odd"] * 6

        def forward(self, x):
            x = x * 2
            for i, layer in enumerate(self.layers):
                y = layer(x)[0]
                if self.kinds[i] in ("even", "odd"):
                    x = x + y
                    x += 1
                    x[:, 0].mul_(2)
            return x

    def build_model():
        return Net()
    """,
    "layers that share a table": """
    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("angle", torch.ones(4, 8))

        def forward(self, x):
            return x * self.angle.cos()

    class Turned(Block):
        def __init__(self, turn):
            super().__init__()
            self.turn = turn

        def forward(self, x, first=None):
            x = super().forward(self.turn(x))
            return {"x": x if first is None else x + 0.5 * first, "first": x if first is None else first}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            turn = Turn()
            self.layers = nn.ModuleList(Turned(turn) for _ in range(11))

        def forward(self, x):
            first = None
            for layer in self.layers:
                x, first = layer(x, first=first).values()
            return x

    def build_model():
        return Net()
    """,
}

AROUND = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(12))
            self.scales = [1.0] * 7 + [0.5] + [1.0] * 4

        def forward(self, x):
            kept = []
            for i, layer in enumerate(self.layers):
                {body}
            return x {after}

    def build_model():
        return Net()
"""
WHOLE = {
    "a layer treated by its number": (AROUND.format(body="x = layer(x) * 2 if i == 7 else layer(x)", after=""), "called as the first"),
    "a layer treated by its number at the end": (AROUND.format(body="x = layer(x) * (1 if i < 11 else 2)", after=""), "alike"),
    "a layer run twice": (AROUND.format(body="x = layer(x) if i != 8 else layer(layer(x))", after=""), "is not called as"),
    "a layer given something else": (AROUND.format(body="x = layer(x if i != 8 else x + 1)", after=""), "called as the first"),
    "a table of factors by layer": (AROUND.format(body="x = layer(x) * self.scales[i]", after=""), "alike"),
    "results of some layers kept": (
        AROUND.format(body="x = layer(x); kept += [x] if i in (1, 9) else []", after="+ sum(kept)"), ""),
    "results of all layers kept": (AROUND.format(body="x = layer(x); kept.append(x)", after="+ torch.stack(kept).mean(0)"), ""),
    "the number of layers in the forward": (AROUND.format(body="x = layer(x) / len(self.layers)", after=""), "do not agree"),
    "a part of a layer called from outside": (AROUND.format(body="x = layer(layer.norm(x))", after=""), "reaches into its layers"),
    "layers called in another order": (AROUND.format(body="x = self.layers[-1 - i](x)", after=""), "do not run one after the other"),
    "the same layers run twice": (AROUND.format(body="x = layer(x)", after="+ nn.Sequential(*self.layers)(x)"), ""),
    "a layer that asks for its number": ("""
    class Asking(Block):
        def __init__(self, layer_idx):
            super().__init__()
            self.layer_idx = layer_idx

        def forward(self, x):
            return super().forward(x) * (2 if self.layer_idx > 8 else 1)

    def build_model():
        return nn.Sequential(*(Asking(i) for i in range(12)))
    """, "the forward uses 'layer_idx' (`return super().forward(x) * (2 if self.layer_idx > 8 else 1)`) (model.py:"),
    "layers that share weights": ("""
    def build_model():
        model = nn.Sequential(*(Block() for _ in range(12)))
        for layer in model:
            layer.up.weight = model[0].up.weight
        return model
    """, ""),
    "one module many times": ("""
    def build_model():
        return nn.Sequential(*[Block()] * 12)
    """, "none repeat"),
    "another rate in every layer": ("""
    def build_model():
        return nn.Sequential(*(Block(p=0.01 * i) for i in range(12)))
    """, "none repeat"),
    "a forward put on one layer": ("""
    def build_model():
        model = nn.Sequential(*(Block() for _ in range(12)))
        model[5].forward = lambda x: model[5].norm(x)
        for part in (model[5].up, model[5].down):
            part.requires_grad_(False)
        return model
    """, "none repeat"),
    "few layers": ("""
    def build_model():
        return nn.Sequential(*(Block() for _ in range(9)))
    """, "none repeat"),
}  # fmt: skip


def _both(path: str, args: dict[str, str] | None = None) -> tuple[Graph, Graph, str]:
    """The graph from few layers, that of all layers, and how the first was made."""
    notes: list[str] = []
    fast = trace(path, model_args=args or {}, micro_batch=2, precision="fp32", on_note=notes.append)
    full = trace(path, model_args=args or {}, micro_batch=2, precision="fp32", depth=Depth.FULL)
    return fast, full, notes[0]


def _assert_equal(fast: Graph, full: Graph) -> None:
    for one, two in zip(fast.ops, full.ops, strict=False):
        assert one == two
    assert fast == full


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"dropout": 0.1}, {"layers": 25, "tied": False, "dropout": 0.1}])
def test_a_gpt_of_few_recorded_layers_is_the_whole_gpt(changes: dict[str, object]) -> None:
    fast, full, note = _both(GPT, gpt_args(**{"layers": 13, **changes}))
    assert note == f"recorded 4 of {changes.get('layers', 13)} layers in 'h'"
    _assert_equal(fast, full)


@pytest.mark.parametrize("name", EXACT)
def test_few_recorded_layers_are_the_whole_model(tmp_path: Path, name: str) -> None:
    fast, full, note = _both(write_model(tmp_path, BLOCK + EXACT[name]))
    assert note.startswith(("recorded 4 of ", "recorded 6 of ")), note
    _assert_equal(fast, full)
    assert step_peak(fast) == step_peak(full)


@pytest.mark.parametrize("name", WHOLE)
def test_where_few_layers_cannot_stand_for_all_every_layer_is_recorded(tmp_path: Path, name: str) -> None:
    body, reason = WHOLE[name]
    fast, full, note = _both(write_model(tmp_path, BLOCK + body))
    assert note.startswith("all layers recorded") and reason in note, note
    _assert_equal(fast, full)


def test_the_peak_may_move_with_depth() -> None:
    """A peak is not a line over the layers: at 10 layers it is in the loss, at 40 at the end of the backward."""
    sizes = {"hidden": 64, "sequence": 24, "vocabulary": 600, "dropout": 0.0, "tied": False}
    places = set()
    for layers in (10, 40):
        fast, full, note = _both(GPT, gpt_args(**{"layers": layers, **sizes}))
        assert note.startswith("recorded 4")
        assert step_peak(fast) == step_peak(full)
        op = fast.ops[step_peak(fast).op]
        places.add((op.phase, op.target))
    assert len(places) == 2


@pytest.mark.parametrize("layers", [12, 14])
def test_checkpointed_layers_are_counted(tmp_path: Path, layers: int) -> None:
    body = f"""
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block(p=0.1) for _ in range({layers}))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    def build_model():
        return Net()
    """
    fast, full, note = _both(write_model(tmp_path, BLOCK + body))
    assert note.startswith("recorded"), note
    assert fast.checkpoints == layers
    _assert_equal(fast, full)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    body = """
    class Counting(Block):
        calls = 0

        def forward(self, x):
            self.calls += 1
            self.last = x
            return super().forward(x)

    def build_model():
        return nn.Sequential(*(Counting() for _ in range(12)))
    """
    model_file = load(write_model(tmp_path, BLOCK + body), {})
    model: Any = build(model_file)
    children, state = list(model), {name: id(p) for name, p in model.named_parameters()}
    for kept in (3, 4):
        with truncated(model, find_stacks(model), kept):
            assert len(list(model)) == kept
            model[1].calls = 7
            model[0].norm.weight = torch.nn.Parameter(torch.ones(8))
    assert list(model) == children and "calls" not in vars(model[1])
    assert {name: id(p) for name, p in model.named_parameters()} == state


def test_recording_few_layers_costs_the_same_for_any_number() -> None:
    """Calls of operators while tracing: what grows with the layers is building them, not recording them."""
    counts = {}
    for layers in (12, 48):
        counted = 0
        plain = Recorder.__torch_dispatch__

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal counted
            counted += 1
            return plain(self, *args, **kwargs)  # noqa: B023  # called in this turn only

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recorder, "__torch_dispatch__", counting)
            trace(GPT, model_args=gpt_args(layers=layers), micro_batch=2, precision="fp32")
        counts[layers] = counted
    assert 0 <= counts[48] - counts[12] < 36 * 10 < counts[12]  # a recorded layer takes more than 200
