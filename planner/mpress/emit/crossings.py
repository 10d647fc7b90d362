"""What crosses each cut of a plan: every tensor by the module and operator that make it, and the gradient that comes back for it.

Bytes are those of one micro-batch, and those the emitted program gives to its sends: a tensor that crosses fills its storage.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpress.cells import Cell, Chain
from mpress.emit.actions import op_words
from mpress.graph import Graph, Op, Phase, reads
from mpress.plan import Plan
from mpress.units import Bytes


@dataclass(frozen=True, slots=True)
class Crossing:
    """One tensor over one cut.

    name: "h.9 add"; a parameter's name where only a piece of its gradient crosses (bytes is 0 then).
    gradient_bytes: what comes back for it, 0 where nothing does (integers, masks, frozen parts).
    made_by: the stage that makes it.  passed: the stage before the cut only hands it on, it neither makes nor reads it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: Bytes
    gradient_bytes: Bytes
    made_by: int
    passed: bool


@dataclass(frozen=True, slots=True)
class CutReport:
    """The cut after stage `after`: what crosses, newest first (the order of the sends)."""

    after: int
    tensors: tuple[Crossing, ...]

    @property
    def bytes(self) -> Bytes:
        """Sent to the next stage for one micro-batch."""
        return Bytes(sum(row.bytes for row in self.tensors))

    @property
    def gradient_bytes(self) -> Bytes:
        """Sent back for one micro-batch."""
        return Bytes(sum(row.gradient_bytes for row in self.tensors))


class Crossings:
    """Looks up what crosses cuts of one graph."""

    def __init__(self, graph: Graph, chain: Chain) -> None:
        self._graph, self._chain = graph, chain
        self._makers: dict[int, Op] = {}  # storage -> the op that allocates it
        self._readers: dict[int, list[Op]] = {}  # backward tensor -> ops of the backward that read it
        self._users: dict[int, list[Op]] = {}  # forward tensor -> ops of the forward that read it
        self._differentiated: set[int] = set()  # forward ops that a backward op computes something for
        for op in graph.ops:
            backward = op.phase is Phase.BACKWARD
            readers = self._readers if backward else self._users
            for tensor in dict.fromkeys(reads(op)):
                readers.setdefault(tensor, []).append(op)
            if backward and not op.view:
                self._differentiated.add(op.forward_op)
            for tensor in op.outputs:
                if tensor >= 0 and not op.view:
                    self._makers.setdefault(graph.tensors[tensor].storage, op)
        self._parameters = {row.tensor: row.parameter for row in graph.contributions}

    def cuts(self, plan: Plan) -> tuple[CutReport, ...]:
        """One report a cut, in the order of the stages."""
        stages = [self._chain.cells[stage.first : stage.last] for stage in plan.stages]
        touched = [self._storages(cells) for cells in stages]
        return tuple(self._cut(s, cells[-1], touched) for s, cells in enumerate(stages[:-1]))

    def name(self, tensor: int) -> str:
        """ "h.9 add": the module and operator that make what a forward tensor lies in."""
        op = self._makers.get(self._graph.tensors[tensor].storage)
        return op_words(op) if op is not None else self._graph.tensors[tensor].name

    def owner(self, gradient: int, crossing: tuple[int, ...]) -> int | str:
        """The tensor of `crossing` a gradient belongs to; the parameter's name for a piece of a parameter's gradient.

        Who reads a gradient differentiates what made the tensor; sums of gradients, and views of one, lead to who reads those.
        """
        seen, near, far = {gradient}, [gradient], list[int]()
        while near or far:
            tensor = near.pop() if near else far.pop(0)
            for op in self._readers.get(tensor, ()):
                found = self._reached(op.forward_op, gradient, crossing) if op.forward_op >= 0 else -1
                if found >= 0:
                    return found
                new = [t for t in op.outputs if t >= 0 and t not in seen]
                if op.view:
                    near += new
                elif op.forward_op < 0 and op.repeats < 0:
                    far += new
                seen.update(new)
        return self._parameters.get(gradient, "")

    def _reached(self, number: int, gradient: int, crossing: tuple[int, ...]) -> int:
        """The tensor of `crossing` that a forward op makes, alone or through operators without a backward of their own (an addition
        hands the gradient of its sum to what it adds as it is); -1 for none.  All of a user's Function counts as its first op."""
        graph = self._graph
        wanted = {graph.tensors[t].storage: t for t in crossing}
        shape = graph.tensors[gradient].shape
        last = number
        while graph.ops[number].atom and last + 1 < len(graph.ops) and graph.ops[last + 1].atom == graph.ops[number].atom:
            last += 1
        made = [t for op in reversed(graph.ops[number : last + 1]) for t in op.outputs if t >= 0]
        todo = sorted(made, key=lambda t: graph.tensors[t].shape != shape)
        seen = set(todo)
        while todo:
            tensor = todo.pop(0)
            found = wanted.get(graph.tensors[tensor].storage, -1)
            if found >= 0:
                return found
            for op in self._users.get(tensor, ()):
                if op.id not in self._differentiated:
                    new = [t for t in op.outputs if t >= 0 and t not in seen]
                    todo += new
                    seen.update(new)
        return -1

    def _storages(self, cells: tuple[Cell, ...]) -> tuple[set[int], set[int]]:
        """(made, made or read) by the ops of a stage; a view that is taken again only to be handed on does not count as read."""
        graph, made, used = self._graph, set[int](), set[int]()
        for cell in cells:
            for op in (graph.ops[number] for number in (*cell.forward, *cell.backward)):
                outputs = {graph.tensors[t].storage for t in op.outputs if t >= 0}
                if not op.view:
                    made |= {storage for storage in outputs if self._makers[storage].id == op.id}
                    used |= outputs | {graph.tensors[t].storage for t in reads(op)}
        return made, used

    def _cut(self, s: int, before: Cell, touched: list[tuple[set[int], set[int]]]) -> CutReport:
        graph = self._graph
        back: dict[int | str, int] = {}
        for gradient in before.gradient_inputs:
            owner = self.owner(gradient, before.outputs)
            back[owner] = back.get(owner, 0) + graph.storages[graph.tensors[gradient].storage].bytes
        rows = []
        for tensor in before.outputs:
            found = graph.tensors[tensor]
            made_by = next((i for i in range(s + 1) if found.storage in touched[i][0]), 0)
            rows.append(
                Crossing(
                    name=self.name(tensor),
                    shape=found.shape,
                    dtype=found.dtype,
                    bytes=graph.storages[found.storage].bytes,
                    gradient_bytes=Bytes(back.pop(tensor, 0)),
                    made_by=made_by,
                    passed=found.storage not in touched[s][1],
                )
            )
        return CutReport(s, (*rows, *(self._piece(str(name), size, s) for name, size in back.items())))

    def _piece(self, name: str, size: int, s: int) -> Crossing:
        """A piece of a parameter's gradient on its way to the stage that has the parameter."""
        tensor = next((p.tensor for p in self._graph.parameters if p.names[0] == name), -1)
        shape, dtype = (self._graph.tensors[tensor].shape, self._graph.tensors[tensor].dtype) if tensor >= 0 else ((), "")
        return Crossing(name or "gradient", shape, dtype, Bytes(0), Bytes(size), made_by=s + 1, passed=False)
