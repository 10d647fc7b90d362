"""Writes the program of a cell in a mode, by the liveness rules of `mpress.program`.

Within one step the order is: the operator, SAVE and SWAP_OUT of what it made, then one DELETE of everything dead.  A DELETE lists all
locals on the dying storages.  After the last step nothing is deleted: the function returns.  SAVE and SWAP_OUT wait for the last
in-place write to the storage.  An output of a RECOMPUTE line whose storage is in `saved` is a duplicate of what is kept: it is thrown
away within the line and never becomes a local.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mpress.cells import Cell
from mpress.dataflow import Dataflow, study
from mpress.graph import Graph, Op
from mpress.program import CellProgram, Line, Verb


@dataclass(slots=True)
class _Step:
    """Lines that stand together, the storages they use, and the locals they bind as (storage, tensor)."""

    lines: list[Line]
    uses: set[int]
    binds: list[tuple[int, int]]


def build_program(graph: Graph, cell: Cell, recompute: Collection[int], swap: Collection[int]) -> CellProgram:
    """The lines of `cell` when the `recompute` storages are rebuilt, the `swap` storages copied away and the rest kept.

    Raises ValueError when a storage may not be treated so.
    """
    return write_program(study(graph, cell), recompute, swap, graph)


def write_program(flow: Dataflow, recompute: Collection[int], swap: Collection[int], graph: Graph) -> CellProgram:
    """build_program for a cell that was studied before."""
    dropped, away = frozenset(recompute), frozenset(swap)
    if bad := dropped - (flow.natural & flow.rebuildable):
        raise ValueError(f"storages {sorted(bad)} of cell {flow.cell.name} cannot be recomputed")
    closure, extra = flow.closure(dropped)
    carried = (flow.natural - dropped) | extra
    if bad := away - swappable(flow, carried):
        raise ValueError(f"storages {sorted(bad)} of cell {flow.cell.name} cannot be swapped")
    forward, saved = _forward(flow, carried, away)
    backward = _backward(flow, carried, closure, graph)
    return CellProgram(flow.cell.type, tuple(sorted(dropped)), tuple(sorted(away)), forward, backward, saved)


def swappable(flow: Dataflow, carried: Collection[int]) -> frozenset[int]:
    """Carried storages that one root restores and nobody else holds; where several tensors share one, only keeping it keeps the sharing."""
    return frozenset(storage for storage in carried if len(flow.roots[storage]) == 1) - flow.fixed


def _forward(flow: Dataflow, carried: frozenset[int], away: frozenset[int]) -> tuple[tuple[Line, ...], tuple[int, ...]]:
    cell, steps = flow.cell, list[_Step]()
    saved: list[int] = []
    waiting: dict[int, list[int]] = {}  # storages still to be written in place: their roots so far

    def keep(step: _Step, fresh: dict[int, list[int]]) -> None:
        ready = [(s, t) for s, roots in fresh.items() if s in carried for t in roots]
        for verb, chosen in ((Verb.SAVE, [t for s, t in ready if s not in away]), (Verb.SWAP_OUT, [t for s, t in ready if s in away])):
            if chosen:
                step.lines.append(Line(verb, -1, tuple(chosen)))
                saved.extend(chosen)

    first = _Step([], set(), [])
    fresh: dict[int, list[int]] = {}
    for tensor in dict.fromkeys(cell.inputs):
        storage = flow.storage(tensor)
        if storage is not None and tensor in flow.roots[storage]:
            first.binds.append((storage, tensor))
            (waiting if storage in flow.mutated else fresh).setdefault(storage, []).append(tensor)
    keep(first, fresh)
    steps.append(first)
    for index in cell.forward:
        op = flow.ops[index]
        if op.view:
            continue
        step, place, fresh = _computed(flow, Verb.COMPUTE, op), flow.position[index], {}
        for storage, tensor in step.binds:
            if storage in flow.roots and tensor in flow.roots[storage]:
                late = flow.mutated.get(storage, -1) > place
                (waiting if late else fresh).setdefault(storage, []).append(tensor)
        for storage in [s for s in waiting if flow.mutated[s] == place]:
            fresh.setdefault(storage, [])[:0] = waiting.pop(storage)
        keep(step, fresh)
        steps.append(step)
    outputs = {s for t in cell.outputs if (s := flow.storage(t)) is not None}
    return _with_deletes(steps, carried | flow.inputs | outputs), tuple(saved)


def _backward(flow: Dataflow, carried: frozenset[int], closure: tuple[Op, ...], graph: Graph) -> tuple[Line, ...]:
    cell, steps = flow.cell, list[_Step]()
    rebuilt_by = {storage: op for op in closure for storage in flow.made_storages(op) if storage not in carried}
    there: set[int] = set()  # forward storages that are locals by now

    def load(step: _Step, op: Op) -> None:
        """Put a LOAD of what `op` reads from the context before the step's own line."""
        chosen = [s for s in flow.read_storages(op) if s in carried and s not in there]
        there.update(chosen)
        roots = [(s, t) for s in chosen for t in flow.roots[s]]
        if roots:
            step.lines.insert(0, Line(Verb.LOAD, -1, tuple(t for _, t in roots)))
            step.binds[:0] = roots

    def rebuild(op: Op) -> None:
        """RECOMPUTE lines, in the forward's order, for everything `op` needs that is neither carried nor there."""
        needed: dict[int, Op] = {}
        todo = [op]
        while todo:
            for storage in flow.read_storages(todo.pop()):
                source = rebuilt_by.get(storage)
                if source is not None and storage not in there and source.id not in needed:
                    needed[source.id] = source
                    todo.append(source)
        for source in sorted(needed.values(), key=lambda source: flow.position[source.id]):
            step = _computed(flow, Verb.RECOMPUTE, source)
            step.binds = [(s, t) for s, t in step.binds if s not in carried]
            load(step, source)
            there.update(s for s, _ in step.binds)
            steps.append(step)

    arriving = set(cell.gradient_inputs)
    first = _Step([], set(), [(s, t) for t in cell.gradient_inputs if (s := flow.storage(t)) is not None])
    steps.append(first)
    written = {flow.storage(t): index for index in cell.backward for t in flow.ops[index].mutates}
    grads: dict[int, list[int]] = {}  # the op after which a contribution is complete, -1 for an arriving gradient
    for number in cell.contributions:
        root = flow.root(graph.contributions[number].tensor)
        made = -1 if root in arriving else flow.maker[root].id
        grads.setdefault(max(made, written.get(flow.storage(root), -1)), []).append(number)

    def add_grads(after: int) -> None:
        for number in grads.get(after, ()):
            storage = flow.storage(graph.contributions[number].tensor)
            steps.append(_Step([Line(Verb.GRAD, number, ())], set() if storage is None else {storage}, []))

    add_grads(-1)
    for index in cell.backward:
        op = flow.ops[index]
        if op.view:
            continue
        rebuild(op)
        step = _computed(flow, Verb.COMPUTE, op)
        load(step, op)
        steps.append(step)
        add_grads(index)
    held = {s for t in (*cell.gradient_inputs, *cell.gradient_outputs) if (s := flow.storage(t)) is not None}
    return _with_deletes(steps, held)


def _computed(flow: Dataflow, verb: Verb, op: Op) -> _Step:
    written = {flow.storage(t) for t in op.mutates}
    bound = [(s, t) for t in op.outputs if t >= 0 and (s := flow.storage(t)) is not None and s not in written]
    return _Step([Line(verb, op.id, ())], set(flow.read_storages(op)), bound)


def _with_deletes(steps: list[_Step], held: Collection[int]) -> tuple[Line, ...]:
    """All lines, with a DELETE after each step for the locals whose storage no later step uses and nobody holds."""
    last: dict[int, int] = {}
    for place, step in enumerate(steps):
        for storage in (*step.uses, *(s for s, _ in step.binds)):
            last[storage] = place
    lines: list[Line] = []
    bound: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        lines += step.lines
        for storage, tensor in step.binds:
            bound.setdefault(storage, []).append(tensor)
        dead = [s for s in bound if last[s] == place and s not in held]
        if dead and place < len(steps) - 1:
            lines.append(Line(Verb.DELETE, -1, tuple(t for s in dead for t in dict.fromkeys(bound.pop(s)))))
    return tuple(lines)
