"""From a recording to the frozen Graph: dense ids, gradient sums of parameters taken apart, the engine's own bookkeeping left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mpress.graph import Argument, Buffer, Contribution, Graph, Input, Op, Parameter, Phase, Ref, Storage, Tensor, reads, references
from mpress.trace.calls import Call
from mpress.trace.ledger import Memory
from mpress.trace.lifetimes import Lifetimes
from mpress.trace.recorder import Recorder
from mpress.units import Bytes, Flops


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter or buffer: its names (canonical first), recorder value, whether it is trained, number of elements."""

    names: tuple[str, ...]
    value: int
    trainable: bool
    elements: int


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor of the example inputs; low..high is the range (inclusive) of an integer input."""

    name: str
    value: int
    low: int
    high: int


def lower(
    model: str,
    micro_batch: int,
    recorder: Recorder,
    parameters: tuple[Named, ...],
    buffers: tuple[Named, ...],
    inputs: tuple[Given, ...],
    loss: int,
    arrived: tuple[tuple[str, int], ...],
) -> Graph:
    """Freeze a recording.  `loss` is the loss's value; `arrived` are the gradients that reached parameters, as (name, value)."""
    calls = recorder.calls
    producer = {output: number for number, call in enumerate(calls) for output in call.outputs if output >= 0}
    uses = Counter(t for call in calls for t in _operands(call))
    uses.update(value for _, value in arrived)
    dropped = {number for number, call in enumerate(calls) if call.engine}
    addends: list[tuple[int, str, int]] = []
    for name, value in arrived:
        for part in _addends(value, calls, producer, uses, dropped):
            addends.append((producer.get(part, -1), name, part))
    kept = [number for number in range(len(calls)) if number not in dropped]
    ids = _Numbers(recorder)
    for named in parameters + buffers:
        ids.tensor(named.value)
    for item in inputs:
        ids.tensor(item.value)
    ids.tensor(loss)
    ids.tensor(recorder.seed)
    op_ids = {number: index for index, number in enumerate(kept)}
    # what owns no memory and is never used is no output: flash attention's debug mask
    idle = {o for call in calls for o in call.outputs if o >= 0 and not uses[o] and not recorder.memories[recorder.values[o].storage].bytes}
    ops = tuple(_op(op_ids[number], calls[number], op_ids, ids, idle - {loss}) for number in kept)
    contributions = tuple(Contribution(name, ids.tensor(part)) for _, name, part in sorted(addends))
    read_later = {ids.tensors[t].storage for op in ops if op.phase is Phase.BACKWARD for t in reads(op)}
    made_before = {ids.tensors[t].storage for op in ops if op.phase is Phase.FORWARD for t in op.outputs if t >= 0}
    lifetimes = Lifetimes(len(calls), op_ids, ids.memories, recorder.memories)
    storages = tuple(
        Storage(
            id=index,
            bytes=Bytes(memory.bytes),
            kind=memory.kind,
            saved=memory.packed or (index in read_later and index in made_before),
            born=lifetimes.born(memory),
            dies=lifetimes.dies(memory),
        )
        for index, memory in enumerate(ids.memories)
    )
    return Graph(
        model=model,
        micro_batch=micro_batch,
        ops=ops,
        tensors=tuple(ids.tensors),
        storages=storages,
        parameters=tuple(Parameter(p.names, ids.tensor(p.value), p.trainable, p.elements) for p in parameters),
        buffers=tuple(Buffer(b.names, ids.tensor(b.value), b.elements, persistent=True, initial=-1) for b in buffers),
        inputs=tuple(Input(i.name, ids.tensor(i.value), i.low, i.high) for i in inputs),
        loss=ids.tensor(loss),
        seed=ids.tensor(recorder.seed),
        contributions=contributions,
        checkpoints=recorder.checkpoints.count,
        assumptions=recorder.known.assumptions,
        accumulations=lifetimes.accumulations(),
    )


def _operands(call: Call) -> tuple[int, ...]:
    return references(call.args) + references(tuple(value for _, value in call.kwargs))


def _addends(value: int, calls: list[Call], producer: dict[int, int], uses: Counter[int], dropped: set[int]) -> list[int]:
    """Take apart the sum of gradients that makes `value`, as far as nothing else uses the partial sums."""
    number = producer.get(value, -1)
    if number < 0 or not calls[number].summing or calls[number].mutates or uses[value] != 1:
        return [value]
    dropped.add(number)
    return [part for operand in _operands(calls[number]) for part in _addends(operand, calls, producer, uses, dropped)]


class _Numbers:
    """Dense ids for values and storages, in order of first use."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tensor_ids: dict[int, int] = {}
        self._storage_ids: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.memories: list[Memory] = []

    def tensor(self, value: int) -> int:
        known = self._tensor_ids.get(value)
        if known is not None:
            return known
        record = self._recorder.values[value]
        storage = self._storage_ids.get(record.storage)
        if storage is None:
            storage = self._storage_ids[record.storage] = len(self.memories)
            self.memories.append(self._recorder.memories[record.storage])
        number = self._tensor_ids[value] = len(self.tensors)
        self.tensors.append(
            Tensor(
                id=number,
                storage=storage,
                shape=record.shape,
                stride=record.stride,
                offset=record.offset,
                dtype=record.dtype,
                differentiable=record.differentiable,
                name=record.name,
            )
        )
        return number

    def argument(self, argument: Argument) -> Argument:
        if isinstance(argument, Ref):
            return Ref(self.tensor(argument.tensor))
        if isinstance(argument, tuple):
            return tuple([self.argument(item) for item in argument])
        return argument


def _op(number: int, call: Call, op_ids: dict[int, int], ids: _Numbers, idle: set[int]) -> Op:
    return Op(
        id=number,
        target=call.target,
        args=tuple([ids.argument(a) for a in call.args]),
        kwargs=tuple([(key, ids.argument(a)) for key, a in call.kwargs]),
        outputs=tuple([ids.tensor(o) if o >= 0 and o not in idle else -1 for o in call.outputs]),
        multi=call.multi,
        phase=Phase.BACKWARD if call.backward else Phase.FORWARD,
        module=call.module,
        source=call.source,
        forward_op=op_ids[call.forward] if call.forward >= 0 else -1,
        view=call.view,
        mutates=tuple([ids.tensor(t) for t in call.mutates]),
        random_key=call.random_key,
        flops=Flops(call.flops),
        bytes_moved=Bytes(call.bytes_moved),
        repeats=op_ids[call.repeats] if call.repeats >= 0 else -1,
        atom=call.atom,
    )
