"""Births and deaths in terms of the ops of the graph, and what happens to the memory of gradients between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpress.graph import Accumulation, Kind
from mpress.trace.ledger import Memory
from mpress.units import Bytes


class Lifetimes:
    """calls: how many were recorded; ops: call -> op, for those that are part of the graph; memories: those of the graph, by storage id."""

    def __init__(self, calls: int, ops: Mapping[int, int], memories: Sequence[Memory], everything: Sequence[Memory]) -> None:
        self._ops = ops
        self._calls = calls
        self._memories = memories
        self._before: list[int] = []  # call -> the last op that is not after it
        last = -1
        for call in range(calls):
            last = ops.get(call, last)
            self._before.append(last)
        self._after: list[int] = [-1] * (calls + 1)  # call -> the first op that is not before it
        for call in reversed(range(calls)):
            self._after[call] = ops.get(call, self._after[call + 1])
        inside = {id(memory) for memory in memories}
        self._outside = [m for m in everything if m.kind is Kind.COMPUTED and m.born >= 0 and id(m) not in inside]

    def born(self, memory: Memory) -> int:
        """The op that makes it; what the engine makes itself (the first gradient) counts from the next op."""
        return self._after[memory.born] if 0 <= memory.born < self._calls else -1

    def dies(self, memory: Memory) -> int:
        """The op after which it is freed."""
        return self._before[memory.dies] if memory.dies >= 0 else -1

    def accumulations(self) -> tuple[Accumulation, ...]:
        """Allocations outside of the graph, and deaths that follow a call that is no op, in order."""
        made: dict[int, list[Memory]] = {}
        ended: dict[int, list[Memory]] = {}
        frees: dict[int, list[int]] = {}
        for memory in self._outside:
            made.setdefault(memory.born, []).append(memory)
            if memory.dies >= 0:
                ended.setdefault(memory.dies, []).append(memory)
        for index, memory in enumerate(self._memories):
            if memory.kind is Kind.COMPUTED and memory.dies >= 0 and memory.dies not in self._ops and memory.born >= 0:
                frees.setdefault(memory.dies, []).append(index)
        found: list[Accumulation] = []
        index_of: dict[int, int] = {}
        for call in sorted({*made, *ended, *frees}):
            number = len(found)
            index_of.update({id(memory): number for memory in made.get(call, ())})
            drops = tuple(sorted({index_of[id(memory)] for memory in ended.get(call, ())}))
            size = sum(memory.bytes for memory in made.get(call, ()))
            found.append(Accumulation(self._before[call], Bytes(size), tuple(frees.get(call, ())), drops))
        return tuple(found)
