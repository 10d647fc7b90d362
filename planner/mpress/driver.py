"""From a model file, or a graph file, to written files: printable lists of steps and a dumb runner.  Start reading here.

Each step reads what earlier steps left on the bench and leaves its own result there.  Nothing is written before the last step, so a
refusal anywhere leaves the files of an earlier plan as they are.  Only what traces imports torch: planning a graph file needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mpress import __version__
from mpress.atomic import check_directory, write_files
from mpress.buffer_rules import check_buffers
from mpress.cells import Chain
from mpress.costs import check_precision
from mpress.emit.module import emit_module
from mpress.emit.report import Report, make_report
from mpress.emit.schedule_file import Certificate, emit_schedule
from mpress.errors import BrokenPlanError, InputError
from mpress.fold import check_chain, fold
from mpress.graph import Graph
from mpress.graph_check import wrong
from mpress.graph_file import SUFFIX, is_graph_file
from mpress.intake import Progress, graph_words, prove_graph, read_graph_file, record_graph, stem, timed
from mpress.machine import Machine, load_machine
from mpress.modes import build_workload
from mpress.options import Attention, Options, Recording
from mpress.plan import Plan
from mpress.problem import Problem
from mpress.program import CellProgram
from mpress.recipe import Precision, Recipe
from mpress.simulate import Replay
from mpress.size_plans import SizePlanner, trace_choices
from mpress.sizes import SizeRow, check_step, per_step, refuse_sizes
from mpress.solve.mapping import plan, unplanned
from mpress.solve.search import Solution
from mpress.units import Seconds
from mpress.verify import verify
from mpress.workload import Workload


@dataclass(frozen=True, slots=True)
class Outcome:
    """files: names written (none in a dry run); timings: seconds by key, `trace_seconds`, `solve_seconds`, `emit_seconds`."""

    report: Report
    files: tuple[str, ...]
    timings: tuple[tuple[str, float], ...]


class Bench:
    """What the steps have made so far; each attribute exists once its step has run."""

    __slots__ = (
        "chain", "from_file", "graph", "machine", "module_text", "options", "plan", "problem", "programs", "progress", "proof",
        "recipe", "replay", "report", "rows", "schedule_text", "sizes", "solution", "unplanned", "workload", "written",
    )  # fmt: skip
    options: Options
    progress: Progress
    sizes: SizePlanner  # and rows: where the micro-batch size is to be chosen
    rows: tuple[SizeRow, ...]
    from_file: bool  # a graph file stands in for the model
    graph: Graph
    proof: tuple[str, str]  # what was proven of the graph, and how or why not
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
        self.options, self.progress, self.from_file, self.rows = options, progress, is_graph_file(options.model), ()


@dataclass(frozen=True, slots=True)
class Step:
    """One named step; `run` returns a few words about what it found.  `phase` is the key its seconds are counted under."""

    name: str
    phase: str
    run: Callable[[Bench], str]


def plan_model(options: Options, on_step: Progress) -> Outcome:
    """Plan a model or a graph file; raises MpressError.  `on_step` hears of each step when it begins (seconds None) and when it ends."""
    bench = Bench(options, on_step)
    spent: dict[str, float] = {}
    for step in GRAPH_STEPS if bench.from_file else STEPS if options.sizes is None else SIZE_STEPS:
        seconds = timed(step.name, partial(step.run, bench), on_step)
        spent[step.phase] = spent.get(step.phase, 0.0) + seconds
    return Outcome(bench.report, bench.written, tuple(spent.items()))


def dump_fx(options: Options, on_step: Progress) -> str:
    """The recorded step in the text form of torch.fx, without planning it; raises MpressError."""
    from mpress.trace.fx_export import to_fx  # late: torch

    refuse_sizes(options, "--dump-fx", "name one size")
    bench = Bench(options, on_step)
    if bench.from_file:
        raise InputError(
            "option", "--dump-fx needs a model: a graph file is a dump already", "--dump-fx", "read the file, or name the model file"
        )
    for step in STEPS[:2]:
        step.run(bench)
    return str(to_fx(bench.graph).graph)


def _check(bench: Bench) -> str:
    """Everything that can be refused without tracing."""
    options = bench.options
    for flag, value, least in (
        ("--gpus", options.gpus, 1),
        ("--micro-batch", options.recording.micro_batch, 1),
        ("--micro-batches", options.micro_batches, 1),
        ("--global-batch", 1 if options.global_batch is None else options.global_batch, 1),
        ("--work-limit", options.work_limit, 0),
        ("--gap", options.gap, 0),
    ):
        if not value >= least:
            raise InputError("option", f"{flag} is {value:g}, it must be at least {least}", where=flag)
    if not 0 <= options.reserve < 1:
        raise InputError("option", f"--reserve is {options.reserve:g}", where="--reserve", hint="give a share of the memory, such as 0.05")
    if not bench.from_file:
        check_step(options)
    if not options.dry_run:
        check_directory(options.out)
    bench.machine = load_machine(options.machine, gpus=options.gpus, reserve=options.reserve, whole=True)
    if options.attention is Attention.FLASH and not bench.machine.devices[0].flash_attention:
        message = f"the GPUs of {bench.machine.name} have no flash attention kernel"
        raise InputError("attention", message, "--attention", "use --attention auto or efficient, or another --machine")
    if not bench.from_file:  # what a graph file was recorded in is known once it is read
        _set_recipe(bench, options.recording.precision)
    return f"{bench.machine.name}, {options.gpus} GPUs"


def _set_recipe(bench: Bench, precision: Precision) -> None:
    bench.recipe = Recipe(precision, bench.options.optimizer)
    check_precision(bench.machine, bench.recipe)


def _recording(bench: Bench) -> Recording:
    """What to record, for the GPUs of the machine."""
    return replace(bench.options.recording, flash=bench.machine.devices[0].flash_attention)


def _trace(bench: Bench) -> str:
    bench.graph, words = record_graph(_recording(bench))
    return words


def _read(bench: Bench) -> str:
    bench.graph, precision = read_graph_file(bench.options)
    _set_recipe(bench, precision)
    return f"{graph_words(bench.graph)}, {precision.value}, micro-batch {bench.graph.micro_batch}"


def _prove(bench: Bench) -> str:
    if bench.from_file:
        bench.proof = ("not proven", "a graph file does not hold the model; `mpress-plan trace` proves what it records")
    else:
        bench.proof = prove_graph(_recording(bench), bench.graph, bench.options.prove)
    return ": ".join(bench.proof)


def _trace_sizes(bench: Bench) -> str:
    bench.sizes, note = trace_choices(bench.options, bench.machine, bench.recipe, bench.progress)
    return note


def _choose(bench: Bench) -> str:
    """Fold, cost and solve for each size; what belongs to the best one is laid on the bench."""
    choice = bench.sizes.best()
    bench.rows, best = choice.rows, choice.best.result
    won = best.candidate
    size, count = choice.best.size, won.problem.micro_batches
    bench.options = replace(bench.options, micro_batch=size, micro_batches=count, sizes=None, global_batch=None)
    bench.graph, bench.chain, bench.workload, bench.programs = won.graph, won.chain, won.workload, won.programs
    bench.problem, bench.solution, bench.unplanned = won.problem, best.solution, unplanned(won.problem, best.solution.plan)
    return f"{size} samples in a micro-batch, step {choice.best.step_seconds:.3f} s"


def _fold(bench: Bench) -> str:
    check_buffers(bench.graph)
    bench.chain = fold(bench.graph)
    try:
        check_chain(bench.graph, bench.chain)
    except BrokenPlanError as error:
        if not bench.from_file:
            raise
        origin = Path(bench.options.model).name  # a recorder makes no such graph, but a hand or another front end may
        raise wrong("ops", f"do not fit together: {error.message}", origin, "check forward_op and the order of ops") from None
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
        micro_batches=per_step(options, bench.graph.micro_batch),
        gap=options.gap,
        work_limit=options.work_limit,
        gpus=options.gpus,
    )
    bench.solution = plan(bench.problem, lambda words: bench.progress("solve", None, words))
    bench.unplanned = unplanned(bench.problem, bench.solution.plan)
    return f"{bench.solution.status}, step {bench.solution.replay.step_seconds:.3f} s"


def _verify(bench: Bench) -> str:
    bench.replay = verify(bench.workload, bench.machine, bench.solution.plan)
    return f"{len(bench.solution.plan.stages)} stages within capacity"


def _emit(bench: Bench) -> str:
    solution, options = bench.solution, bench.options
    report = make_report(
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
        no_module=_no_module(bench),
        proof=bench.proof,
    )
    bench.report = replace(report, sizes=bench.rows)
    if bench.report.placed_layers != bench.report.layers:
        placed = f"{bench.report.placed_layers} of {bench.report.layers} layers are on a stage"
        raise BrokenPlanError("partition", placed, bench.graph.model)
    bench.schedule_text = emit_schedule(
        bench.graph,
        bench.chain,
        bench.workload,
        bench.programs,
        solution.plan,
        bench.replay,
        Certificate(solution.solver, solution.status, solution.bound_seconds, solution.gap),
        machine=bench.machine.name,
        precision=bench.recipe.precision.value,
        optimizer=options.optimizer.value,
        version=__version__,
    )
    if bench.report.no_module:
        bench.module_text = ""
        return f"{bench.schedule_text.count(chr(10))} lines of schedule"
    module_name, schedule_name = file_names(_named(bench))
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
    return f"{bench.module_text.count(chr(10))} lines"


def _no_module(bench: Bench) -> str:
    """Why no module is written, "" where one is."""
    if bench.from_file:
        return "planned from a graph file, which holds the step but not the model"
    return "--schedule-only" if bench.options.schedule_only else ""


def _write(bench: Bench) -> str:
    bench.written = ()
    if bench.options.dry_run:
        return "nothing (dry run)"
    named = zip(file_names(_named(bench)), (bench.module_text, bench.schedule_text), strict=True)
    files = tuple((bench.options.out / name, text) for name, text in named if text)
    write_files(files)
    bench.written = tuple(str(path) for path, _ in files)
    return ", ".join(path.name for path, _ in files)


def _named(bench: Bench) -> str:
    """What the files are called after: what the user named, but for a configuration, whose name is often config.json, the graph."""
    configuration = bench.options.model.endswith(SUFFIX) and not bench.from_file
    return f"{bench.graph.model}{SUFFIX}" if configuration else bench.options.model


def file_names(model: str) -> tuple[str, str]:
    """ "models/gpt.py:factory" or "gpt.graph.json" -> ("gpt_mpress.py", "gpt.schedule.json")."""
    return f"{stem(model)}_mpress.py", f"{stem(model)}.schedule.json"


STEPS = (
    Step("check", "trace_seconds", _check),
    Step("trace", "trace_seconds", _trace),
    Step("prove", "trace_seconds", _prove),
    Step("fold", "trace_seconds", _fold),
    Step("cost", "solve_seconds", _cost),
    Step("solve", "solve_seconds", _solve),
    Step("verify", "solve_seconds", _verify),
    Step("emit", "emit_seconds", _emit),
    Step("write", "emit_seconds", _write),
)
SIZE_STEPS = (
    STEPS[0],
    Step("trace", "trace_seconds", _trace_sizes),
    Step("choose", "solve_seconds", _choose),  # fold, cost and solve for each size
    Step("prove", "trace_seconds", _prove),
    *STEPS[6:],
)
GRAPH_STEPS = tuple(Step("read", step.phase, _read) if step.name == "trace" else step for step in STEPS)
