"""Replays a plan event by event: one compute stream per GPU, one copy engine per direction and link.  Knows no solver."""

from __future__ import annotations

from dataclasses import dataclass

from mpress.machine import Machine
from mpress.plan import Plan
from mpress.units import Bytes, Seconds
from mpress.workload import Workload


@dataclass(frozen=True, slots=True)
class StageReplay:
    """What one stage did.  causes: bytes of the peak by cause, in a fixed order, summing to peak_bytes.

    forward_seconds, backward_seconds: one micro-batch's compute (recompute excluded from backward); stall_seconds: compute time lost
    in the whole step waiting for its own swap copies.
    """

    peak_bytes: Bytes
    peak_action: str
    causes: tuple[tuple[str, Bytes], ...]
    in_flight: int
    forward_seconds: Seconds
    backward_seconds: Seconds
    recompute_seconds: Seconds
    stall_seconds: Seconds
    busy_seconds: Seconds


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain of events that made the step as long as it is: step_seconds =
    sum_s forwards[s] x (forward duration of stage s) + backwards[s] x (backward duration, recompute included) + constant_seconds,
    where durations include the stage's own stalls and constant_seconds holds transfers, waits on shared links and the step tail
    (tied all-reduce, optimizer).
    """

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    constant_seconds: Seconds


@dataclass(frozen=True, slots=True)
class Replay:
    """step_seconds: one optimizer step of M micro-batches.  bubble: idle share of all GPUs' time in the step.
    link_bytes: (source, target, bytes per step); HOST = -1 as source or target.  memory: per stage (seconds, bytes) steps of the curve."""

    step_seconds: Seconds
    bubble: float
    stages: tuple[StageReplay, ...]
    path: CriticalPath
    link_bytes: tuple[tuple[int, int, Bytes], ...]
    memory: tuple[tuple[tuple[Seconds, Bytes], ...], ...]


def simulate(workload: Workload, machine: Machine, plan: Plan) -> Replay:
    """Replay one optimizer step.  Raises BrokenPlanError("deadlock") if the order of steps can never finish."""
    raise NotImplementedError
