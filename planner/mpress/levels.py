"""Which sets of storages are worth recomputing: nested levels on the lower convex hull of (bytes freed, seconds added).

Levels grow greedily by seconds per byte.  A step drops one storage together with everything the same operators rebuild anyway (the other
outputs of a layer norm cost nothing extra).  Only the corners of the hull survive: any other level is beaten by a mix of its neighbours,
and a stage may mix levels cell by cell.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpress.costs import op_dtype, op_seconds
from mpress.dataflow import Dataflow
from mpress.machine import Device


@dataclass(frozen=True, slots=True)
class Level:
    """Storages to recompute, the bytes that leaves saved, and the seconds the closure of ops takes."""

    recompute: frozenset[int]
    saved_bytes: int
    seconds: float


def levels(flow: Dataflow, device: Device, candidates: frozenset[int], most: int) -> tuple[Level, ...]:
    """From "nothing" to "all candidates", at most `most` levels, each containing the one before."""
    cost = {index: float(op_seconds(flow.ops[index], device, op_dtype(flow.ops[index], flow))) for index in flow.cell.forward}

    def level(dropped: frozenset[int]) -> Level:
        """The level that drops `dropped` and what its closure rebuilds on the way."""
        ops, extra = flow.closure(dropped)
        made = {storage for op in ops for storage in flow.made_storages(op)}
        dropped |= made & candidates
        carried = (flow.natural - dropped) | extra
        return Level(dropped, sum(flow.sizes[s] for s in carried), sum(cost[op.id] for op in ops))

    chain = [level(frozenset())]
    while chain[-1].recompute != candidates:
        here = chain[-1]
        found = {option.recompute: option for s in sorted(candidates - here.recompute) for option in (level(here.recompute | {s}),)}
        chain.append(min(found.values(), key=lambda option: (_price(here, option), option.saved_bytes, sorted(option.recompute))))
    return tuple(_thin(_hull(chain), most))


def _price(before: Level, after: Level) -> float:
    """Seconds per byte freed; a step that frees nothing (it needs an input that was not saved) comes last."""
    freed = before.saved_bytes - after.saved_bytes
    return (after.seconds - before.seconds) / freed if freed > 0 else float("inf")


def _hull(chain: list[Level]) -> list[Level]:
    """Corners of the lower convex hull, first and last level included."""
    corners: list[Level] = []
    for level in chain:
        if corners and level.saved_bytes >= corners[-1].saved_bytes and level is not chain[-1]:
            continue
        while len(corners) > 1 and _price(corners[-2], corners[-1]) >= _price(corners[-1], level):
            corners.pop()
        corners.append(level)
    return corners


def _thin(corners: list[Level], most: int) -> list[Level]:
    """Drop the corners that lie closest to the line between their neighbours."""
    while len(corners) > max(most, 2):
        losses = [_bulge(corners[i - 1], corners[i], corners[i + 1]) for i in range(1, len(corners) - 1)]
        del corners[1 + losses.index(min(losses))]
    return corners


def _bulge(before: Level, level: Level, after: Level) -> float:
    """Seconds saved by having `level` over mixing its neighbours to the same bytes."""
    span = before.saved_bytes - after.saved_bytes
    share = (before.saved_bytes - level.saved_bytes) / span if span else 0.0
    return before.seconds + share * (after.seconds - before.seconds) - level.seconds
