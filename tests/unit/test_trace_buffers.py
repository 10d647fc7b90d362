"""First values of buffers: Graph.setup, run for real, must give what the user's constructor gives on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpress.errors import InputError
from mpress.graph import Argument, Graph, Kind, Name, Ref
from mpress.trace.record import trace
from tiny_models import write_model

FORWARD = """
        self.lin = nn.Linear(4, 4)
    def forward(self, x):
        y = self.lin(x)
        for name, b in self.named_buffers():
            if b.is_floating_point():
                y = y + b.sum()
        return y.square().mean()
def build_model():
    return Net()
def example_inputs(batch=1):
    return (torch.randn(batch, 4),)
"""
HEAD = "import math, copy\nimport numpy as np\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"

KNOWN = {
    "causal mask": 'self.register_buffer("mask", torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6))',
    "literal": 'self.register_buffer("table", torch.tensor([[1.0, float("inf")], [-3.5, 4.0]]))',
    "integers": 'self.register_buffer("ids", torch.arange(7).expand(1, -1))',
    "numpy": 'self.register_buffer("n", torch.from_numpy(np.linspace(0, 1, 5)) * torch.arange(5))',
    "legacy constructor": 'self.register_buffer("n", torch.FloatTensor([1, 2, 3]) + torch.arange(3))',
    "rotary": 'self.register_buffer("inv", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)',
    "table written in slices": """
        pe = torch.empty(6, 8)
        angle = torch.arange(6).unsqueeze(1) * torch.exp(torch.arange(0, 8, 2) * (-math.log(1e4) / 8))
        pe[:, 0::2] = torch.sin(angle)
        pe[:, 1::2] = torch.cos(angle)
        self.register_buffer("pe", pe.unsqueeze(0))""",
    "overwritten random values": 'self.register_buffer("w", torch.rand(3)); nn.init.constant_(self.w, 2.0)',
    "assigned twice": 'self.register_buffer("w", torch.rand(3)); self.w = torch.ones(3) * 2',
    "data assigned": 'self.register_buffer("w", torch.rand(3)); self.w.data = torch.arange(3.0)',
    "read before it is overwritten": 'y = torch.zeros(4); z = y + 1; y.fill_(7); self.register_buffer("w", y * z)',
    "a view of another buffer": 'self.register_buffer("w", torch.eye(3).cumsum(0)); self.register_buffer("v", self.w.t()[1:])',
    "half": 'self.register_buffer("w", torch.arange(5.0) / 3); self.half(); self.float()',
    "item": 'self.register_buffer("w", torch.tensor([x.item() for x in torch.linspace(0, 0.3, 4)]))',
    "tensors in a list": 'self.register_buffer("w", torch.tensor([torch.linspace(0, 1, 3)[1], 2]))',
    "numpy of a tensor": 'self.register_buffer("w", torch.tensor(torch.arange(4.0).numpy() ** 2))',
    "shapes of values": 'x = torch.arange(9.0); self.register_buffer("w", x[x % 2 == 1]); self.register_buffer("k", torch.nonzero(x > 3))',
    "deep copies": "self.norms = nn.ModuleList(copy.deepcopy(nn.BatchNorm1d(4, affine=False)) for _ in range(2))",
    "made on the cpu": 'self.register_buffer("w", torch.arange(4, device="cpu").cpu() * 2)',
    "swin's table": """
        grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
        offsets = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
        offsets[:, :, 0] += 2
        offsets[:, :, 1] += 2
        offsets[:, :, 0] *= 5
        self.register_buffer("index", offsets.sum(-1))""",
}


def _value(argument: Argument, values: dict[int, Tensor]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.tensor]
    if isinstance(argument, Name):
        return getattr(torch, argument.value)
    if isinstance(argument, tuple):
        return [_value(item, values) for item in argument]
    return argument


def made(graph: Graph) -> dict[str, Tensor]:
    """Run the setup operators; buffers with a value by every name."""
    values: dict[int, Tensor] = {}
    for op in graph.setup:
        args = [_value(a, values) for a in op.args]
        if op.target == "mpress.literal.default":
            result = torch.tensor(args[1], dtype=args[2]).reshape(args[0])
        else:
            _, name, overload = op.target.split(".")
            result = getattr(getattr(torch.ops.aten, name), overload)(*args, **{key: _value(a, values) for key, a in op.kwargs})
        values.update(zip(op.outputs, result if op.multi else [result], strict=True))
    return {name: values[b.initial] for b in graph.buffers for name in b.names if b.initial >= 0}


def build(path: str) -> nn.Module:
    spec = importlib.util.spec_from_file_location("user_net", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.build_model()
    return model


def record(folder: Path, body: str, precision: str = "fp32") -> tuple[Graph, nn.Module]:
    path = write_model(folder, HEAD + "        " + body + FORWARD)
    return trace(path, model_args={}, micro_batch=2, precision=precision), build(path)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(KNOWN))
def test_setup_makes_what_the_constructor_makes(tmp_path: Path, name: str, precision: str) -> None:
    graph, model = record(tmp_path, KNOWN[name], precision)
    found = made(graph)
    model.to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[precision]))
    expected = dict(model.named_buffers())
    assert expected and set(found) == set(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


UNKNOWN = {
    "drawn at random": 'self.register_buffer("w", torch.randn(3), persistent=P)',
    "computed from random values": 'self.register_buffer("w", torch.randn(3).abs() + 1, persistent=P)',
    "computed from a weight": 'self.register_buffer("w", nn.Linear(3, 3).weight.sum(0), persistent=P)',
    "random and real": 'self.register_buffer("w", torch.Tensor(3).uniform_(), persistent=P)',
    "random, of a random real": 'self.register_buffer("w", torch.Tensor(3).uniform_() * torch.arange(3), persistent=P)',
    "left uninitialised": 'self.register_buffer("w", torch.empty(3), persistent=P)',
    "half written": 'self.register_buffer("w", torch.empty(3), persistent=P); self.w[1:].zero_()',
    "a big table of Python values": 'self.register_buffer("w", torch.tensor(np.arange(5000.0)), persistent=P)',
}


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_a_value_nobody_knows_is_left_to_the_state_dict(tmp_path: Path, name: str) -> None:
    graph, _ = record(tmp_path, UNKNOWN[name].replace("P", "True"))
    assert [b.initial for b in graph.buffers] == [-1] and graph.buffers[0].persistent and graph.setup == ()
    with pytest.raises(InputError, match=r"'w' is not part of the state_dict") as caught:
        record(tmp_path, UNKNOWN[name].replace("P", "False"))
    assert caught.value.code == "buffer"


def test_only_what_buffers_need_is_kept(tmp_path: Path) -> None:
    graph, _ = record(tmp_path, 'big = nn.Linear(64, 64); nn.init.zeros_(big.bias); self.register_buffer("w", torch.zeros(3) + 1)')
    assert [op.target for op in graph.setup] == ["aten.zeros.default", "aten.add.Tensor"]
    assert all(op.source.file == "model.py" and "register_buffer" in op.source.code for op in graph.setup)
    assert [s.bytes for s in graph.storages if s.kind is Kind.SETUP] == [12, 12]


def test_one_tensor_under_two_names_is_one_buffer(tmp_path: Path) -> None:
    body = 't = torch.ones(4); self.register_buffer("a", t); self.l = nn.Linear(1, 1, bias=False); self.l.requires_grad_(False); '
    graph, _ = record(tmp_path, body + 'self.l.register_buffer("b", t, persistent=False)')
    assert [(b.names, b.persistent) for b in graph.buffers] == [(("a", "l.b"), True)]


def test_a_constructor_that_reads_random_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="reads a tensor that is drawn at random") as caught:
        record(tmp_path, "n = int(torch.rand(()).item() * 4) + 1")
    assert caught.value.code == "model-file" and caught.value.where == "model.py:9"


def test_written_buffers_may_not_share_memory(tmp_path: Path) -> None:
    body = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.lin = nn.Linear(4, 4)\n"
    body += '        self.register_buffer("a", torch.zeros(4))\n        self.register_buffer("b", self.a[:2])\n'
    body += "    def forward(self, x):\n        self.a += 1\n        return (self.lin(x) * self.b.sum()).mean()\n"
    path = write_model(tmp_path, body + FORWARD[FORWARD.index("def build_model") :])
    with pytest.raises(InputError, match="'a' is written in the forward and shares its memory with 'b'") as caught:
        trace(path, model_args={}, micro_batch=2, precision="fp32")
    assert caught.value.code == "buffer"


def test_batch_statistics_are_an_assumption_and_written(tmp_path: Path) -> None:
    body = "class Net(nn.Sequential):\n    def forward(self, x):\n        return super().forward(x).square().mean()\n"
    body += "def build_model(frozen=False):\n    m = Net(nn.Linear(4, 4), nn.BatchNorm1d(4))\n    m.train = lambda mode=True: m\n"
    path = write_model(
        tmp_path, body + "    m[1].training = not frozen\n    return m\ndef example_inputs(batch=1):\n    return (torch.randn(batch, 4),)\n"
    )
    graph = trace(path, model_args={}, micro_batch=3, precision="fp32")
    names = {graph.tensors[b.tensor].storage: b.names[0] for b in graph.buffers}
    written = [names[graph.tensors[t].storage] for op in graph.ops for t in op.mutates]
    assert written == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert len(graph.assumptions) == 1 and "micro-batches of 3 samples" in graph.assumptions[0]
    frozen = trace(path, model_args={"frozen": "true"}, micro_batch=3, precision="fp32")
    assert not any(op.mutates for op in frozen.ops) and frozen.assumptions == ()
