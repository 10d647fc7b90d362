"""From a model file to two written files: a printable list of steps and a dumb runner.  Start reading here.

Each step reads what earlier steps left on the bench and leaves its own result there.  Nothing is written before the last step, so a
refusal anywhere leaves the files of an earlier plan as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpress import __version__
from mpress.atomic import check_directory, write_files
from mpress.cells import Chain
from mpress.emit.module import emit_module
from mpress.emit.report import Report, make_report
from mpress.emit.schedule_file import Certificate, emit_schedule
from mpress.errors import InputError
from mpress.fold import fold
from mpress.graph import Graph
from mpress.machine import Machine, load_machine
from mpress.modes import build_workload
from mpress.options import Options
from mpress.plan import Plan
from mpress.problem import Problem
from mpress.program import CellProgram
from mpress.recipe import Recipe
from mpress.simulate import Replay
from mpress.solve.explain import unplanned
from mpress.solve.search import Solution, plan
from mpress.trace.fx_export import to_fx
from mpress.trace.record import trace
from mpress.trace.semantics import Semantics
from mpress.units import Seconds
from mpress.verify import verify
from mpress.workload import Workload

Progress = Callable[[str, float | None, str], None]  # (step, seconds or None while it runs, what it found)


@dataclass(frozen=True, slots=True)
class Outcome:
    """files: names written (none in a dry run); timings: seconds by key, `trace_seconds`, `solve_seconds`, `emit_seconds`."""

    report: Report
    files: tuple[str, ...]
    timings: tuple[tuple[str, float], ...]


class Bench:
    """What the steps have made so far; each attribute exists once its step has run."""

    __slots__ = (
        "chain", "graph", "machine", "module_text", "options", "plan", "problem", "programs", "progress", "recipe", "replay", "report",
        "schedule_text", "solution", "unplanned", "workload", "written",
    )  # fmt: skip
    options: Options
    progress: Progress
    graph: Graph
    chain: Chain
    machine: Machine
    recipe: Recipe
    workload: Workload
    programs: tuple[tuple[CellProgram, ...], ...]
    problem: Problem
    solution: Solution
    unplanned: tuple[Plan, Replay]
    replay: Replay
    report: Report
    module_text: str
    schedule_text: str
    written: tuple[str, ...]

    def __init__(self, options: Options, progress: Progress) -> None:
        self.options, self.progress = options, progress


@dataclass(frozen=True, slots=True)
class Step:
    """One named step; `run` returns a few words about what it found.  `phase` is the key its seconds are counted under."""

    name: str
    phase: str
    run: Callable[[Bench], str]


def plan_model(options: Options, on_step: Progress) -> Outcome:
    """Plan a model; raises MpressError.  `on_step` hears of each step when it begins (seconds None) and when it ends."""
    bench = Bench(options, on_step)
    spent: dict[str, float] = {}
    for step in STEPS:
        on_step(step.name, None, "")
        started = time.perf_counter()
        note = step.run(bench)
        seconds = time.perf_counter() - started
        spent[step.phase] = spent.get(step.phase, 0.0) + seconds
        on_step(step.name, seconds, note)
    return Outcome(bench.report, bench.written, tuple(spent.items()))


def dump_fx(options: Options, on_step: Progress) -> str:
    """The recorded step in the text form of torch.fx, without planning it; raises MpressError."""
    bench = Bench(options, on_step)
    for step in STEPS[:2]:
        step.run(bench)
    return str(to_fx(bench.graph).graph)


def _check(bench: Bench) -> str:
    """Everything that can be refused without tracing."""
    options = bench.options
    for flag, value, least in (
        ("--gpus", options.gpus, 1),
        ("--micro-batch", options.micro_batch, 1),
        ("--micro-batches", options.micro_batches, 1),
        ("--work-limit", options.work_limit, 0),
        ("--gap", options.gap, 0),
    ):
        if not value >= least:
            raise InputError("option", f"{flag} is {value:g}, it must be at least {least}", where=flag)
    if not 0 <= options.reserve < 1:
        raise InputError("option", f"--reserve is {options.reserve:g}", where="--reserve", hint="give a share of the memory, such as 0.05")
    if not options.dry_run:
        check_directory(options.out)
    bench.machine = load_machine(options.machine, gpus=options.gpus, reserve=options.reserve)
    bench.recipe = Recipe(options.precision, options.optimizer)
    return f"{bench.machine.name}, {options.gpus} GPUs"


def _trace(bench: Bench) -> str:
    options = bench.options
    bench.graph = trace(
        options.model,
        model_args=dict(options.model_args),
        micro_batch=options.micro_batch,
        precision=options.precision.value,
        semantics=Semantics(attention=options.attention),
    )
    return f"{len(bench.graph.ops)} operators, {sum(p.elements for p in bench.graph.parameters):,} parameters"


def _fold(bench: Bench) -> str:
    bench.chain = fold(bench.graph)
    return f"{len(bench.chain.cells)} cells of {len(bench.chain.representatives)} types"


def _cost(bench: Bench) -> str:
    bench.workload, bench.programs = build_workload(bench.graph, bench.chain, bench.machine, bench.recipe)
    return f"{sum(len(kind.modes) for kind in bench.workload.types)} modes"


def _solve(bench: Bench) -> str:
    options = bench.options
    bench.problem = Problem(
        workload=bench.workload,
        machine=bench.machine,
        schedule=options.schedule,
        micro_batches=options.micro_batches,
        gap=options.gap,
        work_limit=options.work_limit,
    )
    bench.unplanned = unplanned(bench.problem)
    bench.solution = plan(bench.problem, lambda words: bench.progress("solve", None, words))
    return f"{bench.solution.status}, step {bench.solution.replay.step_seconds:.3f} s"


def _verify(bench: Bench) -> str:
    bench.replay = verify(bench.workload, bench.machine, bench.solution.plan)
    return f"{len(bench.solution.plan.stages)} stages within capacity"


def _emit(bench: Bench) -> str:
    solution, options = bench.solution, bench.options
    bench.report = make_report(
        bench.graph,
        bench.chain,
        bench.workload,
        bench.programs,
        bench.machine,
        bench.recipe,
        solution.plan,
        bench.replay,
        bench.unplanned,
        status=solution.status,
        gap=solution.gap,
        gap_target=options.gap,
        bound_seconds=Seconds(solution.bound_seconds),
        solver=solution.solver,
        iterations=solution.iterations,
    )
    module_name, schedule_name = file_names(options.model)
    bench.module_text = emit_module(
        bench.graph,
        bench.chain,
        bench.workload,
        bench.programs,
        solution.plan,
        bench.replay,
        machine=bench.machine.name,
        recipe=bench.recipe.words(),
        dtype=bench.recipe.dtype,
        schedule_name=schedule_name,
        module_name=module_name,
        version=__version__,
    )
    bench.schedule_text = emit_schedule(
        bench.graph,
        bench.chain,
        bench.workload,
        bench.programs,
        solution.plan,
        bench.replay,
        Certificate(solution.solver, solution.status, solution.bound_seconds, solution.gap),
        machine=bench.machine.name,
        precision=options.precision.value,
        optimizer=options.optimizer.value,
        version=__version__,
    )
    return f"{bench.module_text.count(chr(10))} lines"


def _write(bench: Bench) -> str:
    bench.written = ()
    if bench.options.dry_run:
        return "nothing (dry run)"
    module, schedule = file_names(bench.options.model)
    write_files(((bench.options.out / module, bench.module_text), (bench.options.out / schedule, bench.schedule_text)))
    bench.written = tuple(str(bench.options.out / name) for name in (module, schedule))
    return ", ".join((module, schedule))


def file_names(model: str) -> tuple[str, str]:
    """ "models/gpt.py:factory" -> ("gpt_mpress.py", "gpt.schedule.json")."""
    path = model if model.endswith(".py") else model.rpartition(":")[0] or model
    stem = Path(path).stem
    return f"{stem}_mpress.py", f"{stem}.schedule.json"


STEPS = (
    Step("check", "trace_seconds", _check),
    Step("trace", "trace_seconds", _trace),
    Step("fold", "trace_seconds", _fold),
    Step("cost", "solve_seconds", _cost),
    Step("solve", "solve_seconds", _solve),
    Step("verify", "solve_seconds", _verify),
    Step("emit", "emit_seconds", _emit),
    Step("write", "emit_seconds", _write),
)
