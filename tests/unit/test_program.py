"""Cell programs run for real: their lines executed with torch under a byte accountant must use exactly the bytes liveness counts,
and must make exactly the gradients of the recorded graph."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpress.cells import Cell
from mpress.dataflow import Dataflow, alias_source, droppable, study
from mpress.fold import fold
from mpress.graph import Argument, Graph, Name, Op, Phase, Ref
from mpress.lines import build_program, swappable
from mpress.liveness import footprint
from mpress.options import View
from mpress.program import CellProgram, Verb
from mpress.trace.record import trace
from mpress.trace.semantics import Semantics

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")

INPLACE = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = F.relu(self.norm(self.a(x)), inplace=True)
        h = h + self.drop(F.gelu(self.b(h)))
        u, v = h.chunk(2, dim=1)
        w = torch.sigmoid(u) * v
        w = w.mul_(2.0)
        return self.c(torch.tanh(w) + u).square().mean()

def build_model():
    return Net()

def example_inputs(batch=4):
    return (torch.randn(batch, 8),)
"""


class Accountant(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Live bytes of every storage made under it; `peak` is the most since `mark`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in old | set(self.known):
                storage = leaf.untyped_storage()
                self.known[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self.died, storage._cdata)
        self.peak = max(self.peak, self.live)
        return result

    def died(self, key: int) -> None:
        self.live -= self.known.pop(key)

    def mark(self) -> int:
        self.peak = self.live
        return self.live


class Machine:
    """Executes operators of a graph on real tensors; `always` holds parameters, buffers and inputs by tensor id."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors = {tensor.id: tensor for tensor in graph.tensors}
        torch.manual_seed(7)
        self.always = {}
        for parameter in graph.holders:
            self.always[parameter.tensor] = self.random(parameter.tensor)
        for given in graph.inputs:
            info = self.tensors[given.tensor]
            whole = not info.dtype.startswith("float")
            self.always[given.tensor] = torch.randint(given.low, given.high + 1, info.shape) if whole else self.random(given.tensor)
        self.original = {key: value.clone() for key, value in self.always.items()}

    def random(self, tensor: int) -> torch.Tensor:
        info = self.tensors[tensor]
        return torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) if info.dtype == "int64" else 0.1 + torch.rand(info.shape)

    def reset(self) -> None:
        for key, value in self.original.items():
            self.always[key].copy_(value)

    def run(self, op: Op, get: Callable[[int], torch.Tensor]) -> list[Any]:
        """Outputs of one call, as a list; draws are seeded by the op's key."""
        if op.random_key:
            torch.manual_seed(zlib.crc32(op.random_key.encode()))
        _, packet, overload = op.target.split(".")
        function = getattr(getattr(torch.ops.aten, packet), overload)
        result = function(*self.value(op.args, get), **{key: self.value(item, get) for key, item in op.kwargs})
        return list(result) if op.multi else [result]

    def value(self, argument: Argument, get: Callable[[int], torch.Tensor]) -> Any:
        if isinstance(argument, Ref):
            return get(argument.tensor)
        if isinstance(argument, Name):
            return torch.device(argument.value) if argument.group == "device" else getattr(torch, argument.value)
        if isinstance(argument, tuple):
            return [self.value(item, get) for item in argument]
        return argument

    def plain(self) -> dict[str, torch.Tensor]:
        """Gradients from running the recorded graph in order, keeping everything."""
        self.reset()
        env = dict(self.always)
        env[self.graph.seed] = torch.ones(self.tensors[self.graph.seed].shape)
        for op in self.graph.ops:
            results = self.run(op, env.__getitem__)
            env.update({t: r for t, r in zip(op.outputs, results, strict=True) if t >= 0})
        gradients: dict[str, torch.Tensor] = {}
        for contribution in self.graph.contributions:
            value = env[contribution.tensor].clone()
            gradients[contribution.parameter] = gradients.get(contribution.parameter, torch.zeros_like(value)) + value
        return gradients


class Runner:
    """Runs the two functions of a cell program as emitted code would."""

    def __init__(self, machine: Machine, flow: Dataflow, program: CellProgram, gradients: dict[str, torch.Tensor]) -> None:
        self.machine, self.flow, self.program, self.gradients = machine, flow, program, gradients
        self.kept: dict[int, torch.Tensor] = {}
        self.away: dict[int, Any] = {}
        self.locals: dict[int, torch.Tensor] = {}

    def get(self, tensor: int) -> torch.Tensor:
        """The value of a tensor: a local, or views (and in-place results) inlined from one."""
        if tensor in self.machine.always:
            return self.machine.always[tensor]
        if tensor in self.locals:
            return self.locals[tensor]
        op = self.flow.maker[tensor]
        if op.view:
            value = self.machine.run(op, self.get)[op.outputs.index(tensor)]
            assert isinstance(value, torch.Tensor)
            return value
        source = alias_source(op, tensor, self.flow.tensors)
        assert source is not None, f"tensor {tensor} is used after its death"
        return self.get(source)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        self.locals = dict(zip(self.flow.cell.inputs, inputs, strict=True))
        for line in self.program.forward:
            if line.verb in (Verb.SAVE, Verb.SWAP_OUT):
                self.kept.update({t: self.locals[t] for t in line.tensors})
            else:
                self.line(line.verb, line.op, line.tensors)
        results = [self.get(t) for t in self.flow.cell.outputs]
        self.locals = {}
        return results

    def swap_out(self) -> None:
        """The stage frees what was copied away: bytes leave, geometry stays."""
        for tensor in [t for t in self.kept if self.flow.tensors[t].storage in self.program.swap]:
            value = self.kept.pop(tensor)
            raw = bytes(torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).numpy().tobytes())
            self.away[tensor] = (raw, value.dtype, value.size(), value.stride(), value.storage_offset())

    def swap_in(self) -> None:
        for tensor, (raw, dtype, size, stride, offset) in self.away.items():
            flat = torch.empty(len(raw), dtype=torch.uint8)
            flat.numpy()[:] = bytearray(raw)
            self.kept[tensor] = flat.view(dtype).as_strided(size, stride, offset)
        self.away = {}

    def backward(self, gradients: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        self.locals = dict(gradients)
        for line in self.program.backward:
            if line.verb is Verb.LOAD:
                self.locals.update({t: self.kept.pop(t) for t in line.tensors})
            elif line.verb is Verb.GRAD:
                contribution = self.machine.graph.contributions[line.op]
                self.gradients[contribution.parameter].add_(self.get(contribution.tensor))
            else:
                self.line(line.verb, line.op, line.tensors)
        results = [self.get(t) if t >= 0 else None for t in self.flow.cell.gradient_outputs]
        self.locals = {}
        assert not self.kept
        return results

    def line(self, verb: Verb, index: int, tensors: tuple[int, ...]) -> None:
        if verb is Verb.DELETE:
            for tensor in tensors:
                del self.locals[tensor]
            return
        op = self.flow.ops[index]
        saved = {self.flow.tensors[t].storage for t in self.program.saved} if verb is Verb.RECOMPUTE else set()
        for tensor, value in zip(op.outputs, self.machine.run(op, self.get), strict=True):
            if tensor >= 0 and self.flow.tensors[tensor].storage not in saved:
                self.locals[tensor] = value


def whole(graph: Graph) -> Cell:
    """The graph as a single cell."""
    forward = tuple(op.id for op in graph.ops if op.phase is Phase.FORWARD)
    backward = tuple(op.id for op in graph.ops if op.phase is Phase.BACKWARD)
    inputs = tuple(given.tensor for given in graph.inputs)
    names = tuple(parameter.names[0] for parameter in graph.parameters)
    buffers = tuple(buffer.names[0] for buffer in graph.buffers)
    every = tuple(range(len(graph.contributions)))
    return Cell(0, 0, "all", "", forward, backward, (), inputs, names, buffers, (graph.loss,), (graph.seed,), (), every, (), (), ())


def choices(flow: Dataflow) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Modes to try: the corners, every storage dropped or swapped alone, and mixtures."""
    can = flow.natural & flow.rebuildable
    yield frozenset(), frozenset()
    for dropped in (frozenset[int](), can, frozenset(sorted(can)[::2]), frozenset(sorted(can)[1::2])):
        _, extra = flow.closure(dropped)
        left = sorted(swappable(flow, (flow.natural - dropped) | extra))
        for away in (frozenset[int](), frozenset(left), frozenset(left[::2])):
            yield dropped, away
    for storage in sorted(can):
        yield frozenset({storage}), frozenset()


def check(graph: Graph, cells: tuple[Cell, ...], modes: list[tuple[frozenset[int], frozenset[int]]], machine: Machine) -> None:
    """Run all cells forward, then backward, each in its mode; hold bytes and gradients against the truth."""
    truth = machine.plain()
    machine.reset()
    gradients = {name: torch.zeros_like(value) for name, value in truth.items()}
    flows = [study(graph, cell) for cell in cells]
    programs = [build_program(graph, flow.cell, *mode) for flow, mode in zip(flows, modes, strict=True)]
    runners = [Runner(machine, flow, program, gradients) for flow, program in zip(flows, programs, strict=True)]
    wire: dict[int, torch.Tensor] = {}
    with torch.no_grad(), Accountant() as memory:
        for flow, program, runner in zip(flows, programs, runners, strict=True):
            seen = footprint(flow, program)
            inputs = tuple(wire[t] for t in flow.cell.inputs)
            before = memory.mark() - sum(value.untyped_storage().nbytes() for value in inputs)
            outputs = runner.forward(inputs)
            assert memory.peak - before == seen.forward_peak, f"{flow.cell.name} forward"
            wire = dict(zip(flow.cell.outputs, outputs, strict=True))
            del inputs, outputs
            runner.swap_out()
            loose = {value.untyped_storage()._cdata for value in runner.kept.values()}
            made = sum(v.untyped_storage().nbytes() for v in wire.values() if v.untyped_storage()._cdata not in loose)
            assert memory.live - before - made == seen.resident, f"{flow.cell.name} resident"
        wire = {graph.seed: torch.ones(machine.tensors[graph.seed].shape)}
        for flow, program, runner in reversed(list(zip(flows, programs, runners, strict=True))):
            seen = footprint(flow, program)
            assert sum(len(item[0]) for item in runner.away.values()) == seen.swapped
            runner.swap_in()
            arriving = {t: wire[t] for t in flow.cell.gradient_inputs if t >= 0}
            before = memory.mark() - sum(v.untyped_storage().nbytes() for v in arriving.values()) - seen.resident - seen.swapped
            results = runner.backward(arriving)
            assert memory.peak - before == seen.backward_peak, f"{flow.cell.name} backward"
            wire = {t: r for t, r in zip(flow.cell.gradient_outputs, results, strict=True) if r is not None}
            del arriving, results
        wire = {}
        assert memory.live == 0
    for name, value in truth.items():
        assert torch.equal(gradients[name], value), name


@pytest.fixture(scope="module")
def inplace(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(INPLACE)
    return trace(str(path), model_args={}, micro_batch=4, precision="fp32", semantics=Semantics(View.CPU))


@pytest.fixture(scope="module")
def gpt() -> Graph:
    arguments = {"layers": "3", "hidden": "64", "heads": "4", "sequence": "32", "vocabulary": "128"}
    return trace(GPT, model_args=arguments, micro_batch=2, precision="fp32", semantics=Semantics(View.CPU))


@pytest.mark.parametrize("name", ["inplace", "gpt"])
def test_bytes_and_gradients_are_exact_in_every_mode(name: str, request: pytest.FixtureRequest) -> None:
    graph: Graph = request.getfixturevalue(name)
    cell, machine = whole(graph), Machine(graph)
    for mode in choices(study(graph, cell)):
        check(graph, (cell,), [mode], machine)


def test_a_chain_of_cells_is_exact_in_mixed_modes(gpt: Graph) -> None:
    """Cells of one type in different modes; inputs kept, swapped, and rebuilt from."""
    cells, machine = fold(gpt).cells, Machine(gpt)
    flows = [study(gpt, cell) for cell in cells]
    options = [list(choices(flow)) for flow in flows]
    for start in range(max(len(option) for option in options)):
        check(gpt, cells, [option[(start + 3 * i) % len(option)] for i, option in enumerate(options)], machine)


def test_what_is_written_in_place_is_never_recomputed(inplace: Graph) -> None:
    cell = whole(inplace)
    allowed, flow = droppable(inplace, cell), study(inplace, cell)
    written = {inplace.tensors[t].storage for op in inplace.ops for t in op.mutates}
    assert allowed and not allowed & written
    kept = min(flow.natural - allowed)
    with pytest.raises(ValueError, match="cannot be recomputed"):
        build_program(inplace, cell, {kept}, ())
    with pytest.raises(ValueError, match="cannot be swapped"):
        build_program(inplace, cell, {min(allowed)}, {min(allowed)})


def test_recompute_comes_right_before_the_line_that_needs_it(gpt: Graph) -> None:
    cell = whole(gpt)
    flow = study(gpt, cell)
    program = build_program(gpt, cell, droppable(gpt, cell), ())
    verbs = [line.verb for line in program.backward]
    assert Verb.RECOMPUTE in verbs and verbs[-1] is not Verb.DELETE
    rebuilt = [flow.position[line.op] for line in program.backward if line.verb is Verb.RECOMPUTE]
    assert len(set(rebuilt)) == len(rebuilt)
