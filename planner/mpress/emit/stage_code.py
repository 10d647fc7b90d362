"""A stage as a class: which functions it calls for which cells, in loops over equal layers, and where copies are freed and fetched."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpress.cells import Cell, Chain
from mpress.emit.cell_code import untrained
from mpress.emit.names import parameter_name, relative
from mpress.graph import Graph
from mpress.plan import HOST, Plan, StagePlan
from mpress.units import gib

_LAYER = re.compile(r"^(.*?)(\d+)\.$")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive cells that one loop covers: `count` repetitions of `period` (cell, mode), layers first, first + 1, ..."""

    period: tuple[tuple[Cell, int], ...]
    first: int
    count: int


def runs(chain: Chain, stage: StagePlan) -> tuple[Run, ...]:
    """Group a stage's cells into loops; cells without a layer number stand alone (count 1, first -1)."""
    cells = [(chain.cells[stage.first + i], mode) for i, mode in enumerate(stage.modes)]
    found: list[Run] = []
    at = 0
    while at < len(cells):
        best = Run((cells[at],), layer(cells[at][0]), 1)
        for length in range(1, 5):
            period = tuple(cells[at : at + length])
            if len({layer(cell) for cell, _ in period}) != 1 or layer(period[0][0]) < 0:
                break
            count = 1
            while _repeats(period, cells[at + count * length : at + (count + 1) * length], count):
                count += 1
            if count * length > best.count * len(best.period) and (count > 1 or best.count == 1):
                best = Run(period, layer(period[0][0]), count)
        found.append(best)
        at += best.count * len(best.period)
    return tuple(found)


def _repeats(period: tuple[tuple[Cell, int], ...], candidate: list[tuple[Cell, int]], step: int) -> bool:
    return len(candidate) == len(period) and all(
        a.type == b.type and m == n and stem(a) == stem(b) and layer(b) == layer(a) + step
        for (a, m), (b, n) in zip(period, candidate, strict=True)
    )


def layer(cell: Cell) -> int:
    """3 for the prefix "h.3.", -1 outside numbered blocks."""
    match = _LAYER.match(cell.prefix)
    return int(match.group(2)) if match else -1


def stem(cell: Cell) -> str:
    """Cell name with the layer number open: "h.{i}.attn"."""
    match = _LAYER.match(cell.prefix)
    return f"{match.group(1)}{{i}}{cell.name.removeprefix(cell.prefix[:-1])}" if match else cell.name


def layer_template(cell: Cell) -> str:
    """The cell's prefix with the layer number open: "h.{}."."""
    return _LAYER.sub(r"\1{}.", cell.prefix)


def shape_table(graph: Graph, cell: Cell) -> dict[str, tuple[int, ...]]:
    """Relative parameter name -> shape of what a cell has below its own prefix, in order of use."""
    return {relative(name, cell.prefix): shape for name, shape in _shapes(graph, cell).items() if name.startswith(cell.prefix)}


def _shapes(graph: Graph, cell: Cell) -> dict[str, tuple[int, ...]]:
    by_name = {p.names[0]: graph.tensors[p.tensor].shape for p in graph.parameters}
    return {parameter_name(graph, cell, name): by_name[name] for name in cell.parameters}


def stage_class(
    graph: Graph, chain: Chain, plan: Plan, index: int, peak: int, stems: Sequence[str], tables: Mapping[int, str], buffers: Sequence[str]
) -> list[str]:
    """Source lines of one stage class.  stems, tables: cell type -> name of its functions, of its constant of shapes.

    buffers: the lines of BUFFERS.
    """
    stage = plan.stages[index]
    cells = chain.cells[stage.first : stage.last]
    swaps = bool(stage.shares)
    text = ["", "", f"class Stage{index}:", f'    """{stage_title(chain, stage)}; predicted peak {gib(peak)}."""', ""]
    text.append(f"    INDEX = {index}")
    text += [*_parameters(graph, chain, stage, tables), *buffers]
    inputs = dict.fromkeys(graph.tensors[t].name for cell in cells for t in cell.user_inputs)
    text.append(f"    INPUTS = {_tuple([repr(name) for name in inputs])}")
    text += ["", "    @staticmethod", "    def fwd(c, p):"]
    if swaps:
        text.append(f"        # {swap_words(stage)}")
    text += _forward(chain, stage, stems, first=index == 0)
    text += ["", "    @staticmethod", "    def bwd(c, p):"]
    text += _backward(chain, stage, stems, first=index == 0)
    return text


def swap_words(stage: StagePlan) -> str:
    """Where the swapped bytes of one micro-batch go: "1.20 GiB of each micro-batch: 0.80 to GPU 5 ..."."""
    total = sum(int(share.bytes) for share in stage.shares)
    parts = [f"{gib(share.bytes)} to {'host memory' if share.pool == HOST else f'GPU {share.pool}'}" for share in stage.shares]
    return f"{gib(total)} of each micro-batch swapped: {', '.join(parts)}"


