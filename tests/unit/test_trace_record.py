"""The recorded graph against real runs on CPU: values, gradients, saved bytes, peak; and what the graph says about itself."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mpress.graph import Graph, Kind, Phase, reads
from mpress.options import View
from mpress.trace.fx_export import to_fx
from mpress.trace.model_file import example_inputs, load
from mpress.trace.record import trace
from mpress.trace.semantics import Semantics
from tiny_models import GPT, gpt_args, write_model

BATCH = 3


ON_CPU = Semantics(View.CPU)


def _graph(semantics: Semantics = ON_CPU, **changes: object) -> Graph:
    return trace(GPT, model_args=gpt_args(**changes), micro_batch=BATCH, precision="fp32", semantics=semantics)


def _real(**changes: object) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The same model with real weights."""
    model_file = load(GPT, gpt_args(**changes))
    torch.manual_seed(1)
    module: torch.nn.Module = model_file.factory(**model_file.arguments)
    return module.train(), example_inputs(model_file, BATCH)[0]


def _run_graph(graph: Graph, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    state = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        holders = [state[p.names[0]] for p in graph.parameters] + [buffers[b.names[0]] for b in graph.buffers]
        loss, parts = to_fx(graph)(*holders, *inputs, torch.ones(()))
    sums: dict[str, torch.Tensor] = {}
    for contribution, part in zip(graph.contributions, parts, strict=True):
        sums[contribution.parameter] = sums[contribution.parameter] + part if contribution.parameter in sums else part
    return loss, sums


@pytest.mark.parametrize(("dropout", "tied"), [(0.0, True), (0.0, False), (0.3, True)])
def test_the_graph_computes_what_the_model_computes(dropout: float, tied: bool) -> None:
    module, inputs = _real(dropout=dropout, tied=tied)
    torch.manual_seed(7)
    expected = module(*inputs)
    expected.backward()
    torch.manual_seed(7)
    loss, gradients = _run_graph(_graph(dropout=dropout, tied=tied), module, inputs)
    assert torch.equal(loss, expected)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-7 if name == "wte.weight" else 0)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Peak bytes of storages made under the mode."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.live, self.peak = known, dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in self.known | set(self.live):
                storage = item.untyped_storage()
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def _measure(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Bytes autograd saves (parameters and inputs aside) and the peak of live bytes of one real step."""
    known = {t.untyped_storage()._cdata for t in (*module.parameters(), *inputs)}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    mode = _LiveBytes(known)
    with mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(*inputs)
        held = dict(saved)
        loss.backward()
    return sum(held.values()), mode.peak


def _peak(graph: Graph) -> int:
    """Live bytes if every computed storage dies after its last use; gradients of parameters and the loss stay."""
    kept = {graph.tensors[t].storage for t in (graph.loss, graph.seed, *(c.tensor for c in graph.contributions))}
    last = {graph.tensors[t].storage: op.id for op in graph.ops for t in (*reads(op), *op.outputs) if t >= 0}
    live = {graph.tensors[graph.seed].storage}
    peak = 0
    for op in graph.ops:
        used = {graph.tensors[t].storage for t in (*reads(op), *op.outputs) if t >= 0}
        live |= {s for s in used if graph.storages[s].kind is Kind.COMPUTED}
        peak = max(peak, sum(graph.storages[s].bytes for s in live))
        live -= {s for s in used if last[s] == op.id and s not in kept}
    return peak


def test_saved_bytes_and_peak_equal_a_real_run() -> None:
    size: dict[str, object] = {"hidden": 32, "sequence": 24, "vocabulary": 96, "tied": False}
    graph = _graph(ON_CPU, **size)
    saved, peak = _measure(*_real(**size))
    assert sum(s.bytes for s in graph.storages if s.saved and s.kind is Kind.COMPUTED) == saved
    assert abs(_peak(graph) - peak) <= 16  # the seed of the backward is counted from the start


def test_ties_are_one_parameter() -> None:
    tied, untied = _graph(), _graph(tied=False)
    assert tied.parameters[0].names == ("wte.weight", "lm_head.weight")
    assert sum(p.elements for p in untied.parameters) - sum(p.elements for p in tied.parameters) == 32 * 16
    assert [c.parameter for c in tied.contributions].count("wte.weight") == 2
    assert {c.parameter for c in tied.contributions} == {p.names[0] for p in tied.parameters}
    for contribution in tied.contributions:
        parameter = next(p for p in tied.parameters if p.names[0] == contribution.parameter)
        assert tied.tensors[contribution.tensor].shape == tied.tensors[parameter.tensor].shape


def test_every_op_says_where_it_comes_from() -> None:
    graph = _graph(Semantics(), dropout=0.1)
    for op in graph.ops:
        assert op.source.file == "gpt.py" and op.source.line > 0
        if op.phase is Phase.BACKWARD and op.forward_op < 0:
            assert op.target == "aten.add.Tensor"  # the engine's sums of gradients differentiate nothing
        if op.view:
            assert op.flops == 0.0 and op.bytes_moved == 0
    draws = [op.random_key for op in graph.ops if op.random_key]
    assert draws == ["drop#0", "h.0.drop_1#0", "h.0.drop_2#0", "h.1.drop_1#0", "h.1.drop_2#0"]
    assert [(i.name, i.low >= 0, i.high < 32) for i in graph.inputs] == [("tokens", True, True), ("targets", True, True)]


def test_flops_equal_torch_s_counter() -> None:
    graph = _graph()
    module, inputs = _real()
    counter = FlopCounterMode(display=False)
    with counter:
        module(*inputs).backward()
    attention = sum(op.flops for op in graph.ops if "attention" in op.target)  # the CPU kernel is not in torch's registry
    assert sum(op.flops for op in graph.ops) - attention == counter.get_total_flops()
    assert attention == 2 * (2 + 5) * 2 * BATCH * 8 * 8 * 16


def test_precision_casts_the_model() -> None:
    graph = trace(GPT, model_args=gpt_args(), micro_batch=1, precision="bf16")
    assert {graph.tensors[p.tensor].dtype for p in graph.parameters} == {"bfloat16"}
    assert {graph.tensors[i.tensor].dtype for i in graph.inputs} == {"int64"}
    assert graph.tensors[graph.loss].dtype == "bfloat16"


def test_in_place_and_dictionary_inputs(tmp_path: Path) -> None:
    body = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), 2.0))

        def forward(self, x, bias=None, flag=False):
            y = self.a(x) * self.scale
            y += x
            return (y.relu_() + torch.tensor(0.5)).square().mean()

    def build_model():
        return Net()

    def example_inputs(batch=1):
        return {"x": torch.randn(batch, 4), "bias": None}
    """
    graph = trace(write_model(tmp_path, body), model_args={}, micro_batch=BATCH, precision="fp32", semantics=ON_CPU)
    written = [op for op in graph.ops if op.mutates]
    assert [op.target for op in written] == ["aten.add_.Tensor", "aten.relu_.default"]
    for op in written:  # the result is the tensor that was written (mpress.in_place)
        assert graph.tensors[op.outputs[0]].storage == graph.tensors[op.mutates[0]].storage
        assert op.outputs == op.mutates and op.outputs[0] in reads(op) and not op.view
    assert [b.names for b in graph.buffers] == [("scale",)]
    module: Any = load(str(tmp_path / "model.py"), {}).factory()
    x = torch.randn(BATCH, 4)
    expected = module(x)
    expected.backward()
    loss, gradients = _run_graph(graph, module, (x,))
    assert torch.equal(loss, expected) and torch.equal(gradients["a.weight"], module.a.weight.grad)


_SCRIPT = f"""
import hashlib
from mpress.fold import fold
from mpress.trace.record import trace
graph = trace({GPT!r}, model_args={gpt_args(dropout=0.1)!r}, micro_batch=2, precision="bf16")
print(hashlib.sha256((repr(graph) + repr(fold(graph))).encode()).hexdigest())
"""


def test_the_graph_does_not_depend_on_hash_order_or_directory(tmp_path: Path) -> None:
    paths = os.pathsep.join(sys.path)
    digests = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed, folder in (("1", tmp_path), ("2", Path(GPT).parent))
    }
    assert len(digests) == 1 and len(digests.pop()) == len(hashlib.sha256().hexdigest()) + 1
