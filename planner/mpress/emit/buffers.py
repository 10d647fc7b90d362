"""Buffers in the emitted module: functions that make first values as the user's constructor does, and tables of what each stage holds.

A row is (shape, dtype, function that makes the first value or None, whether the state_dict has it).  Equal constructions share a function;
rows of equal layers share a table.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mpress.cells import Cell, Chain
from mpress.emit.cell_code import statement
from mpress.emit.expressions import Expressions
from mpress.emit.names import LocalNames, identifier, parameter_name, relative, unique
from mpress.emit.stage_code import layer, layer_template, runs
from mpress.graph import Argument, Graph, Name, Op, Ref, reads, references
from mpress.plan import StagePlan

LITERAL = "mpress.literal.default"


@dataclass(frozen=True, slots=True)
class BufferRows:
    """rows: canonical name -> text of its row.  code: source lines of the functions that make first values.

    tables: cell type -> name of the table of its rows, for types whose cells all have equal rows.
    """

    rows: Mapping[str, str]
    code: tuple[str, ...]
    tables: Mapping[int, str]


def buffer_rows(graph: Graph, chain: Chain, stems: tuple[str, ...]) -> BufferRows:
    """Rows and functions of all buffers that a cell uses or the state_dict has."""
    used = {name for cell in chain.cells for name in cell.buffers}
    wanted = [buffer for buffer in graph.buffers if buffer.persistent or buffer.names[0] in used]
    functions: dict[str, str] = {}  # construction -> name of its function
    owners: dict[str, list[str]] = {}
    bodies: dict[str, list[str]] = {}
    rows: dict[str, str] = {}
    index = _Index(graph)
    for buffer in wanted:
        name = "None"
        if buffer.initial >= 0:
            ops = index.closure(buffer.initial)
            key = _canonical(graph, ops, buffer.initial)
            if key not in functions:
                functions[key] = unique(f"make_{identifier(buffer.names[0].rpartition('.')[2])}", functions.values())
                bodies[functions[key]] = _body(graph, chain, ops, buffer.initial)
            name = functions[key]
            owners.setdefault(name, []).append(buffer.names[0])
        tensor = graph.tensors[buffer.tensor]
        rows[buffer.names[0]] = f'({tensor.shape!r}, "{tensor.dtype}", {name}, {buffer.persistent})'
    code: list[str] = []
    for name, body in bodies.items():
        more = f" and {len(owners[name]) - 1} more" if len(owners[name]) > 1 else ""
        code += [f"def {name}():", f'    """First value of {owners[name][0]}{more}."""', *body, "", ""]
    tables: dict[int, str] = {}
    for kind, representative in enumerate(chain.representatives):
        table = _below(graph, chain.cells[representative], rows)
        if table and all(_below(graph, cell, rows) == table for cell in chain.cells if cell.type == kind):
            tables[kind] = f"{stems[kind].upper()}_BUFFERS"
            code += [f"{tables[kind]} = {{", *(f'    "{name}": {row},' for name, row in table.items()), "}", ""]
    return BufferRows(rows, (*code, "") if tables else tuple(code), tables)


def _below(graph: Graph, cell: Cell, rows: Mapping[str, str]) -> dict[str, str]:
    """Relative name -> row of the buffers below a numbered block's own prefix."""
    if layer(cell) < 0:
        return {}
    names = {canonical: parameter_name(graph, cell, canonical) for canonical in cell.buffers}
    return {relative(name, cell.prefix): rows[canonical] for canonical, name in names.items() if name.startswith(cell.prefix)}


def stage_buffers(graph: Graph, chain: Chain, stage: StagePlan, made: BufferRows) -> list[str]:
    """BUFFERS of a stage: each buffer once, under the name the first cell that uses it knows it by."""
    lines = list[str]()
    for run in runs(chain, stage):
        for cell, _ in run.period:
            if cell.type in made.tables:
                numbers = f"range({run.first}, {run.first + run.count})" if run.count > 1 else f"({run.first},)"
                lines.append(f'        **layers("{layer_template(cell)}", {numbers}, {made.tables[cell.type]}),')
    cells = chain.cells[stage.first : stage.last]
    seen = {
        canonical
        for cell in cells
        if cell.type in made.tables
        for canonical in cell.buffers
        if parameter_name(graph, cell, canonical).startswith(cell.prefix)
    }
    for cell in cells:
        for canonical in cell.buffers:
            if canonical not in seen:
                seen.add(canonical)
                lines.append(f'        "{parameter_name(graph, cell, canonical)}": {made.rows[canonical]},')
    return ["    BUFFERS = {", *lines, "    }"] if lines else ["    BUFFERS = {}"]


