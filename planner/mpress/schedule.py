"""The order of steps per stage in torch's own action words: `2F0`, `2SEND_F0`, `3RECV_F0`, `3B0`, `0TIED`, `0STEP`.

Rules of the engine, which the simulator replays and the runtime obeys:
- RECV posts the receive and allocates its buffer; it is placed before the compute action *preceding* the one that consumes it (directly
  before the consumer when that is the stage's first action).  The consuming F or B waits for it.
- SEND starts the copy of a finished output to the neighbour.  Before a SEND the previous SEND on the same edge is waited for and its buffer
  released; so one sent buffer an edge stays alive until the next SEND on that edge, the last one until TIED/STEP.
- TIED all-reduces gradients of tied parameters whose copies live on several stages; STEP runs the optimizer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from mpress.plan import ScheduleKind


class Word(Enum):
    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    TIED = "TIED"
    STEP = "STEP"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a stage; micro_batch is -1 for TIED and STEP."""

    stage: int
    word: Word
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.word.value}{self.micro_batch if self.micro_batch >= 0 else ''}"


_ACTION = re.compile(r"^(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|TIED|STEP|F|B)(\d*)$")


def parse_action(text: str) -> Action:
    """Inverse of str(action); raises ValueError on anything else."""
    match = _ACTION.match(text)
    if match is None:
        raise ValueError(f"'{text}' is not an action such as 2F0")
    return Action(int(match.group(1)), Word(match.group(2)), int(match.group(3)) if match.group(3) else -1)


def compute_order(kind: ScheduleKind, stages: int, stage: int, micro_batches: int) -> tuple[tuple[Word, int], ...]:
    """F and B of one stage in order.  1F1B: S-1-s warm-up forwards, then one forward and one backward in turn, then the rest."""
    if kind is ScheduleKind.GPIPE:
        return tuple((Word.F, k) for k in range(micro_batches)) + tuple((Word.B, k) for k in range(micro_batches))
    warm_up = min(micro_batches, stages - 1 - stage)
    order = [(Word.F, k) for k in range(warm_up)]
    for k in range(micro_batches - warm_up):
        order += [(Word.F, warm_up + k), (Word.B, k)]
    order += [(Word.B, k) for k in range(micro_batches - warm_up, micro_batches)]
    return tuple(order)


def actions(kind: ScheduleKind, stages: int, stage: int, micro_batches: int, tied: bool) -> tuple[Action, ...]:
    """The full list of steps of one stage (rules in the module docstring)."""
    order = compute_order(kind, stages, stage, micro_batches)
    rows: list[list[Action]] = [[] for _ in order]
    for position, (word, k) in enumerate(order):
        post = max(position - 1, 0)
        if word is Word.F and stage > 0:
            rows[post].append(Action(stage, Word.RECV_F, k))
        if word is Word.B and stage < stages - 1:
            rows[post].append(Action(stage, Word.RECV_B, k))
    result: list[Action] = []
    for position, (word, k) in enumerate(order):
        result += rows[position]
        result.append(Action(stage, word, k))
        if word is Word.F and stage < stages - 1:
            result.append(Action(stage, Word.SEND_F, k))
        if word is Word.B and stage > 0:
            result.append(Action(stage, Word.SEND_B, k))
    if tied:
        result.append(Action(stage, Word.TIED, -1))
    result.append(Action(stage, Word.STEP, -1))
    return tuple(result)
