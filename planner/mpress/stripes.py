"""Where swapped bytes lie: every swapped storage is cut in stripes over the pools of its stage, in the stage's proportions.

A pool is a GPU (its memory is lent to the owners) or host memory.  In each pool a stage owns one region of `slots` slots, one for every
micro-batch it keeps in flight:

    address = start + (micro_batch % slots) * slot_bytes + offset

A GPU's pool holds the regions of all its owners one after the other, in stage order; in host memory every stage has a pool of its own.
Stripes are cut to the byte, so the shares of the plan are met exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpress.plan import HOST, Plan, Share, in_flight
from mpress.units import Bytes


@dataclass(frozen=True, slots=True)
class Swapped:
    """One storage of one cell (its index in the chain) that is swapped, with its bytes per micro-batch."""

    cell: int
    storage: int
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class Stripe:
    """`bytes` of a storage at `offset` in a slot of `pool`.  Stripes of a storage follow each other in its bytes, in list order."""

    pool: int
    offset: Bytes
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class Region:
    """A stage's part of a pool: `slots` slots of `slot_bytes` from `start`."""

    pool: int
    start: Bytes
    slot_bytes: Bytes
    slots: int

    def address(self, micro_batch: int, stripe: Stripe) -> Bytes:
        """Where a stripe of a micro-batch begins in the pool."""
        return Bytes(self.start + (micro_batch % self.slots) * self.slot_bytes + stripe.offset)


@dataclass(frozen=True, slots=True)
class StageLayout:
    """regions: one per share, sorted by pool; stripes[i]: of the stage's i-th swapped storage, empty pieces left out."""

    regions: tuple[Region, ...]
    stripes: tuple[tuple[Stripe, ...], ...]

    def region(self, pool: int) -> Region:
        return next(region for region in self.regions if region.pool == pool)


@dataclass(frozen=True, slots=True)
class Layout:
    """pools: (GPU, bytes it lends), sorted, without host memory; stages: parallel to the plan's."""

    pools: tuple[tuple[int, Bytes], ...]
    stages: tuple[StageLayout, ...]


def cut(storages: tuple[Swapped, ...], shares: tuple[Share, ...]) -> tuple[tuple[Stripe, ...], ...]:
    """Stripes of each storage, in proportion to what is left of each share; every storage and every share is met to the byte.

    Raises ValueError unless the shares hold exactly the bytes of the storages.
    """
    left = [int(share.bytes) for share in shares]
    if sum(left) != sum(storage.bytes for storage in storages):
        raise ValueError(f"shares of {sum(left)} bytes for storages of {sum(storage.bytes for storage in storages)} bytes")
    result: list[tuple[Stripe, ...]] = []
    for storage in storages:
        total = sum(left)
        pieces = [storage.bytes * part // total if total else 0 for part in left]
        # whole bytes lost to rounding go to the largest remainders; a piece with a remainder is below its share, so it fits
        order = sorted(range(len(left)), key=lambda p: (-(storage.bytes * left[p] % total) if total else 0, p))
        for p in order[: storage.bytes - sum(pieces)]:
            pieces[p] += 1
        stripes = []
        for p, piece in enumerate(pieces):
            if piece:
                stripes.append(Stripe(shares[p].pool, Bytes(shares[p].bytes - left[p]), Bytes(piece)))
                left[p] -= piece
        result.append(tuple(stripes))
    return tuple(result)


def layout(plan: Plan, swapped: tuple[tuple[Swapped, ...], ...]) -> Layout:
    """Regions and stripes of all stages; swapped[s] lists the swapped storages of stage s in a fixed order."""
    filled: dict[int, int] = {}
    stages: list[StageLayout] = []
    for index, (stage, storages) in enumerate(zip(plan.stages, swapped, strict=True)):
        slots = in_flight(plan.schedule, len(plan.stages), index, plan.micro_batches)
        regions: list[Region] = []
        for share in sorted(stage.shares, key=lambda share: share.pool):
            start = 0 if share.pool == HOST else filled.get(share.pool, 0)
            regions.append(Region(share.pool, Bytes(start), share.bytes, slots))
            if share.pool != HOST:
                filled[share.pool] = start + slots * share.bytes
        stages.append(StageLayout(tuple(regions), cut(storages, stage.shares)))
    return Layout(tuple((pool, Bytes(size)) for pool, size in sorted(filled.items())), tuple(stages))
