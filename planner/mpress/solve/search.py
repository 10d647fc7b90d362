"""The loop: greedy plan, bound, joint problem, replay, refine - until the best replayed plan is within the gap of the proven bound.

The bound only ever comes from relaxations without reserves; plans only ever count with the time and the peaks the replay gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpress.errors import MpressError
from mpress.plan import Plan
from mpress.problem import Composition, Problem, check
from mpress.simulate import Replay
from mpress.solve.backend import INFINITY, SOLVER, Result, Status, solve
from mpress.solve.decode import swapped_bytes
from mpress.solve.encode import Encoding, Variant, durations, encode
from mpress.solve.explain import infeasible
from mpress.solve.greedy import greedy, plain
from mpress.solve.judge import Verdict, judge
from mpress.solve.timeline import Path, Timeline

EXACT = 1e-9  # relative difference below which two step times are the same
OPTIMAL = 1e-6
_LP_ROUNDS = 30
_REPAIRS = 5
_THRIFT_GAP = 0.03
_THRIFT_NODES = 300
_ROUNDS = 6  # of a large problem; a small one goes on until it is closed
_WORTH = 0.02  # a round that closes less than this share of the wanted gap is the last
FEW_CELLS = 12
_SOLVE_NODES = 20  # what a solve costs at least, and each excluded composition on top: models grow by them, though SCIP may need one node
_EXCLUDED_NODES = 16


@dataclass(frozen=True, slots=True)
class Solution:
    """bound_seconds: no plan of this problem is faster.  gap = 1 - bound / step.  status: optimal, within_gap, limit or interrupted.
    iterations: models solved.  work: branch-and-bound nodes they took.
    """

    plan: Plan
    replay: Replay
    bound_seconds: float
    gap: float
    status: str
    solver: str
    iterations: int
    work: float = 0.0


class Hopeless(Exception):
    """No plan was found, and none is fast enough to be wanted."""

    def __init__(self, bound_seconds: float, iterations: int = 0, work: float = 0.0) -> None:
        super().__init__(f"every plan takes at least {bound_seconds:.4g} s")
        self.bound_seconds, self.iterations, self.work = bound_seconds, iterations, work


def plan(
    problem: Problem,
    progress: Callable[[str], None] | None = None,
    enough: float = INFINITY,
    below: float = INFINITY,
    floor: float = 0.0,
) -> Solution:
    """The best plan found, with its gap.

    `enough`: nothing more is wanted of a problem whose plans are proven to take that many seconds: raises Hopeless if there is no plan.
    `below`: only plans faster than that are looked for.  `floor`: somebody proved that no plan is faster than that.
    Raises InfeasibleError("no-plan"), or, when there is no plan yet, MpressError("interrupted") or MpressError("work-limit").
    """
    check(problem)
    search = _Search(problem, progress or (lambda _: None), enough, below, floor)
    interrupted = False
    try:
        search.run()
    except KeyboardInterrupt:
        interrupted = True
    return search.solution(interrupted)


def status_words(gap: float, wanted: float, interrupted: bool) -> str:
    """What a solution's gap makes of it."""
    return "optimal" if gap <= OPTIMAL else "within_gap" if gap <= wanted else "interrupted" if interrupted else "limit"


def _composition(code: Encoding, values: tuple[float, ...]) -> Composition:
    kinds = code.problem.workload.types
    return Composition(
        tuple(
            tuple(tuple(round(values[row[m]]) if m in row else 0 for m in range(len(kinds[t].modes))) for t, row in enumerate(stage))
            for stage in code.mode
        )
    )


