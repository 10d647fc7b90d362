"""Where a forward may be cut in two: exactly one whole, contiguous, differentiable tensor crosses, and one gradient comes back.

A position p stands between the forward ops p-1 and p of the graph's forward.  Backward ops have the position of the forward op they
differentiate; a sum of gradients has the earliest position among the producers of what it adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from mpress.graph import Graph, Kind, Phase, Storage, Tensor, reads


@dataclass(frozen=True, slots=True)
class Positions:
    """forward: ids of forward ops in order.  home[op]: position of every op.  crossing[p]: how many computed tensors cross p.

    valid[p]: p is a place to cut; tensor[p] and gradient[p] are what crosses it then (forward and backward).
    """

    forward: tuple[int, ...]
    home: tuple[int, ...]
    crossing: tuple[int, ...]
    valid: tuple[bool, ...]
    tensor: tuple[int, ...]
    gradient: tuple[int, ...]


class _Sweep:
    """Counts intervals over positions: how many cover p, and the sum of their tensor ids (the id itself where only one does)."""

    def __init__(self, size: int) -> None:
        self._count = [0] * (size + 1)
        self._ids = [0] * (size + 1)

    def cover(self, first: int, last: int, tensor: int) -> None:
        """Cover the positions first..last."""
        if first <= last:
            self._count[first] += 1
            self._count[last + 1] -= 1
            self._ids[first] += tensor
            self._ids[last + 1] -= tensor

    def totals(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Counts and sums of ids by position."""
        return tuple(accumulate(self._count[:-1])), tuple(accumulate(self._ids[:-1]))


def homes(graph: Graph, forward: tuple[int, ...]) -> tuple[int, ...]:
    """The position of every op of the graph, by op id."""
    position = {op: index for index, op in enumerate(forward)}
    home = [-1] * len(graph.ops)
    producer: dict[int, int] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            home[op.id] = position[op.id]
        elif op.forward_op >= 0:
            home[op.id] = position[op.forward_op]
        else:
            known = [home[producer[t]] for t in reads(op) if t in producer]
            gradients = [home[producer[t]] for t in reads(op) if t in producer and graph.ops[producer[t]].phase is Phase.BACKWARD]
            home[op.id] = min(gradients) if gradients else max(known, default=len(forward) - 1)
        producer.update((output, op.id) for output in op.outputs if output >= 0)
    return tuple(home)


def whole(tensor: Tensor, storage: Storage) -> bool:
    """The tensor is all of its storage, laid out contiguously: it can be sent and received as it is."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.offset == 0 and expected * _ITEM_BYTES[tensor.dtype] == storage.bytes


_ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


def find_positions(graph: Graph) -> Positions:
    """Sweep the whole graph once for places to cut."""
    forward = tuple(op.id for op in graph.ops if op.phase is Phase.FORWARD)
    home = homes(graph, forward)
    size = len(forward) + 1
    made: dict[int, int] = {}
    for op in graph.ops:
        made.update((output, op.id) for output in op.outputs if output >= 0)
    last_read: dict[int, int] = {}
    gradient_first: dict[int, int] = {}
    earliest_backward_read: dict[int, int] = {}
    down, up, forbidden = _Sweep(size), _Sweep(size), _Sweep(size)
    born: dict[int, int] = {}
    for op in graph.ops:
        here = home[op.id]
        for tensor in reads(op):
            producer = made.get(tensor)
            storage = graph.tensors[tensor].storage
            if op.phase is Phase.BACKWARD:
                earliest_backward_read[storage] = min(here, earliest_backward_read.get(storage, here))
            if producer is None:
                continue
            there = home[producer]
            if graph.ops[producer].phase is Phase.FORWARD:
                last_read[tensor] = max(here, last_read.get(tensor, here))
                forbidden.cover(here + 1, there, 0)  # a backward that needs what a later op of the forward made
            else:
                gradient_first[tensor] = min(here, gradient_first.get(tensor, here))
                forbidden.cover(there + 1, here, 0)  # a gradient that would flow forwards
        for tensor in op.mutates:
            if graph.storages[graph.tensors[tensor].storage].kind is Kind.COMPUTED:
                forbidden.cover(born.get(graph.tensors[tensor].storage, 0) + 1, here, 0)
        for tensor in op.outputs:
            if tensor >= 0:
                born.setdefault(graph.tensors[tensor].storage, here)
    for tensor, last in last_read.items():
        down.cover(home[made[tensor]] + 1, last, tensor)
    for tensor, first in gradient_first.items():
        up.cover(first + 1, home[made[tensor]], tensor)
    crossing, tensors = down.totals()
    returning, gradients = up.totals()
    blocked, _ = forbidden.totals()

    def is_valid(p: int) -> bool:
        if not (0 < p < len(forward) and crossing[p] == 1 and returning[p] == 1 and blocked[p] == 0):
            return False
        tensor, gradient = graph.tensors[tensors[p]], graph.tensors[gradients[p]]
        storage = graph.storages[tensor.storage]
        return (
            tensor.differentiable
            and storage.kind is Kind.COMPUTED
            and whole(tensor, storage)
            and gradient.shape == tensor.shape
            and earliest_backward_read.get(tensor.storage, p) >= p
        )

    valid = tuple(is_valid(p) for p in range(size))
    return Positions(forward, home, crossing, valid, tensors, gradients)
