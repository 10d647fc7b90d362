"""Plans each micro-batch size as the driver plans one - fold, cost, solve - and keeps the fastest.

No plan is made of a graph that was only predicted: the size that wins is recorded and, if the law was wrong there, planned again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mpress.buffer_rules import check_buffers
from mpress.cells import Chain
from mpress.errors import InfeasibleError, InputError
from mpress.fold import check_chain, fold
from mpress.graph import Graph
from mpress.intake import Progress, attention_note
from mpress.machine import Machine
from mpress.modes import build_workload
from mpress.options import Options
from mpress.plan import ScheduleKind
from mpress.problem import DEFAULT_WORK, Problem
from mpress.program import CellProgram
from mpress.recipe import Recipe
from mpress.scale import difference
from mpress.sizes import Choice, Choices, Effort, TooSlow, Trial, choices, choose
from mpress.solve.mapping import missing_bytes, plan
from mpress.solve.search import Hopeless, Solution
from mpress.units import Seconds
from mpress.workload import Workload


@dataclass(frozen=True, slots=True)
class Task:
    """What all sizes have in common."""

    machine: Machine
    recipe: Recipe
    schedule: ScheduleKind
    gap: float
    work_limit: float
    gpus: int = 0  # stages, 0 = one for each GPU of the machine


@dataclass(frozen=True, slots=True)
class Candidate:
    """The graph of one size and what follows from it without solving."""

    graph: Graph
    chain: Chain
    workload: Workload
    programs: tuple[tuple[CellProgram, ...], ...]
    problem: Problem


@dataclass(frozen=True, slots=True)
class Planned:
    """A candidate with its plan."""

    candidate: Candidate
    solution: Solution


def trace_choices(options: Options, machine: Machine, recipe: Recipe, progress: Progress) -> tuple[SizePlanner, str]:
    """The sizes the user leaves open, traced; and a few words about that."""
    from mpress.trace.record import open_model, trace_file  # late: torch, which planning a graph file does without
    from mpress.trace.semantics import Semantics
    from mpress.trace.sizes import trace_sizes

    flash = machine.devices[0].flash_attention
    among, precision, semantics = choices(options), recipe.precision.value, Semantics(attention=options.attention, flash=flash)
    model_file = open_model(options.model, dict(options.model_args), options.sequence)
    traced = trace_sizes(model_file, among.sizes, precision=precision, semantics=semantics, depth=options.depth)

    def record(size: int) -> Graph:
        return trace_file(model_file, micro_batch=size, precision=precision, semantics=semantics, depth=options.depth)

    task = Task(machine, recipe, options.schedule, options.gap, options.work_limit or DEFAULT_WORK, options.gpus)
    planner = SizePlanner(among, task, traced.graphs, traced.refusals, traced.recorded, record, progress)
    any_graph = next(iter(traced.graphs.values()), None)
    notes = () if any_graph is None else attention_note(replace(options.recording, flash=flash), any_graph)
    return planner, "; ".join((f"{len(traced.graphs)} sizes", *([traced.note] if traced.note else []), *notes))


class SizePlanner:
    """graphs, refusals: of each size; recorded: sizes whose graph is a recording; record: makes one."""

    def __init__(
        self,
        among: Choices,
        task: Task,
        graphs: Mapping[int, Graph],
        refusals: Mapping[int, InputError],
        recorded: frozenset[int],
        record: Callable[[int], Graph],
        progress: Progress,
    ) -> None:
        self._among, self._task, self._record, self._progress = among, task, record, progress
        self._graphs, self._refusals, self._recorded = dict(graphs), refusals, set(recorded)
        self._candidates: dict[int, Candidate] = {}

    def best(self) -> Choice[Planned]:
        """The size with the most samples per second; raises the refusal of the smallest where no size can be planned."""
        choice = choose(self._among, self._task.gap, self._plan, self._confirm)
        found = choice.best
        solution = replace(found.result.solution, status=found.status, gap=found.gap, bound_seconds=found.bound_seconds)
        return replace(choice, best=replace(found, result=replace(found.result, solution=solution)))

    def _plan(self, size: int, effort: Effort) -> Trial[Planned]:
        if size in self._refusals:
            raise self._refusals[size]
        name, started = f"size {size}", time.perf_counter()
        self._progress(name, None, "fold, cost")
        candidate = self._candidate(size)
        problem = replace(candidate.problem, gap=effort.gap, work_limit=effort.share * self._task.work_limit)
        try:
            found = plan(problem, lambda words: self._progress(name, None, words), effort.enough)
        except Hopeless as error:
            short = missing_bytes(problem)
            self._progress(name, time.perf_counter() - started, str(error))
            if short is not None and any(short):
                raise InfeasibleError("no-plan", "no plan fits", name, missing_bytes=max(short)) from None
            raise TooSlow(error.bound_seconds, None if short is None else True) from None
        seconds = found.replay.step_seconds
        note = f"{found.status}, step {seconds:.3f} s, {self._among.samples / seconds:.2f} samples/s"
        self._progress(name, time.perf_counter() - started, note)
        return Trial(size, seconds, Seconds(found.bound_seconds), found.gap, found.status, Planned(candidate, found))

    def _candidate(self, size: int) -> Candidate:
        known = self._candidates.get(size)
        if known is None:
            task, graph = self._task, self._graphs[size]
            check_buffers(graph)
            chain = fold(graph)
            check_chain(graph, chain)
            workload, programs = build_workload(graph, chain, task.machine, task.recipe)
            count = self._among.samples // size
            problem = Problem(workload, task.machine, task.schedule, count, gap=task.gap, work_limit=task.work_limit, gpus=task.gpus)
            known = self._candidates[size] = Candidate(graph, chain, workload, programs, problem)
        return known

    def _confirm(self, best: Trial[Planned]) -> Trial[Planned]:
        if best.size in self._recorded:
            return best
        graph = self._record(best.size)
        self._recorded.add(best.size)
        wrong = difference(graph, best.result.candidate.graph)
        if not wrong:
            return best
        self._progress(f"size {best.size}", None, f"traced and planned again: {wrong}")
        self._graphs[best.size] = graph
        del self._candidates[best.size]
        return self._plan(best.size, Effort(self._task.gap))