def stage_title(chain: Chain, stage: StagePlan) -> str:
    """ "GPU 0: wte..drop to h.8.mlp"."""
    first, last = chain.cells[stage.first].name, chain.cells[stage.last - 1].name
    return f"GPU {stage.device}: {first}" + (f" to {last}" if last != first else "")


def _parameters(graph: Graph, chain: Chain, stage: StagePlan, tables: Mapping[int, str]) -> list[str]:
    """PARAMS of a stage: each parameter once, under the name the first cell that uses it knows it by."""
    lines, seen = ["    PARAMS = {"], set[str]()
    for run in runs(chain, stage):
        for cell, _ in run.period:
            below = layer(cell) >= 0
            if below and cell.type in tables:
                numbers = f"range({run.first}, {run.first + run.count})" if run.count > 1 else f"({run.first},)"
                lines.append(f'        **layers("{layer_template(cell)}", {numbers}, {tables[cell.type]}),')
            for canonical, (name, shape) in zip(cell.parameters, _shapes(graph, cell).items(), strict=True):
                if canonical in seen or (below and name.startswith(cell.prefix)):
                    continue
                seen.add(canonical)
                lines.append(f'        "{name}": {shape!r},')
    return [*lines, "    }"]


def _forward(chain: Chain, stage: StagePlan, stems: Sequence[str], first: bool) -> list[str]:
    swaps = bool(stage.shares)
    lines = [] if first else [_take("x", len(chain.cells[stage.first].inputs))]
    for run in runs(chain, stage):
        indent = "        "
        if run.count > 1:
            lines.append(f"{indent}for i in range({run.first}, {run.first + run.count}):")
            indent += "    "
        for cell, mode in run.period:
            lines += _call(indent, "x", len(cell.inputs), len(cell.outputs), f"{stems[cell.type]}_mode{mode}_fwd({_places(cell, run)}")
            if swaps:
                lines.append(f"{indent}c.free(behind={stage.drain_lag})")
    if swaps:
        lines.append("        c.free()")
    out = _variables("x", len(chain.cells[stage.last - 1].outputs))
    return [*lines, f"        return {_tuple(out)}"]


def _backward(chain: Chain, stage: StagePlan, stems: Sequence[str], first: bool) -> list[str]:
    swaps = bool(stage.shares)
    arriving = len(chain.cells[stage.last - 1].gradient_inputs)
    lines = [_take("g", arriving)] if arriving else []
    for run in reversed(runs(chain, stage)):
        if all(untrained(cell) for cell, _ in run.period):
            continue
        indent = "        "
        if run.count > 1:
            lines.append(f"{indent}for i in reversed(range({run.first}, {run.first + run.count})):")
            indent += "    "
        for cell, mode in reversed(run.period):
            if untrained(cell):
                continue
            if swaps:
                lines.append(f"{indent}c.prefetch(ahead={stage.prefetch_lead})")
            call = f"{stems[cell.type]}_mode{mode}_bwd({_places(cell, run)}"
            lines += _call(indent, "g", len(cell.gradient_inputs), len(cell.gradient_outputs), call)
    if lines and lines[-1].startswith("        del "):  # the function ends anyway
        lines.pop()
    sent = 0 if first else len(chain.cells[stage.first].gradient_outputs)
    return [*lines, f"        return {_tuple(_variables('g', sent))}"]


def _take(letter: str, count: int) -> str:
    variables = ", ".join(_variables(letter, count))
    return f"        {variables}{',' if count == 1 else ''} = c.take()"


def _call(indent: str, letter: str, given: int, made: int, call: str) -> list[str]:
    """One call of a cell function; variables it takes and does not bind again are deleted, so that nothing is held longer than planned."""
    arguments, results = _variables(letter, given), _variables(letter, made)
    target = f"{', '.join(results)} = " if results else ""
    lines = [f"{indent}{target}{', '.join([call, *arguments])})"]
    if given > made:
        lines.append(f"{indent}del {', '.join(arguments[made:])}")
    return lines


def _places(cell: Cell, run: Run) -> str:
    """The context and the parameters of a cell: `c.at(f"h.{i}.attn"), p.at(f"h.{i}")`."""
    if not cell.prefix:
        return f'c.at("{cell.name}"), p'
    if run.count == 1:
        return f'c.at("{cell.name}"), p.at("{cell.prefix[:-1]}")'
    module = _LAYER.sub(r"\1{i}", cell.prefix)
    return f'c.at(f"{stem(cell)}"), p.at(f"{module}")'


def _variables(letter: str, count: int) -> list[str]:
    return [letter if i == 0 else f"{letter}{i + 1}" for i in range(count)]


def _tuple(words: list[str]) -> str:
    quoted = [word.replace("'", '"') for word in words]
    return f"({quoted[0]},)" if len(quoted) == 1 else f"({', '.join(quoted)})"
