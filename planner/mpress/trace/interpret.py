"""Runs a Graph on real tensors, op by op, and holds every result against what the graph says of it.

The state handed in is used itself: operators that write into a buffer write into the given tensor.  A storage is freed after its last
use.  Random operators draw from the default generator in the order of the graph; what the user's checkpoint repeats draws as it drew the
first time.  The graph must be one a CPU can run: recorded as the CPU runs the step, or without operators of GPUs only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mpress.errors import InputError
from mpress.graph import Argument, Graph, Kind, Name, Op, Phase, Ref, reads
from mpress.trace.literals import TARGET as LITERAL
from mpress.trace.literals import literal

Results = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Interpreted:
    """What the graph computes.  gradients and buffers go by canonical name; saved_bytes: real bytes of the storages it calls saved."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    saved_bytes: int


def interpret(
    graph: Graph,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    seed: int,
    watch: Callable[[Op, Results], None] | None = None,
) -> Interpreted:
    """Run forward, loss and backward; `watch` sees the results of every op.  The generator is left as it was.

    State goes by canonical name, inputs by their names in the graph.  A buffer that is not given gets its first value from Graph.setup.
    Raises InputError("proof") at the first op whose result contradicts the graph.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        given = dict(buffers)
        if any(item.names[0] not in given for item in graph.buffers):
            given = first_buffers(graph) | given
        run = _Run(graph, graph.ops)
        for parameter in graph.parameters:
            run.give(parameter.tensor, parameters[parameter.names[0]].detach())
        for buffer in graph.buffers:
            run.give(buffer.tensor, given[buffer.names[0]])
        for item in graph.inputs:
            run.give(item.tensor, inputs[item.name])
        torch.manual_seed(seed)
        for op in graph.ops:
            if op.phase is Phase.BACKWARD and graph.seed not in run.values:
                run.give(graph.seed, torch.ones_like(run.values[graph.loss]))
            results = run.call(op)
            if watch is not None:
                watch(op, results)
            run.free(op)
        gradients: dict[str, torch.Tensor] = {}
        for contribution in graph.contributions:
            part = run.values[contribution.tensor]
            known = gradients.get(contribution.parameter)
            gradients[contribution.parameter] = part if known is None else known + part
    loss = graph.tensors[graph.loss].storage
    return Interpreted(
        loss=run.values[graph.loss],
        gradients=gradients,
        buffers={buffer.names[0]: run.values[buffer.tensor] for buffer in graph.buffers},
        saved_bytes=sum(run.bytes.get(s.id, 0) for s in graph.storages if s.saved and s.kind is Kind.COMPUTED and s.id != loss),
    )


def first_buffers(graph: Graph) -> dict[str, torch.Tensor]:
    """The first values of those buffers whose value building the model tells, made by Graph.setup."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        run = _Run(graph, graph.setup)
        for op in graph.setup:
            run.call(op)
        return {buffer.names[0]: run.values[buffer.initial] for buffer in graph.buffers if buffer.initial >= 0}


def place_of(op: Op) -> str:
    """ "gpt.py:22, module 'h.0.attn'" of an op, as far as it is known."""
    return ", ".join(part for part in (op.source.place(), f"module '{op.module}'" if op.module else "") if part) or "the step's own code"


def contradiction(op: Op, number: int, what: str) -> InputError:
    """The refusal of a graph that does not say what the step does, naming the op."""
    code = f": `{op.source.code}`" if op.source.code else ""
    kind = "forward" if op.phase is Phase.FORWARD else "backward"
    return InputError(
        "proof",
        f"the recorded step is not the real one: operator {number} ({op.target}, {kind}){code} {what}",
        place_of(op),
        "do not branch on the type of tensors, on Python state or on Python's random numbers; --no-prove plans without this check",
    )


