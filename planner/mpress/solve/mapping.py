"""Which GPU runs which stage, decided with everything else (why so: docs/decisions/0004-mapping.md).

Orders of GPUs that a symmetry of the machine takes to each other are one choice.  Where one is left, there is nothing to decide.  Else
the best one by rank (`ranking`) is solved as a machine of its own; what no order can exceed (`topology.optimistic`) bounds them all; and
where the two are further apart than the wanted gap, the next orders are searched for plans better by more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from mpress.errors import InfeasibleError, MpressError
from mpress.machine import Machine
from mpress.plan import HOST, Plan, StagePlan
from mpress.problem import Problem, check
from mpress.simulate import Replay, simulate
from mpress.solve import explain, search
from mpress.solve.backend import INFINITY, SOLVER
from mpress.solve.greedy import plain
from mpress.solve.judge import judge
from mpress.solve.ranking import Load, Ranking, load_of
from mpress.solve.search import EXACT, FEW_CELLS, Hopeless, Solution, status_words
from mpress.topology import Order, Orders, different_orders, look, optimistic, shared_uplink

MOST_ORDERS = 3  # orders of a large problem that are solved
MOST_ORDERS_OF_FEW = 64  # of a small one: every order of four GPUs


def plan(problem: Problem, progress: Callable[[str], None] | None = None, enough: float = INFINITY) -> Solution:
    """The best plan found over all orders of the machine's GPUs, its stages on the machine's own GPUs, with its gap to any order's best.

    Raises as search.plan does: InfeasibleError("no-plan"), MpressError("interrupted" or "work-limit"), Hopeless where `enough` is reached.
    """
    check(problem)
    return _Mapping(problem, progress or (lambda _: None), enough).run()


def unplanned(problem: Problem, plan: Plan) -> tuple[Plan, Replay]:
    """What plain pipelining would do on the GPUs of a plan: stages of equal time, everything kept.  May exceed memory."""
    order = tuple(stage.device for stage in plan.stages)
    bare, replay = explain.unplanned(problem)
    if order == tuple(range(len(order))):
        return bare, replay
    bare = on_gpus(bare, order)
    return bare, simulate(problem.workload, problem.machine, bare)


def missing_bytes(problem: Problem) -> tuple[int, ...] | None:
    """Bytes every stage is short of whatever the order of the GPUs, as explain.missing_bytes."""
    return explain.missing_bytes(replace(problem, machine=optimistic(problem.machine, problem.stages), gpus=0, any_uplinks=()))


def on_gpus(plan: Plan, order: Order) -> Plan:
    """A plan whose GPU s is GPU order[s] of the machine."""

    def moved(stage: StagePlan) -> StagePlan:
        shares = (replace(share, pool=order[share.pool]) if share.pool != HOST else share for share in stage.shares)
        return replace(stage, device=order[stage.device], shares=tuple(sorted(shares, key=lambda share: share.pool)))

    return replace(plan, stages=tuple(moved(stage) for stage in plan.stages))


@dataclass(frozen=True, slots=True)
class _Found:
    order: Order
    solution: Solution  # on the machine as the order shows it


class _Mapping:
    """What is known so far: the best plan of any order, a bound on all of them, the bound of each order that was solved."""

    def __init__(self, problem: Problem, progress: Callable[[str], None], enough: float) -> None:
        self.problem, self.progress, self.enough = problem, progress, enough
        machine = problem.machine
        compute = sum(
            problem.workload.types[t].forward_seconds + problem.workload.types[t].backward_seconds for t in problem.workload.cells
        )
        self.floor = compute * problem.micro_batches / problem.stages  # holds for every plan
        self.best: _Found | None = None
        self.bounds: dict[Order, float] = {}
        self.refusal: MpressError | None = None
        self.left = problem.work
        self.iterations = 0
        self.interrupted = self.bounded = False
        self.any_order = optimistic(machine, problem.stages)

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.floor / float(self.best.solution.replay.step_seconds)) if self.best else INFINITY

    @property
    def wanted(self) -> float:
        """Seconds from which on a plan is of no interest."""
        better = float(self.best.solution.replay.step_seconds) * (1.0 - max(self.problem.gap, EXACT)) if self.best else INFINITY
        return min(better, self.enough)

    @property
    def done(self) -> bool:
        return self.interrupted or self.gap <= max(self.problem.gap, EXACT) or self.floor >= self.enough

    def run(self) -> Solution:
        verdict = judge(self.problem, plain(self.problem))
        load = load_of(self.problem, verdict.plan, verdict.replay)
        orders = different_orders(self.problem.machine, self.problem.stages, Ranking(self.problem, load))
        if len(orders.all) == 1 and orders.complete:
            problem = replace(self._of(orders.all[0]), any_uplinks=(), work_limit=self.problem.work_limit)
            return self._placed(orders.all[0], search.plan(problem, self.progress, self.enough))
        self._search(orders, load)
        if self.best is not None and orders.complete and len(self.bounds) == len(orders.all):
            self.floor = max(self.floor, min(self.bounds.values()))
        return self._solution()

    def _search(self, orders: Orders, load: Load) -> None:
        """The best order by rank, what bounds them all, and further orders while they could matter."""
        few = len(self.problem.workload.cells) <= FEW_CELLS
        ranked, known = self._ranked(orders, load), self.best
        for number in range(MOST_ORDERS_OF_FEW if few else MOST_ORDERS):
            if self.best is not known and self.best is not None:
                load, known = load_of(self.problem, self.best.solution.plan, self.best.solution.replay), self.best
                ranked = self._ranked(orders, load)
            order = next((order for order in ranked if order not in self.bounds), None)
            if order is None or self.done or self.left <= 0:
                return
            self._try(order, self.wanted if number else INFINITY)
            if not self.bounded and not self.done:
                self._bound_all()

    def _ranked(self, orders: Orders, load: Load) -> Iterator[Order]:
        """Orders, best first.  Between equal ones the GPUs with most links decide, then links between neighbours, then how the machine
        looks from them; never how its GPUs are numbered.
        """
        ranking, machine = Ranking(self.problem, load), self.problem.machine

        def ways(order: Order) -> tuple[float, float]:
            return -sum(machine.links[a][b] for a in order for b in order), -sum(machine.links[a][b] for a, b in pairwise(order))

        scores = sorted((ranking(order), order) for order in orders.all)
        for _, equal in groupby(scores, key=lambda row: row[0]):
            yield from sorted((order for _, order in equal), key=lambda order: (ways(order), look(machine.placed(order))))

    def _of(self, order: Order) -> Problem:
        """The problem on the machine as an order shows it."""
        machine = self.problem.machine.placed(order)
        uplinks = shared_uplink(self.problem.machine, self.problem.stages) if self._only_uplinks_differ(machine) else ()
        return replace(self.problem, machine=machine, gpus=0, order=order, any_uplinks=uplinks, work_limit=max(self.left, 1.0))

    def _only_uplinks_differ(self, machine: Machine) -> bool:
        """Every GPU has the same links and memory: with shared uplinks left out of its bound, one order's bound is every order's."""
        linked = all(machine.links[a][b] > 0 for a in range(self.problem.stages) for b in range(self.problem.stages) if a != b)
        return linked and look(replace(machine, uplinks=())) == look(replace(self.any_order, uplinks=()))

    def _try(self, order: Order, below: float) -> None:
        """Solve one order for plans faster than `below`."""
        problem = self._of(order)
        self.bounds[order] = self.floor
        try:
            found = search.plan(problem, self.progress, min(below, self.enough), below, self.floor)
        except Hopeless as error:
            self._spend(error.iterations, error.work)
            self._learn(problem, error.bound_seconds)
            return
        except InfeasibleError as error:
            self._spend(1, 0.01 * self.problem.work)
            self.refusal = self.refusal or error
            self._learn(problem, INFINITY)
            return
        except MpressError as error:
            if error.code == "interrupted" and self.best is not None:
                self.interrupted = True
            elif error.code == "work-limit":
                self.refusal, self.left = self.refusal or error, 0.0
            else:
                raise
            return
        self._spend(found.iterations, found.work)
        self._learn(problem, found.bound_seconds)
        self.interrupted = found.status == "interrupted"
        if self.best is None or found.replay.step_seconds < self.best.solution.replay.step_seconds * (1.0 - EXACT):
            self.best = _Found(order, found)

    def _spend(self, iterations: int, work: float) -> None:
        self.iterations += iterations
        self.left -= work

    def _learn(self, problem: Problem, bound: float) -> None:
        self.bounds[problem.order] = max(bound, self.floor)
        if problem.any_uplinks and bound < INFINITY:
            self.floor, self.bounded = max(self.floor, bound), True

    def _bound_all(self) -> None:
        """Bound the plans of all orders by those of a machine that is better than any of them."""
        below = self.wanted
        if isinstance(self.refusal, InfeasibleError):
            short = missing_bytes(self.problem)
            if short is not None and any(short):
                raise self.refusal
        if below == INFINITY:  # no plan yet, and any would do
            return
        self.bounded = True
        problem = replace(self.problem, machine=self.any_order, gpus=0, any_uplinks=(), work_limit=max(self.left, 1.0))
        try:
            found = search.plan(problem, self.progress, below, below, self.floor)
        except Hopeless as error:
            self._spend(error.iterations, error.work)
            self.floor = max(self.floor, error.bound_seconds)
        except MpressError as error:
            if error.code not in ("interrupted", "work-limit"):
                raise
            self.interrupted, self.left = error.code == "interrupted", 0.0
        else:
            self._spend(found.iterations, found.work)
            self.interrupted = found.status == "interrupted"
            self.floor = max(self.floor, found.bound_seconds)

    def _solution(self) -> Solution:
        if self.best is None:
            if INFINITY > self.floor >= self.enough:
                raise Hopeless(self.floor, self.iterations, self.problem.work - self.left)
            raise self.refusal or MpressError(
                "work-limit", "the work limit was reached before any plan was found", "--work-limit", "raise it"
            )
        return self._placed(self.best.order, self.best.solution)

    def _placed(self, order: Order, found: Solution) -> Solution:
        """The solution on the machine's own GPUs."""
        problem = self.problem
        one = self.best is None  # one order is all there is, and its search has said everything
        plan = on_gpus(found.plan, order)
        replay = found.replay if order == tuple(range(len(order))) else simulate(problem.workload, problem.machine, plan)
        if one:
            return replace(found, plan=plan, replay=replay)
        bound = min(self.floor, float(replay.step_seconds))
        status = status_words(self.gap, problem.gap, self.interrupted)
        return Solution(plan, replay, bound, self.gap, status, SOLVER, self.iterations, problem.work - self.left)
