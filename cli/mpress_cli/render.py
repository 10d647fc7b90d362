"""Report -> the screen: tables, and what is worth a line.  Pure: prints nothing, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mpress.emit.actions import ACTIONS, ActionReport
from mpress.emit.report import Report
from mpress.intake import Traced
from mpress.plan import HOST
from mpress.units import gib
from mpress_cli.cut_table import cut_table
from mpress_cli.size_table import size_table
from mpress_cli.words import assumption_lines, checkpoint_words, count, proof_words, rounds, scale, seconds, shape, shape_words, tie_lines

WORDS = {"keep": "keep", "recompute": "recompute", "swap_host": "swap to host", "swap_d2d": "swap to GPUs"}
CAUSE_COLUMNS = ("weights", "gradients", "optimizer", "activations", "foreign stripes")
SHORT = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "foreign stripes": "foreign"}
MATRIX_GPUS = 8  # a wider matrix does not fit 80 columns; a list is shown instead
MAX_KINDS = 5  # rows of tensor kinds per action; the rest is summed


def screen(report: Report, files: tuple[str, ...], timings: Mapping[str, float]) -> Group:
    """The whole screen of a plan, readable at 80 columns and without colour."""
    parts: list[RenderableType] = [heading(report), memory_table(report), cause_table(report), stage_table(report)]
    if report.cuts:
        parts.append(cut_table(report))
    parts.append(action_table(report))
    if any(row.to_gpu != HOST for row in report.stripes):
        parts.append(stripe_matrix(report))
    if report.sizes:
        parts.append(size_table(report))
    parts.append(summary(report, files, timings))
    spaced: list[RenderableType] = []
    for part in parts:
        spaced += [part, Text()]
    return Group(*spaced[:-1])


def heading(report: Report) -> Group:
    """Machine and recipe in words."""
    capacities = sorted({(stage.capacity_bytes, stage.usable_bytes) for stage in report.stages})
    sizes = ", ".join(f"{gib(capacity)} each, {gib(usable)} usable ({report.reserve:.1%} reserved)" for capacity, usable in capacities)
    return Group(
        _line("model", f"{report.model}, {count(report.parameters)} parameters"),
        _line("machine", f"{report.machine}, {report.gpus} GPUs, {sizes}"),
        _line("recipe", report.recipe_words),
        _line("schedule", f"{report.schedule}, {report.micro_batches} micro-batches of {report.micro_batch}, {len(report.stages)} stages"),
        _line("shapes", shape_words(report)),
        _line("trace", ": ".join(report.proof)),
        *_named("assumed", assumption_lines(report.assumptions)),
    )


def traced_screen(traced: Traced) -> Group:
    """What was recorded, and where it is now."""
    graph = traced.graph
    parameters = sum(parameter.elements for parameter in graph.parameters)
    inputs = "".join(f", {item.name} {shape(graph.tensors[item.tensor].shape)}" for item in graph.inputs)
    lines = [
        _line("model", f"{graph.model}, {count(parameters)} parameters, {traced.precision.value}"),
        _line("step", f"{len(graph.ops)} operators, forward and backward"),
        _line("shapes", f"micro-batch {graph.micro_batch}{inputs}"),
        _line("trace", ": ".join(traced.proof)),
        *_named("assumed", assumption_lines(graph.assumptions)),
    ]
    if graph.checkpoints:
        lines.append(_line("recompute", checkpoint_words(graph.checkpoints)))
    return Group(*lines, _line("wrote", traced.file))


def memory_table(report: Report) -> Table:
    """What plain pipelining would need beside what the plan needs, GPU by GPU."""
    size, unit = scale(max(max(s.unplanned_peak_bytes, s.peak_bytes) for s in report.stages))
    table = _table(f"Peak memory per GPU, {unit}", "GPU", f"plain {report.schedule}", "planned", "usable", "free", "at step")
    for stage in report.stages:
        over = stage.unplanned_peak_bytes > stage.usable_bytes
        plain = Text(f"{stage.unplanned_peak_bytes / size:.2f}{' over' if over else ''}", style="bold red" if over else "")
        free = stage.usable_bytes - stage.peak_bytes
        table.add_row(
            str(stage.gpu),
            plain,
            f"{stage.peak_bytes / size:.2f}",
            f"{stage.usable_bytes / size:.2f}",
            f"{free / size:.2f}",
            stage.peak_action,
        )
    return table


def cause_table(report: Report) -> Group:
    """The planned peak by cause, and how many micro-batches the activations are of."""
    size, unit = scale(max(s.peak_bytes for s in report.stages))
    heads = [SHORT.get(cause, cause) for cause in CAUSE_COLUMNS]
    table = _table(f"Planned peak by cause, {unit}", "GPU", *heads, "in flight", "working", "reserve")
    for stage in report.stages:
        causes = dict(stage.causes)
        working = sum(part for cause, part in stage.causes if cause not in CAUSE_COLUMNS)
        cells = [f"{causes.get(cause, 0) / size:.2f}" for cause in CAUSE_COLUMNS]
        reserve = stage.capacity_bytes - stage.usable_bytes
        table.add_row(str(stage.gpu), *cells, f"x{stage.in_flight}", f"{working / size:.2f}", f"{reserve / size:.2f}")
    return Group(table, Text("working: inputs, boundary and swap buffers, temporaries", style="dim"))


def stage_table(report: Report) -> Table:
    """Which layers run where, and the seconds of one micro-batch."""
    factor, unit = (1e3, "ms") if max(s.forward_seconds + s.backward_seconds for s in report.stages) < 10 else (1.0, "s")
    table = _table(f"Stages ({unit} per micro-batch)", "stage", "GPU")
    table.add_column("layers", justify="left", overflow="fold")
    for head in ("params", "F", "B", "recompute"):
        table.add_column(head, justify="right", no_wrap=True)
    for stage in report.stages:
        seconds = (stage.forward_seconds, stage.backward_seconds, stage.recompute_seconds)
        words = [f"{value * factor:.2f}" for value in seconds]
        table.add_row(str(stage.stage), str(stage.gpu), stage.layers, count(stage.parameters), *words)
    return table


def action_table(report: Report) -> Group:
    """Actions by kind of tensor: what stays, and what each way of making room moves off the GPUs."""
    size, unit = scale(max((row.held_bytes for row in report.actions), default=0))
    table = Table(
        title=f"Actions ({unit} over all micro-batches in flight)", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for head in ("action", "tensors of"):
        table.add_column(head, justify="left", overflow="fold")
    for head in ("tensors", "size", "costs"):
        table.add_column(head, justify="right", no_wrap=True)
    for action in ACTIONS:
        rows = [row for row in report.actions if row.action == action]
        for row in rows[:MAX_KINDS]:
            table.add_row(WORDS[action], row.kind, str(row.tensors), f"{row.held_bytes / size:.2f}", _seconds_of([row]))
        rest = rows[MAX_KINDS:]
        if rest:
            table.add_row(WORDS[action], f"{len(rest)} smaller kinds", *_sums(rest, size), _seconds_of(rest))
        if rows:
            table.add_row(*[Text(word, style="bold") for word in (WORDS[action], "all", *_sums(rows, size), _seconds_of(rows))])
    costs = "costs: compute in a step, all GPUs together"
    if report.stall_seconds > 0:
        costs += f"; they also wait {seconds(report.stall_seconds)} for swaps"
    return Group(table, Text(costs, style="dim"))


def _sums(rows: Sequence[ActionReport], size: int) -> tuple[str, str]:
    return str(sum(row.tensors for row in rows)), f"{sum(row.held_bytes for row in rows) / size:.2f}"


def _seconds_of(rows: Sequence[ActionReport]) -> str:
    spent = sum(row.seconds for row in rows)
    return seconds(spent) if spent > 0 else ""


def stripe_matrix(report: Report) -> Group:
    """Who parks how much where: a matrix of stripes per step, and how busy the busiest links are."""
    rows = [row for row in report.stripes if row.to_gpu != HOST]
    size, unit = scale(max(row.bytes for row in rows))
    title = Text(f"D2D swap from -> to, {unit} per step one way (the same comes back)", style="bold")
    targets = sorted({row.to_gpu for row in rows})
    if len(targets) <= MATRIX_GPUS:
        table = _table("", "from", *[f"-> {target}" for target in targets], "link use")
        for source in sorted({row.from_gpu for row in rows}):
            mine = {row.to_gpu: row for row in rows if row.from_gpu == source}
            cells = [f"{mine[target].bytes / size:.2f}" if target in mine else "." for target in targets]
            table.add_row(str(source), *cells, f"{max(row.link_use for row in mine.values()):.0%}")
    else:
        table = _table("", "from", "to", "moved", "link use")
        for row in rows:
            table.add_row(str(row.from_gpu), str(row.to_gpu), f"{row.bytes / size:.2f}", f"{row.link_use:.0%}")
    return Group(title, table, Text("link use: share of the step the busiest of these links is in use", style="dim"))


def summary(report: Report, files: tuple[str, ...], timings: Mapping[str, float]) -> Group:
    """Step time, throughput, how good the plan is, how long it took, what was written."""
    throughput = f"{report.samples_per_second:.2f} samples/s"
    lines = [
        _line("step", f"{seconds(report.step_seconds)}, {throughput}, {report.bubble:.1%} of all GPUs' time idle"),
        _line("proof", proof_words(report)),
        _line("solved", f"in {timings.get('solve_seconds', 0.0):.1f} s by {report.solver}, {rounds(report.iterations)}"),
    ]
    if report.layers:
        lines.append(_line("check", f"{report.placed_layers}/{report.layers} layers placed"))
    lines += _named("tied", tie_lines(report))
    if report.checkpoints:
        lines.append(_line("recompute", checkpoint_words(report.checkpoints)))
    lines += _named("wrote", files or ("nothing (--dry-run)",))
    if report.no_module:
        lines.append(_line("", f"no module: {report.no_module}"))
    return Group(*lines)


def _named(name: str, lines: Sequence[str]) -> list[Table]:
    """Lines under one name."""
    return [_line(name if index == 0 else "", words) for index, words in enumerate(lines)]


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _line(name: str, words: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row(name, words)
    return grid
