"""The step as a graph of precedences: which chain of actions makes it as long as it is.

Durations of a stage's forward and backward and of the messages between neighbours are given; contention on links is left out, so the
length of the longest path is a lower bound on the step of every plan with at least these durations, and its counts are a linear
inequality that is valid for every plan of this schedule: W >= sum forwards[s] F[s] + backwards[s] B[s] + messages + tail[end].
"""

from __future__ import annotations

from dataclasses import dataclass

from mpress.plan import ScheduleKind
from mpress.schedule import Action, Word, actions


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds.  forward, backward: per stage; output[e], gradient[e]: the message from stage e to e + 1 and back; tail: after the last B
    of a stage.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    output: tuple[float, ...]
    gradient: tuple[float, ...]
    tail: tuple[float, ...]


@dataclass(frozen=True, slots=True, order=True)
class Path:
    """How often a path runs each stage's forward and backward and passes each message; `end` is the stage whose tail it ends with."""

    end: int
    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    outputs: tuple[int, ...]
    gradients: tuple[int, ...]

    def length(self, d: Durations) -> float:
        pairs = ((self.forwards, d.forward), (self.backwards, d.backward), (self.outputs, d.output), (self.gradients, d.gradient))
        return d.tail[self.end] + sum(n * x for counts, values in pairs for n, x in zip(counts, values, strict=True))


_Point = tuple[float, int]  # (seconds, event)


class Timeline:
    """One schedule's steps, ready to be timed with different durations."""

    def __init__(self, kind: ScheduleKind, stages: int, micro_batches: int) -> None:
        self.stages = stages
        self.rows = [actions(kind, stages, s, micro_batches, tied=False) for s in range(stages)]
        self.micro_batches = micro_batches

    def classic_paths(self) -> tuple[Path, ...]:
        """For every stage: fill the pipeline up to it, run all of its actions, drain the pipeline."""
        paths = []
        for s in range(self.stages):
            counts = tuple(self.micro_batches if r == s else int(r < s) for r in range(self.stages))
            messages = tuple(int(e < s) for e in range(self.stages - 1))
            paths.append(Path(0, counts, counts, messages, messages))
        return tuple(paths)

    def critical(self, durations: Durations) -> tuple[float, Path]:
        """Length of the step and the path that makes it."""
        run = _Run(self, durations)
        ends = [(now + durations.tail[s], -s, event) for s, (now, event) in enumerate(run.points)]
        seconds, stage, event = max(ends)
        return seconds, run.path(-stage, event)


class _Run:
    """Walks all rows; every event remembers the one it waited for."""

    def __init__(self, timeline: Timeline, durations: Durations) -> None:
        self.timeline, self.durations = timeline, durations
        self.events: list[tuple[int, Word, int]] = []  # (previous event, F | B | SEND_F | SEND_B, stage or edge)
        self.points: list[_Point] = [(0.0, -1)] * timeline.stages
        self.ends: dict[tuple[Word, int, int], _Point] = {}
        self.half: dict[tuple[Word, int, int], _Point] = {}  # messages only one end of which has called
        at = [0] * timeline.stages
        moved = True
        while moved:
            moved = False
            for s, row in enumerate(timeline.rows):
                while at[s] < len(row) and self._step(s, row[at[s]]):
                    at[s] += 1
                    moved = True

    def _event(self, origin: _Point, word: Word, place: int, seconds: float) -> _Point:
        self.events.append((origin[1], word, place))
        return origin[0] + seconds, len(self.events) - 1

    def _step(self, s: int, action: Action) -> bool:
        word, k = action.word, action.micro_batch
        if word is Word.F or word is Word.B:
            forward = word is Word.F
            edge = s - 1 if forward else s
            if 0 <= edge < self.timeline.stages - 1:
                arrived = self.ends.get((Word.SEND_F if forward else Word.SEND_B, edge, k))
                if arrived is None:
                    return False
                self._wait(s, arrived)
            self.points[s] = self._event(self.points[s], word, s, (self.durations.forward if forward else self.durations.backward)[s])
        elif word in (Word.SEND_F, Word.SEND_B):
            edge = s if word is Word.SEND_F else s - 1
            if k > 0:
                before = self.ends.get((word, edge, k - 1))
                if before is None:
                    return False
                self._wait(s, before)
            self._meet((word, edge, k), self.points[s])
        elif word is Word.RECV_F:
            self._meet((Word.SEND_F, s - 1, k), self.points[s])
        elif word is Word.RECV_B:
            self._meet((Word.SEND_B, s, k), self.points[s])
        return True

    def _wait(self, s: int, point: _Point) -> None:
        if point[0] > self.points[s][0]:
            self.points[s] = point

    def _meet(self, key: tuple[Word, int, int], point: _Point) -> None:
        """A message starts when both its ends have called."""
        other = self.half.pop(key, None)
        if other is None:
            self.half[key] = point
            return
        word, edge, _ = key
        seconds = (self.durations.output if word is Word.SEND_F else self.durations.gradient)[edge]
        self.ends[key] = self._event(max(point, other), word, edge, seconds)

    def path(self, end: int, event: int) -> Path:
        counts = {word: [0] * self.timeline.stages for word in (Word.F, Word.B, Word.SEND_F, Word.SEND_B)}
        while event >= 0:
            event, word, place = self.events[event]
            counts[word][place] += 1
        edges = self.timeline.stages - 1
        rows = counts[Word.F], counts[Word.B], counts[Word.SEND_F][:edges], counts[Word.SEND_B][:edges]
        return Path(end, *(tuple(row) for row in rows))