def unused_buffers(graph: Graph, chain: Chain, made: BufferRows) -> list[str]:
    """UNUSED: buffers the state_dict has although no stage needs them."""
    used = {name for cell in chain.cells for name in cell.buffers}
    rows = [
        f'    "{buffer.names[0]}": {made.rows[buffer.names[0]]},' for buffer in graph.buffers if buffer.names[0] in made.rows.keys() - used
    ]
    return ["UNUSED = {  # buffers of the state_dict that no stage needs", *rows, "}"] if rows else ["UNUSED = {}"]


class _Index:
    """Who makes and who writes, among the setup operators."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._maker: dict[int, int] = {}
        for op in graph.setup:
            for tensor in op.outputs:
                self._maker.setdefault(tensor, op.id)  # not an operator that writes it in place later
        self._writers: dict[int, list[int]] = {}
        for op in graph.setup:
            for tensor in op.mutates:
                self._writers.setdefault(graph.tensors[tensor].storage, []).append(op.id)

    def closure(self, tensor: int) -> tuple[Op, ...]:
        """The operators that make a tensor, in order; a write counts for what reads its storage later."""
        graph, found = self._graph, set[int]()
        todo: list[int] = []

        def need(wanted: int, before: int) -> None:
            for number in (self._maker[wanted], *self._writers.get(graph.tensors[wanted].storage, ())):
                if number < before and number not in found:
                    found.add(number)
                    heapq.heappush(todo, -number)

        need(tensor, len(graph.setup))
        while todo:
            number = -heapq.heappop(todo)
            for read in reads(graph.setup[number]):
                need(read, number)
        return tuple(graph.setup[number] for number in sorted(found))


def _canonical(graph: Graph, ops: tuple[Op, ...], result: int) -> str:
    """Text equal for equal constructions."""
    local: dict[int, int] = {}

    def text(argument: Argument) -> str:
        if isinstance(argument, Ref):
            return f"%{local.setdefault(argument.tensor, len(local))}"
        if isinstance(argument, tuple):
            return f"({', '.join(text(item) for item in argument)})" if references(argument) else repr(argument)
        return repr(argument)

    lines = []
    for op in ops:
        made = [text(Ref(t)) for t in op.outputs if t >= 0]
        lines.append(f"{op.target} {[text(a) for a in op.args]} {[(key, text(a)) for key, a in op.kwargs]} {made}")
    return "\n".join([*lines, text(Ref(result)), graph.tensors[result].dtype])


def _body(graph: Graph, chain: Chain, ops: tuple[Op, ...], result: int) -> list[str]:
    """Source lines of a function that runs `ops` and returns `result`."""
    setup = replace(graph, ops=graph.setup)
    cell = replace(  # the fields below are all that names and expressions look at
        chain.cells[0], prefix="", forward=tuple(op.id for op in ops), backward=(), inputs=(), outputs=(result,), gradient_inputs=(),
        gradient_outputs=(), contributions=(),
    )  # fmt: skip
    names = LocalNames(setup, cell)
    expressions = Expressions(setup, cell, names, device="")
    value = expressions.tensor(result)
    computed = [op for op in ops if not op.view]
    lines: list[str] = []
    for op in computed:
        text = _literal(op) if op.target == LITERAL else expressions.call(op)
        made = [names.of(t) if names.has(t) else "_" for t in op.outputs]
        if made == ["_"]:  # written in place
            made = []
        if made == [value] and op is computed[-1]:
            return [*lines, *statement("return ", text, "", op.source.place())]
        lines += statement(f"{', '.join(made)} = " if made else "", text, "", op.source.place())
    return [*lines, f"    return {value}"]


def _literal(op: Op) -> str:
    shape, flat, dtype = op.args
    assert isinstance(flat, tuple) and isinstance(dtype, Name)
    made = f"torch.tensor([{', '.join(_numbers(flat))}], dtype=torch.{dtype.value})"
    return made if shape == (len(flat),) else f"{made}.view({shape!r})"


def _numbers(flat: tuple[Argument, ...]) -> Iterator[str]:
    for value in flat:
        yield f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)