class _Search:
    """What is known so far: best plan, bound, path rows, compositions judged."""

    def __init__(self, problem: Problem, progress: Callable[[str], None], enough: float, below: float, floor: float) -> None:
        self.problem, self.progress, self.enough, self.below = problem, progress, enough, below
        self.timeline = Timeline(problem.schedule, problem.stages, problem.micro_batches)
        self.paths: list[Path] = list(self.timeline.classic_paths())
        self.best: Verdict | None = None
        self.bound = floor
        self.left = problem.work
        self.iterations = 0
        self.excluded: list[Composition] = []
        self.ceiling = INFINITY  # no bound can be proven above this

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.bound / self.best.seconds) if self.best else INFINITY

    @property
    def done(self) -> bool:
        return self.gap <= max(self.problem.gap, EXACT) or self.bound >= self.enough

    def solution(self, interrupted: bool) -> Solution:
        if self.best is None:
            if interrupted:
                error = MpressError("interrupted", "interrupted before any plan was found")
                error.exit_code = 130
                raise error
            if self.bound >= self.enough:
                raise Hopeless(self.bound, self.iterations, self.problem.work - self.left)
            message = "the work limit was reached before any plan was found, and none was proven impossible"
            raise MpressError("work-limit", message, where="--work-limit", hint="raise --work-limit")
        words, bound = status_words(self.gap, self.problem.gap, interrupted), min(self.bound, self.best.seconds)
        return Solution(self.best.plan, self.best.replay, bound, self.gap, words, SOLVER, self.iterations, self.problem.work - self.left)

    def run(self) -> None:
        self._offer(judge(self.problem, plain(self.problem)))
        self._free()
        if not self.done:
            found = greedy(self.problem)
            if found is not None:
                self._offer(found)
            self._joint()
        if self.best is not None and self.best.seconds < self.below:
            self._thrift()

    def _free(self) -> None:
        """The partition alone: its bound holds for every plan, and where its plan fits nothing else is worth doing."""
        variant = Variant(free=True)
        self._relax(variant)
        while True:
            code = encode(self.problem, variant, tuple(self.paths))
            result = self._solve(code, min(self.problem.gap / 4, 1e-3))
            self._raise_bound(result.bound / code.second)
            if not result.values:
                return
            grown = self._learn(code, result)
            self._offer(judge(self.problem, _composition(code, result.values)))
            if self.done or not grown:
                return

    def _joint(self) -> None:
        """Everything at once."""
        few = len(self.problem.workload.cells) <= FEW_CELLS
        self._relax(self._variant())
        rounds = 0
        while not self.done and self.left > 0 and (few or rounds < _ROUNDS):
            variant = self._variant()
            code = encode(self.problem, variant, tuple(self.paths))
            result = self._solve(code, self.problem.gap / (10 if self.gap < 3 * self.problem.gap else 3))
            rounds += 1
            if result.status is Status.INFEASIBLE:
                if self.best is None and not variant.limit:
                    raise infeasible(self.problem)
                self._raise_bound(variant.limit)
                return
            self._raise_bound(min(result.bound / code.second, variant.limit or INFINITY))
            if not result.values:
                return
            grown = self._learn(code, result)
            composition = _composition(code, result.values)
            self._offer(judge(self.problem, composition))
            if few or not grown:
                self._exclude(composition, result.bound / code.second)
            if few:
                continue
            before = self.gap
            if not self.done:
                self._settle(composition, result.objective / code.second, rounds)
            if not self.done:
                self._careful(rounds)
            if self.gap > before - _WORTH * self.problem.gap:
                return

    def _exclude(self, composition: Composition, bound: float) -> None:
        """Never propose a judged composition again.  Without swaps the replay's time is all there is to know; with swaps other stripes and
        lags could still be faster than the ones tried, so its relaxation stays a ceiling of the bound.
        """
        self.excluded.append(composition)
        if any(swapped_bytes(self.problem, composition)):
            self.ceiling = min(self.ceiling, bound)

    def _variant(self) -> Variant:
        """Only plans better than the best by more than the gap are of interest; if there is none, that is the bound."""
        better = self.best.seconds * (1.0 - max(self.problem.gap, EXACT)) if self.best else INFINITY
        limit = min(better, self.below)
        return Variant(limit=limit if limit < INFINITY else 0.0, excluded=tuple(self.excluded))

    def _relax(self, variant: Variant) -> None:
        """Path rows from the linear relaxation, where they cost nothing, as long as they raise it."""
        before = 0.0
        for _ in range(_LP_ROUNDS):
            code = encode(self.problem, variant, tuple(self.paths))
            result = solve(code.model, 0.0, 1, relax=True)
            if result.status is Status.INTERRUPTED:
                raise KeyboardInterrupt
            if not result.values or result.objective <= before * (1.0 + 1e-5) or not self._learn(code, result):
                return
            before = result.objective

    def _learn(self, code: Encoding, result: Result) -> bool:
        """Add the critical path of a solution if it is longer than the model thought."""
        seconds, path = self.timeline.critical(durations(code, result.values))
        if seconds * code.second <= result.values[code.step] * (1.0 + 1e-7) or path in self.paths:
            return False
        self.paths.append(path)
        return True

    def _careful(self, rounds: int) -> None:
        """Where shared links are busy, the fastest plan that takes them as always busy; its partition may differ."""
        code = encode(self.problem, Variant(careful=True), tuple(self.paths))
        result = self._solve(code, self.problem.gap / 3)
        if result.values:
            self._learn(code, result)
            self._settle(_composition(code, result.values), result.objective / code.second, rounds)

    def _settle(self, composition: Composition, seconds: float, rounds: int) -> None:
        """From the problem's answer to a plan that replays well: in its partition, at nearly its step time, move the fewest bytes (busy
        links are what the problem sees least of); then hold back on each stage what the replay finds missing, until it fits.
        """
        ends = composition.cuts()
        limit = max(seconds, self.bound) * (1.0 + self.problem.gap / (2 * rounds))
        reserve = (0,) * self.problem.stages
        for _ in range(_REPAIRS):
            for variant in (
                Variant(thrift=True, ends=ends, limit=limit, reserve=reserve, careful=True),
                Variant(ends=ends, reserve=reserve, careful=True),
                Variant(ends=ends, reserve=reserve),
            ):
                code = encode(self.problem, variant, tuple(self.paths))
                result = self._solve(code, _THRIFT_GAP if variant.thrift else self.problem.gap / 4, _THRIFT_NODES)
                if result.values:
                    break
            else:
                return
            self._learn(code, result)
            verdict = judge(self.problem, _composition(code, result.values))
            self._offer(verdict)
            if verdict.fits:
                return
            reserve = tuple(a + b for a, b in zip(reserve, verdict.excess, strict=True))

    def _thrift(self) -> None:
        """At the same step time: fewest bytes moved, then fewest cells that are not simply kept."""
        best = self.best
        if best is None or self.left <= 0 or not any(m for stage in best.plan.stages for m in stage.modes):
            return
        limit = best.seconds * (1.0 + EXACT)
        variant = Variant(thrift=True, ends=best.composition.cuts(), limit=limit)
        code = encode(self.problem, variant, tuple(self.paths))
        result = self._solve(code, _THRIFT_GAP if self.problem.gap > OPTIMAL else 0.0, _THRIFT_NODES)
        if not result.values:
            return
        verdict = judge(self.problem, _composition(code, result.values))
        if verdict.fits and verdict.seconds <= limit and _effort(verdict) < _effort(best):
            self.best = verdict

    def _solve(self, code: Encoding, gap: float, most: int = 1 << 30) -> Result:
        result = solve(code.model, gap, int(max(min(self.left, most), 1)))
        self.iterations += 1
        self.left -= max(result.nodes, _SOLVE_NODES + _EXCLUDED_NODES * len(code.variant.excluded))
        if result.status is Status.INTERRUPTED:
            if result.values and not code.variant.free:
                self._offer(judge(self.problem, _composition(code, result.values)))
            raise KeyboardInterrupt
        self.progress(self._words())
        return result

    def _words(self) -> str:
        if self.best is None:
            return f"bound {self.bound:.4g} s, no plan yet"
        return f"best {self.best.seconds:.4g} s, bound {self.bound:.4g} s, gap {100 * self.gap:.2f} %"

    def _offer(self, verdict: Verdict) -> None:
        if verdict.fits and (self.best is None or verdict.seconds < self.best.seconds):
            self.best = verdict
            self.progress(self._words())

    def _raise_bound(self, seconds: float) -> None:
        if -INFINITY < seconds < INFINITY:
            self.bound = max(self.bound, min(seconds, self.ceiling))


def _effort(verdict: Verdict) -> tuple[int, int]:
    """(bytes swapped per micro-batch, cells in a mode other than keep)"""
    moved = sum(share.bytes for stage in verdict.plan.stages for share in stage.shares)
    return int(moved), sum(1 for stage in verdict.plan.stages for m in stage.modes if m)
