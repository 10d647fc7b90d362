"""The planning problem in our words: index sets, coefficients and budgets.  Nothing of a solver.

Everything below solve/mapping takes stage s for GPU s of the machine: mapping gives it the machine as an order of GPUs shows it.
A plan of this problem is a *composition* - how many cells of each type every stage holds in each mode - plus stripes and lags.  Within a
stage, the cells of a type take their modes in one canonical order (`mode_order`), so a composition is a plan up to stripes and lags.
Symbols are those of docs/formulation.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpress.errors import InfeasibleError
from mpress.machine import Machine
from mpress.plan import ScheduleKind, in_flight
from mpress.schedule import Word, compute_order
from mpress.units import BytesPerSecond
from mpress.workload import CellCost, Workload

DEFAULT_WORK = 12_000.0  # branch-and-bound nodes of all solves of one problem together


@dataclass(frozen=True, slots=True)
class Problem:
    """gap: relative distance to the bound at which a plan is good enough.  work_limit: branch-and-bound nodes, 0 = the default.
    gpus: stages, 0 = one for each GPU of the machine.  order: which GPU every stage's GPU is to the user, () = those of the machine.
    any_uplinks: uplinks no order of the machine's GPUs can exceed; given, they bound the step in place of the machine's own.
    """

    workload: Workload
    machine: Machine
    schedule: ScheduleKind
    micro_batches: int
    gap: float = 0.01
    work_limit: float = 0.0
    gpus: int = 0
    order: tuple[int, ...] = ()
    any_uplinks: tuple[tuple[tuple[int, ...], BytesPerSecond], ...] = ()

    @property
    def stages(self) -> int:
        return self.gpus or len(self.machine.devices)

    def gpu(self, s: int) -> int:
        """The user's number of stage s's GPU."""
        return self.order[s] if self.order else s

    @property
    def work(self) -> float:
        return self.work_limit or DEFAULT_WORK

    def in_flight(self, s: int) -> int:
        """m_s: micro-batches stage s holds at most."""
        return in_flight(self.schedule, self.stages, s, self.micro_batches)


@dataclass(frozen=True, slots=True)
class Composition:
    """counts[s][t][l]: cells of type t in mode l on stage s (z[s,t,l])."""

    counts: tuple[tuple[tuple[int, ...], ...], ...]

    def cells(self, s: int) -> int:
        return sum(sum(row) for row in self.counts[s])

    def cuts(self) -> tuple[int, ...]:
        """Index of the first cell behind every stage; the last entry is the number of cells."""
        ends, total = [], 0
        for s in range(len(self.counts)):
            total += self.cells(s)
            ends.append(total)
        return tuple(ends)


@dataclass(frozen=True, slots=True)
class CutClass:
    """Where a cut may be: after cell `residue` (1-based) of a period of `segment`, with `before` cells of each type up to there when
    no period of the segment is complete; each complete period adds `each`.  `repeats`: most complete periods before it.
    """

    segment: int
    residue: int
    type: int
    before: tuple[int, ...]
    each: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class Moment:
    """What a stage holds beside the running cell while a compute action runs: `others` other micro-batches (all of their resident bytes),
    a posted receive buffer of the next forward / backward action (0 or 1 each), a sent output / input gradient not yet released.
    sent_alone: the backward of the sent output's micro-batch has begun, so that its buffer is all that holds it.
    """

    others: int
    receives_output: int
    receives_gradient: int
    sent_output: int
    sent_gradient: int
    sent_alone: int

    def below(self, other: Moment) -> bool:
        """`other` holds at least as much of everything."""
        return (
            self.others <= other.others
            and self.receives_output <= other.receives_output
            and self.receives_gradient <= other.receives_gradient
            and self.sent_output <= other.sent_output
            and self.sent_gradient <= other.sent_gradient
            and self.sent_alone <= other.sent_alone
        )


def mode_order(cost: CellCost) -> tuple[int, ...]:
    """Modes from the first cell of a stage to the last: most swapped, then most recomputed, then keep.

    What is swapped first has the longest time to drain and comes back last; what is kept last leaves the shortest tail.
    """
    modes = cost.modes
    return tuple(
        sorted(range(len(modes)), key=lambda m: (-modes[m].swapped_bytes, -modes[m].recompute_seconds, modes[m].resident_bytes, m))
    )


def totals(workload: Workload) -> tuple[int, ...]:
    """Cells of each type in the whole chain."""
    counts = [0] * len(workload.types)
    for t in workload.cells:
        counts[t] += 1
    return tuple(counts)


def cut_classes(workload: Workload) -> tuple[CutClass, ...]:
    """All classes of cut positions, in chain order."""
    kinds = range(len(workload.types))
    done = [0] * len(workload.types)
    classes: list[CutClass] = []
    for number, (period, count) in enumerate(workload.segments):
        each = tuple(period.count(t) for t in kinds)
        for residue in range(1, len(period) + 1):
            before = tuple(done[t] + period[:residue].count(t) for t in kinds)
            classes.append(CutClass(number, residue, period[residue - 1], before, each, count - 1))
        done = [done[t] + count * each[t] for t in kinds]
    return tuple(classes)


def moments(problem: Problem, s: int, word: Word) -> tuple[Moment, ...]:
    """The moments of stage s in which a forward (word F) or backward (word B) cell can need most; dominated ones left out."""
    order = compute_order(problem.schedule, problem.stages, s, problem.micro_batches)
    first, last = s == 0, s == problem.stages - 1
    found: list[Moment] = []
    live = 0
    seen_forward = seen_backward = False
    sent = begun = -1
    for position, (kind, k) in enumerate(order):
        begun = k if kind is Word.B else begun
        following = order[position + 1][0] if position + 1 < len(order) else None
        if kind is word:
            found.append(
                Moment(
                    others=live if kind is Word.F else live - 1,
                    receives_output=int(following is Word.F and not first),
                    receives_gradient=int(following is Word.B and not last),
                    sent_output=int(seen_forward and not last),
                    sent_gradient=int(seen_backward and not first),
                    sent_alone=int(seen_forward and not last and sent <= begun),
                )
            )
        live += 1 if kind is Word.F else -1
        sent = k if kind is Word.F else sent
        seen_forward |= kind is Word.F
        seen_backward |= kind is Word.B
    unique = list(dict.fromkeys(found))
    return tuple(m for m in unique if not any(m is not other and m.below(other) for other in unique))


def check(problem: Problem) -> None:
    """Refuse what no partition can satisfy."""
    cells = len(problem.workload.cells)
    if cells < problem.stages:
        raise InfeasibleError(
            "no-plan",
            f"the model is a chain of {cells} cells and cannot be cut in {problem.stages} stages",
            where="--gpus",
            hint=f"plan for at most {cells} GPUs",
        )
