"""The most memory the recorded step needs as eager autograd runs it, by replaying births and deaths op by op.

State and inputs are there all the time and are not counted.  An op's inputs and outputs live together; workspace inside a kernel is
not known.  The caller keeps the loss; the gradients stay.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from mpress.graph import Graph, Kind
from mpress.units import Bytes


@dataclass(frozen=True, slots=True)
class Peak:
    """The most live bytes of computed storages, and the first op after which they are reached (-1: nothing is computed)."""

    bytes: Bytes
    op: int


def step_peak(graph: Graph) -> Peak:
    """Replay the step; sums of gradients that the graph takes apart count as the allocations they are."""
    late = {storage for item in graph.accumulations for storage in item.frees}
    born: dict[int, int] = defaultdict(int)
    freed: dict[int, int] = defaultdict(int)
    for storage in graph.storages:
        if storage.kind is Kind.COMPUTED and storage.born >= 0:
            born[storage.born] += storage.bytes
            if storage.dies >= 0 and storage.id not in late:
                freed[storage.dies] += storage.bytes
    between = defaultdict(list)
    for item in graph.accumulations:
        between[item.after].append(item)
    live, most, where = 0, 0, -1
    for op in graph.ops:
        live += born[op.id]
        if live > most:
            most, where = live, op.id
        live -= freed[op.id]
        for item in between[op.id]:
            live += item.bytes
            if live > most:
                most, where = live, op.id
            live -= sum(graph.storages[storage].bytes for storage in item.frees)
            live -= sum(graph.accumulations[index].bytes for index in item.drops)
    return Peak(Bytes(most), where)
