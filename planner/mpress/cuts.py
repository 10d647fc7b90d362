"""Where a forward may be cut in two, and what crosses there: tensors on the way forward, gradients on the way back.

A position p stands between the forward ops p-1 and p of the graph's forward.  Backward ops have the position of the forward op they
differentiate (or repeat); a sum of gradients has the earliest position among the producers of what it adds.  Memory crosses once: where
several views of one storage are needed behind a cut, the tensor that allocated it crosses and the views are taken again behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mpress.dataflow import alias_source
from mpress.graph import ITEM_BYTES, Graph, Kind, Op, Phase, Storage, Tensor, reads


@dataclass(frozen=True, slots=True)
class Cut:
    """What crosses one place: `down` forward tensors, `up` their gradients (not one to one), newest first.

    shared: how many of the storages of `down` are saved for the backward on both sides of the cut.  bytes: of all of `down`.
    """

    down: tuple[int, ...]
    up: tuple[int, ...]
    shared: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Positions:
    """forward: ids of forward ops in order.  home[op]: position of every op.  cuts[p]: what crosses p, None where no cut may be.

    homes_of_contributions: position of the forward use of the parameter each contribution belongs to.
    """

    forward: tuple[int, ...]
    home: tuple[int, ...]
    homes_of_contributions: tuple[int, ...]
    cuts: tuple[Cut | None, ...]


def find_positions(graph: Graph) -> Positions:
    """Sweep the whole graph once for places to cut."""
    return _Survey(graph).positions()


def homes(graph: Graph, forward: tuple[int, ...]) -> tuple[int, ...]:
    """The position of every op of the graph, by op id."""
    position = {op: index for index, op in enumerate(forward)}
    home = [-1] * len(graph.ops)
    producer: dict[int, int] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            home[op.id] = position[op.id]
        elif op.forward_op >= 0 or op.repeats >= 0:
            home[op.id] = position[max(op.forward_op, op.repeats)]
        else:
            known = [home[producer[t]] for t in reads(op) if t in producer]
            gradients = [home[producer[t]] for t in reads(op) if t in producer and graph.ops[producer[t]].phase is Phase.BACKWARD]
            home[op.id] = min(gradients) if gradients else max(known, default=len(forward) - 1)
        producer.update((output, op.id) for output in op.outputs if output >= 0)
    return tuple(home)


def dense(tensor: Tensor, storage: Storage) -> bool:
    """The tensor is all of its storage without gaps, in some order of its dimensions: it can be sent and received as it is."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride, tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.offset == 0 and expected * ITEM_BYTES[tensor.dtype] == storage.bytes


@dataclass(slots=True)
class _Crossing:
    """A storage on its way: made at `made` (a position), its tensors with the farthest position each is needed at."""

    root: int
    made: int
    needed: dict[int, int]

    def at(self, p: int, downwards: bool) -> tuple[int, ...]:
        """The tensors of it that are needed on the far side of p."""
        return tuple(t for t, far in self.needed.items() if (far >= p if downwards else far < p))


class _Blocked:
    """Counts intervals of positions that must stay together."""

    def __init__(self, size: int) -> None:
        self._steps = [0] * (size + 1)

    def cover(self, first: int, last: int) -> None:
        """No cut at the positions first..last."""
        if first <= last:
            self._steps[first] += 1
            self._steps[last + 1] -= 1

    def counts(self) -> tuple[int, ...]:
        return tuple(accumulate(self._steps[:-1]))