def function_of(target: str) -> Any:
    """The operator "aten.addmm.default" names."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


class _Run:
    """Values of tensors by id while a list of ops runs."""

    def __init__(self, graph: Graph, ops: tuple[Op, ...]) -> None:
        self._graph = graph
        self.values: dict[int, torch.Tensor] = {}
        self.bytes: dict[int, int] = {}  # of every storage made so far
        self._tensors: dict[int, list[int]] = {}  # living storages: the tensors that have a value there
        self._addresses: dict[int, int] = {}  # address of a living storage -> its id in the graph
        self._last = {graph.tensors[t].storage: op.id for op in ops for t in (*reads(op), *op.outputs) if t >= 0}
        kept = [graph.loss, graph.seed, *(h.tensor for h in graph.holders), *(i.tensor for i in graph.inputs)]
        kept += [contribution.tensor for contribution in graph.contributions]
        self._kept = {graph.tensors[t].storage for t in kept}
        repeated = {op.repeats for op in ops if op.repeats >= 0}
        self._draws: dict[int, torch.Tensor] = {}
        self._rewound = {op.id for op in ops if op.id in repeated and op.random_key}

    def give(self, tensor: int, value: torch.Tensor) -> None:
        """A value that no op makes."""
        self.values[tensor] = value
        self._settle(tensor, value)

    def call(self, op: Op) -> Results:
        """Run one op and keep its results."""
        try:
            function = literal if op.target == LITERAL else function_of(op.target)
        except AttributeError:
            raise contradiction(op, op.id, "does not exist in this build of torch") from None
        missing = next((t for t in reads(op) if t not in self.values), None)
        if missing is not None:
            raise contradiction(op, op.id, f"reads tensor {missing}, which nothing has made")
        state = self._before(op)
        try:
            result = function(*[self._value(a) for a in op.args], **{key: self._value(a) for key, a in op.kwargs})
        except Exception as error:
            said = str(error).strip().splitlines()
            raise contradiction(op, op.id, f"fails on real tensors: {type(error).__name__}: {said[0] if said else ''}") from None
        finally:
            if state is not None:
                torch.set_rng_state(state)
        results = tuple(item if isinstance(item, torch.Tensor) else None for item in (result if op.multi else (result,)))
        if len(results) != len(op.outputs):
            raise contradiction(op, op.id, f"returns {len(results)} results where the graph has {len(op.outputs)}")
        for tensor, value in zip(op.outputs, results, strict=True):
            self._keep(op, tensor, value)
        return results

    def free(self, op: Op) -> None:
        """Forget the storages that this op used last."""
        for tensor in (*reads(op), *op.outputs):
            if tensor < 0:
                continue
            storage = self._graph.tensors[tensor].storage
            if storage in self._kept or self._last[storage] != op.id or storage not in self._tensors:
                continue
            living = self._tensors.pop(storage)
            self._addresses.pop(self.values[living[0]].untyped_storage()._cdata, None)
            for item in living:
                self.values.pop(item, None)

    def _before(self, op: Op) -> torch.Tensor | None:
        """Note the generator before a draw that will be repeated; rewind it for the repetition and return the state to go back to."""
        if op.id in self._rewound:
            self._draws[op.id] = torch.get_rng_state()
        if op.repeats in self._draws:
            now = torch.get_rng_state()
            torch.set_rng_state(self._draws[op.repeats])
            return now
        return None

    def _keep(self, op: Op, tensor: int, value: torch.Tensor | None) -> None:
        if tensor < 0:
            return  # undefined, or a result nobody asked for
        said = self._graph.tensors[tensor]
        if value is None:
            raise contradiction(op, op.id, f"returns no tensor where the graph has one of shape {_words(said.shape)}")
        found, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        if (found, dtype) != (said.shape, said.dtype):
            raise contradiction(op, op.id, f"returns {_words(found)} {dtype}, expected {_words(said.shape)} {said.dtype}")
        strides = [(a, b) for size, a, b in zip(found, value.stride(), said.stride, strict=True) if size > 1]
        if value.numel() > 0 and (any(a != b for a, b in strides) or value.storage_offset() != said.offset):
            raise contradiction(op, op.id, f"lays its result out with strides {tuple(value.stride())}, expected {said.stride}")
        self.values[tensor] = value
        wrong = self._settle(tensor, value)
        if wrong:
            raise contradiction(op, op.id, wrong)

    def _settle(self, tensor: int, value: torch.Tensor) -> str:
        """Note whose memory a value is; words if the graph says otherwise."""
        storage, memory = self._graph.tensors[tensor].storage, value.untyped_storage()
        known = self._addresses.get(memory._cdata)
        if storage in self._tensors:
            self._tensors[storage].append(tensor)
            return "" if known == storage else "returns new memory, expected a view of older memory"
        if known is not None:
            owner = self._graph.tensors[self._tensors[known][0]].name or "a result"
            return f"returns a view of older memory ({owner}), expected new memory"
        self._tensors[storage] = [tensor]
        self._addresses[memory._cdata] = storage
        self.bytes[storage] = memory.nbytes()
        return ""

    def _value(self, argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return self.values[argument.tensor]
        if isinstance(argument, Name):
            return torch.device(argument.value) if argument.group == "device" else getattr(torch, argument.value)
        if isinstance(argument, tuple):
            return [self._value(item) for item in argument]
        return argument


def _words(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
