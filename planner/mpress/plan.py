"""What was decided, as plain values.  The solver makes a Plan, the simulator replays it, the emitter obeys it; none of them adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mpress.units import Bytes

HOST = -1  # the pool id of host memory, beside device ids 0..G-1


class ScheduleKind(Enum):
    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


@dataclass(frozen=True, slots=True)
class Share:
    """`bytes` of each micro-batch's swapped bytes of a stage go to `pool` (a device id, or HOST)."""

    pool: int
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Cells [first, last) run on `device`; modes[i] is the mode (index into CellCost.modes) of cell first + i.

    shares: sorted by pool; their bytes sum to the swapped bytes of one micro-batch of the stage.  Every swapped storage of the stage
    is cut in stripes in these proportions, so all links of the stage work at once.
    drain_lag: swapped storages of cell i are freed (compute waits for the copy) after cell i + drain_lag has run forward, the
    rest at the end of the forward.  prefetch_lead: copies back for cell i start before cell i + prefetch_lead runs backward.
    Both are at least 1.
    """

    device: int
    first: int
    last: int
    modes: tuple[int, ...]
    shares: tuple[Share, ...]
    drain_lag: int
    prefetch_lead: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in pipeline order.  micro_batches = M of one optimizer step."""

    schedule: ScheduleKind
    micro_batches: int
    stages: tuple[StagePlan, ...]


def in_flight(plan_or_kind: ScheduleKind, stages: int, stage: int, micro_batches: int) -> int:
    """Micro-batches whose activations stage `stage` holds at most: 1F1B min(M, S - s), GPipe M (facts: schedules)."""
    if plan_or_kind is ScheduleKind.GPIPE:
        return micro_batches
    return min(micro_batches, stages - stage)
