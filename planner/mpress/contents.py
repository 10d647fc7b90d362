"""What is in each cell once the places to cut are chosen: its ops, what enters and leaves, and which saved memory it shares with others.

A view of something that crosses a cut belongs to every cell that uses it: it computes nothing, so it is taken again where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mpress.cells import Cell
from mpress.cuts import Cut, Positions
from mpress.dataflow import alias_source
from mpress.graph import Graph, Kind, Op, Phase, reads


@dataclass(frozen=True, slots=True)
class Part:
    """Forward positions [first, last); key: the block ("h.3") or, outside blocks, the top-level modules ("")."""

    first: int
    last: int
    key: str
    block: bool
    name: str = ""


def fill(graph: Graph, positions: Positions, parts: Sequence[Part]) -> list[Cell]:
    """The cells of these parts, in order, with type -1.  Every border between parts is a place to cut."""
    return _with_sharing(graph, _Filler(graph, positions, parts).cells())


class _Filler:
    def __init__(self, graph: Graph, positions: Positions, parts: Sequence[Part]) -> None:
        self.graph, self.positions, self.parts = graph, positions, parts
        cell_at = [index for index, part in enumerate(parts) for _ in range(part.first, part.last)]
        self.cell_of = [cell_at[home] for home in positions.home]
        self.maker: dict[int, Op] = {}
        for op in graph.ops:
            for tensor in op.outputs:
                if tensor >= 0:
                    self.maker.setdefault(tensor, op)
        self.names = {holder.tensor: holder.names[0] for holder in graph.holders}
        self.buffer_names = {buffer.names[0] for buffer in graph.buffers}
        self.given = {item.tensor for item in graph.inputs}
        self.own: list[list[int]] = [[] for _ in parts]
        for op in graph.ops:
            if op.phase is Phase.BACKWARD:
                self.own[self.cell_of[op.id]].append(op.id)
        self.contributions: list[list[int]] = [[] for _ in parts]
        for number, home in enumerate(positions.homes_of_contributions):
            self.contributions[cell_at[home]].append(number)

    def cells(self) -> list[Cell]:
        return [self._cell(index) for index in range(len(self.parts))]

    def _border(self, p: int) -> Cut:
        cut = self.positions.cuts[p]
        assert cut is not None, f"position {p} is a border but no place to cut"
        return cut

    def _cell(self, index: int) -> Cell:
        graph, part = self.graph, self.parts[index]
        before = self._border(part.first) if index > 0 else Cut((), (), 0, 0)
        after = self._border(part.last) if index < len(self.parts) - 1 else Cut((graph.loss,), (graph.seed,), 0, 0)
        forward, backward = self.positions.forward[part.first : part.last], tuple(self.own[index])
        contributed = tuple(graph.contributions[n].tensor for n in self.contributions[index])
        wanted = [t for op in (*forward, *backward) for t in reads(graph.ops[op])]
        wanted += [*after.down, *before.up, *contributed]
        views = self._views(index, wanted, {*before.down, *after.up})
        forward = (*(i for i in views if graph.ops[i].phase is Phase.FORWARD), *forward)
        backward = (*(i for i in views if graph.ops[i].phase is Phase.BACKWARD), *backward)
        used = list(dict.fromkeys(t for op in (*forward, *backward) for t in (*reads(graph.ops[op]), *graph.ops[op].mutates)))
        used += [t for t in (*after.down, *before.up) if t not in self.maker]
        held = [self.names[t] for t in used if t in self.names]
        held += [graph.contributions[n].parameter for n in self.contributions[index]]
        return Cell(
            index=index,
            type=-1,
            name=part.name,
            prefix=f"{part.key}." if part.block else "",
            forward=forward,
            backward=backward,
            inputs=before.down,
            user_inputs=tuple(dict.fromkeys(t for t in used if t in self.given)),
            parameters=tuple(dict.fromkeys(n for n in held if n not in self.buffer_names)),
            buffers=tuple(dict.fromkeys(n for n in held if n in self.buffer_names)),
            outputs=after.down,
            gradient_inputs=after.up,
            gradient_outputs=before.up,
            contributions=tuple(self.contributions[index]),
            shared=(),
            borrowed=(),
            carried=(),
        )

    def _views(self, index: int, wanted: Iterable[int], there: set[int]) -> tuple[int, ...]:
        """Ops of other cells that take the views this cell needs of what enters it (or of parameters, buffers and inputs)."""
        found: set[int] = set()
        seen: set[int] = set()
        todo = list(wanted)
        while todo:
            tensor = todo.pop()
            op = self.maker.get(tensor)
            if tensor in seen or tensor in there or op is None:
                continue
            seen.add(tensor)
            if self.cell_of[op.id] != index:
                source = alias_source(op, tensor, self.graph.tensors)
                if source is None or source == tensor:
                    continue  # arrives some other way, or the chain of cells is broken; fold.check_chain tells
                found.add(op.id)
                todo.append(source)
        return tuple(sorted(found))


def _with_sharing(graph: Graph, cells: list[Cell]) -> list[Cell]:
    """Fill in which saved storages cells share: memory several cells save is there once a stage."""
    savers: dict[int, list[int]] = {}
    for cell in cells:
        made = {graph.tensors[t].storage for op in cell.forward for t in graph.ops[op].outputs if t >= 0}
        made |= {graph.tensors[t].storage for t in cell.inputs}
        saved = {graph.tensors[t].storage for op in cell.backward for t in reads(graph.ops[op])}
        for storage in sorted(made & saved):
            if graph.storages[storage].kind is Kind.COMPUTED:
                savers.setdefault(storage, []).append(cell.index)
    shared = {storage: users for storage, users in savers.items() if len(users) > 1}
    found: list[Cell] = []
    for cell in cells:
        mine = tuple(s for s, users in shared.items() if cell.index in users)
        found.append(
            replace(
                cell,
                shared=_in_order(graph, cell, mine),
                borrowed=_in_order(graph, cell, [s for s in mine if shared[s][0] < cell.index]),
                carried=_in_order(graph, cell, [s for s, users in shared.items() if users[0] <= cell.index < users[-1]]),
            )
        )
    return found


def _in_order(graph: Graph, cell: Cell, storages: Iterable[int]) -> tuple[int, ...]:
    """In the order in which the cell's inputs, then its outputs and results name them."""
    order: dict[int, int] = {}
    for tensor in (*cell.inputs, *(t for op in cell.forward for t in graph.ops[op].outputs if t >= 0)):
        order.setdefault(graph.tensors[tensor].storage, len(order))
    return tuple(sorted(storages, key=lambda s: (order.get(s, len(order)), s)))