class _Survey:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.reads = [reads(op) for op in graph.ops]
        self.forward = tuple(op.id for op in graph.ops if op.phase is Phase.FORWARD)
        self.home = homes(graph, self.forward)
        self.size = len(self.forward) + 1
        self.made: dict[int, Op] = {}
        self.roots: dict[int, int] = {}
        self.dense: dict[int, bool] = {}  # tensors that can be sent, as far as asked
        self.down: dict[int, _Crossing] = {}
        self.up: dict[int, _Crossing] = {}
        self.blocked = _Blocked(self.size)
        self.saved: dict[int, tuple[int, int]] = {}  # storage -> earliest and latest position whose backward reads it

    def positions(self) -> Positions:
        graph, home = self.graph, self.home
        self._stay_together()
        for op in graph.ops:
            here = home[op.id]
            for tensor in self.reads[op.id]:
                self._read(tensor, here, op.phase)
            for output in op.outputs:
                if output >= 0:
                    self.made.setdefault(output, op)
        contributions = self._contributions()
        return Positions(self.forward, home, contributions, self._cuts())

    def _root(self, tensor: int) -> int:
        """The tensor that allocated the storage (or a leaf), through views and in-place results."""
        known = self.roots.get(tensor)
        if known is None:
            source = alias_source(self.made.get(tensor), tensor, self.graph.tensors)
            known = self.roots[tensor] = tensor if source is None or source == tensor else self._root(source)
        return known

    def _read(self, tensor: int, here: int, phase: Phase) -> None:
        """Note that an op at position `here` needs `tensor`."""
        storage = self.graph.tensors[tensor].storage
        if phase is Phase.BACKWARD:
            first, last = self.saved.get(storage, (here, here))
            self.saved[storage] = min(first, here), max(last, here)
        root = self._root(tensor)
        maker = self.made.get(root)
        if maker is None and root != self.graph.seed:
            return  # parameters, buffers and inputs are where they are needed
        there = self.home[maker.id] if maker is not None else len(self.forward) - 1
        forward = maker is not None and maker.phase is Phase.FORWARD
        if forward and here < there:
            self.blocked.cover(here + 1, there)  # a backward that needs what a later op of the forward made
        elif not forward and here > there:
            self.blocked.cover(there + 1, here)  # a gradient that would flow forwards
        else:
            table = self.down if forward else self.up
            crossing = table.setdefault(storage, _Crossing(root, there, {}))
            if crossing.root != root:
                self.blocked.cover(min(there, here, crossing.made) + 1, max(there, here, crossing.made))  # one storage from two makers
            far = crossing.needed.get(tensor, there)
            crossing.needed[tensor] = max(far, here) if forward else min(far, here)

    def _stay_together(self) -> None:
        """What writes to one memory, and what reads a written buffer, cannot be parted."""
        born: dict[int, int] = {}
        touched: dict[int, list[int]] = {}
        written: set[int] = set()
        for op in self.graph.ops:
            here = self.home[op.id]
            for tensor in (*self.reads[op.id], *op.mutates):
                storage = self.graph.storages[self.graph.tensors[tensor].storage]
                if storage.kind is not Kind.COMPUTED:
                    touched.setdefault(storage.id, []).append(here)
            for tensor in op.mutates:
                storage = self.graph.storages[self.graph.tensors[tensor].storage]
                if storage.kind is Kind.COMPUTED:
                    first = born.get(storage.id, here)
                    self.blocked.cover(min(first, here) + 1, max(first, here))
                else:
                    written.add(storage.id)
            for tensor in op.outputs:
                if tensor >= 0:
                    born.setdefault(self.graph.tensors[tensor].storage, here)
        for before, (p, number) in pairwise(enumerate(self.forward)):  # a Function of the user's is one piece
            if self.graph.ops[number].atom and self.graph.ops[number].atom == self.graph.ops[before[1]].atom:
                self.blocked.cover(p, p)
        for storage_id in written:
            self.blocked.cover(min(touched[storage_id]) + 1, max(touched[storage_id]))

    def _contributions(self) -> tuple[int, ...]:
        """A gradient arrives where the forward uses the parameter, even when a later op made it (the addend of an addition)."""
        storages = {p.names[0]: self.graph.tensors[p.tensor].storage for p in self.graph.parameters}
        users: dict[int, list[int]] = {storage: [] for storage in storages.values()}
        for index, number in enumerate(self.forward):
            for tensor in self.reads[number]:
                found = users.get(self.graph.tensors[tensor].storage)
                if found is not None:
                    found.append(index)
        places: list[int] = []
        for contribution in self.graph.contributions:
            maker = self.made.get(contribution.tensor)
            there = self.home[maker.id] if maker is not None else len(self.forward) - 1
            here = max((p for p in users[storages[contribution.parameter]] if p <= there), default=there)
            if here < there:
                self._read(contribution.tensor, here, Phase.BACKWARD)
            places.append(here)
        return tuple(places)

    def _cuts(self) -> tuple[Cut | None, ...]:
        blocked = self.blocked.counts()
        down = _by_position(self.size, ((c, c.made + 1, max(c.needed.values())) for c in self.down.values()))
        up = _by_position(self.size, ((c, min(c.needed.values()) + 1, c.made) for c in self.up.values()))
        cuts: list[Cut | None] = [None]
        for p in range(1, self.size - 1):
            cuts.append(self._cut(p, down[p], up[p]) if blocked[p] == 0 else None)
        return (*cuts, None)

    def _cut(self, p: int, down: list[_Crossing], up: list[_Crossing]) -> Cut | None:
        tensors = [self._representative(c, c.at(p, True)) for c in down]
        gradients = [self._representative(c, c.at(p, False)) for c in up]
        if not tensors or -1 in tensors or -1 in gradients:
            return None
        storages = [self.graph.tensors[t].storage for t in tensors]
        return Cut(
            down=tuple(sorted(tensors, key=self._age, reverse=True)),
            up=tuple(sorted(gradients, key=self._age, reverse=True)),
            shared=sum(first < p <= last for first, last in (self.saved.get(s, (p, p)) for s in storages)),
            bytes=sum(self.graph.storages[s].bytes for s in storages),
        )

    def _age(self, tensor: int) -> tuple[int, int]:
        maker = self.made.get(tensor)
        return (-1 if maker is None else maker.id, tensor)

    def _representative(self, crossing: _Crossing, tensors: tuple[int, ...]) -> int:
        """The tensor of a storage that crosses: the only one needed, else the root; -1 if it cannot be sent."""
        storage = self.graph.storages[self.graph.tensors[crossing.root].storage]
        for tensor in (*tensors[:1], crossing.root) if len(tensors) == 1 else (crossing.root,):
            known = self.dense.get(tensor)
            if known is None:
                known = self.dense[tensor] = dense(self.graph.tensors[tensor], storage)
            if known:
                return tensor
        return -1


def _by_position(size: int, intervals: Iterable[tuple[_Crossing, int, int]]) -> list[list[_Crossing]]:
    found: list[list[_Crossing]] = [[] for _ in range(size)]
    for crossing, first, last in intervals:
        for p in range(first, last + 1):
            found[p].append(crossing)
    return found
