"""What one cell reads, makes and must carry from its forward to its backward.

Vocabulary: an *anchor* is a tensor that exists as a local of a cell function: an input, an incoming gradient, or an output of an operator
that is not a view.  Every other tensor is a chain of views on an anchor.  A *root* is the anchor a storage is carried by: the output of
the operator that allocated it, or the cell's input tensor; in-place operators return their argument, so they are transparent here.
Only storages of kind COMPUTED are counted: parameters, buffers and the module's inputs are always there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpress.cells import Cell
from mpress.graph import Graph, Kind, Op, Tensor, reads


@dataclass(frozen=True, slots=True)
class Dataflow:
    """One cell with everything about it looked up once.  All storage ids below are of counted storages.

    position: of each forward op in the cell's forward.  maker: the op of the cell that made a tensor.
    roots: forward storage -> root tensors the backward may need it by (one, unless several inputs or outputs share the storage).
    natural: storages the backward reads from the forward, i.e. what is saved when everything is kept.
    inputs: storages of the cell's inputs.  mutated: storages written in place by the forward, the position of the last write.
    rebuildable: forward storages that can be recomputed.  fixed: storages that must stay where they are, because other cells save them too
       or the caller holds them: never swapped.
    """

    cell: Cell
    ops: Mapping[int, Op]
    tensors: Mapping[int, Tensor]
    sizes: Mapping[int, int]
    position: Mapping[int, int]
    maker: Mapping[int, Op]
    roots: Mapping[int, tuple[int, ...]]
    natural: frozenset[int]
    inputs: frozenset[int]
    mutated: Mapping[int, int]
    rebuildable: frozenset[int]
    fixed: frozenset[int]

    def storage(self, tensor: int) -> int | None:
        """The counted storage of a tensor, None when it is not counted."""
        storage = self.tensors[tensor].storage
        return storage if storage in self.sizes else None

    def read_storages(self, op: Op) -> tuple[int, ...]:
        """Counted storages an op reads or writes in place, each once, in argument order."""
        found = (self.storage(tensor) for tensor in (*reads(op), *op.mutates))
        return tuple(dict.fromkeys(storage for storage in found if storage is not None))

    def made_storages(self, op: Op) -> tuple[int, ...]:
        """Counted storages a non-view op allocates, each once, in output order."""
        old = set(self.read_storages(op))
        found = (self.storage(tensor) for tensor in op.outputs if tensor >= 0)
        return tuple(dict.fromkeys(storage for storage in found if storage is not None and storage not in old))

    def root(self, tensor: int) -> int:
        """The root a tensor is derived from by views (and in-place results); its emitted expression starts there."""
        while (source := alias_source(self.maker.get(tensor), tensor, self.tensors)) is not None:
            tensor = source
        return tensor

    def producer(self, storage: int) -> Op:
        """The forward op that allocated a storage of this cell."""
        return self.maker[self.roots[storage][0]]

    def closure(self, recompute: Iterable[int]) -> tuple[tuple[Op, ...], frozenset[int]]:
        """Forward ops that rebuild the `recompute` storages, in execution order, and the input storages they need."""
        dropped = frozenset(recompute)
        needed: dict[int, Op] = {}
        inputs: set[int] = set()
        todo = sorted(dropped)
        while todo:
            storage = todo.pop()
            if storage in self.inputs:
                inputs.add(storage)
                continue
            op = self.producer(storage)
            if op.id in needed:
                continue
            needed[op.id] = op
            todo += [read for read in self.read_storages(op) if read in dropped or read not in self.natural]
        return tuple(sorted(needed.values(), key=lambda op: self.position[op.id])), frozenset(inputs)


def alias_source(op: Op | None, output: int, tensors: Mapping[int, Tensor] | Sequence[Tensor]) -> int | None:
    """The argument that `output` of `op` is a view of, or was written into; None when `op` allocated it (or there is no op)."""
    if op is None or not (op.view or op.mutates):
        return None
    storage = tensors[output].storage
    candidates = (*op.mutates, *reads(op)) if op.mutates else reads(op)
    return next((tensor for tensor in candidates if tensors[tensor].storage == storage), None)


def study(graph: Graph, cell: Cell) -> Dataflow:
    """Look everything about `cell` up."""
    every = {op.id: op for op in graph.ops}
    ops = {index: every[index] for index in (*cell.forward, *cell.backward)}
    tensors = {tensor.id: tensor for tensor in graph.tensors}
    sizes = {storage.id: int(storage.bytes) for storage in graph.storages if storage.kind is Kind.COMPUTED}
    position = {index: place for place, index in enumerate(cell.forward)}
    maker: dict[int, Op] = {}
    for op in ops.values():
        for tensor in op.outputs:
            if tensor >= 0 and tensor not in op.mutates:
                maker.setdefault(tensor, op)
    mutated = {tensors[t].storage: place for index, place in position.items() for t in ops[index].mutates}
    # a buffer written anywhere in the step has another value when the backward runs
    unstable = {tensors[t].storage for op in graph.ops for t in op.mutates if tensors[t].storage not in sizes}
    flow = Dataflow(cell, ops, tensors, sizes, position, maker, {}, frozenset(), frozenset(), mutated, frozenset(), frozenset())

    inputs = {storage for t in cell.inputs if (storage := flow.storage(t)) is not None}
    anchors: dict[int, list[int]] = {}
    for tensor in (*cell.inputs, *(t for index in cell.forward for t in ops[index].outputs if t >= 0)):
        storage = flow.storage(tensor)
        if storage is not None and flow.root(tensor) == tensor:
            anchors.setdefault(storage, []).append(tensor)
    roots = {storage: tuple(dict.fromkeys(found)) for storage, found in anchors.items()}
    # a view computes nothing: what only a view reads is not needed, unless the view leaves the cell
    leaving = (*cell.gradient_outputs, *(graph.contributions[n].tensor for n in cell.contributions))
    backward_reads = {s for index in cell.backward if not ops[index].view for s in flow.read_storages(ops[index])}
    backward_reads |= {s for t in leaving if t >= 0 and (s := flow.storage(t)) is not None}
    natural = frozenset(storage for storage in backward_reads if storage in roots)

    rebuildable: set[int] = set()
    for index in cell.forward:
        op = ops[index]
        if op.view or op.mutates or op.atom:
            continue
        place = position[index]
        stable = all(tensors[t].storage not in unstable and mutated.get(tensors[t].storage, -1) < place for t in reads(op))
        if stable and all(s in rebuildable or s in natural or s in inputs for s in flow.read_storages(op)):
            rebuildable |= {s for s in flow.made_storages(op) if s not in mutated and s not in inputs}
    can = frozenset(rebuildable) - frozenset(cell.shared)
    fixed = frozenset(cell.shared) | {s for t in cell.outputs if (s := flow.storage(t)) is not None}
    return Dataflow(cell, ops, tensors, sizes, position, maker, roots, natural, frozenset(inputs), mutated, can, fixed)


def droppable(graph: Graph, cell: Cell) -> frozenset[int]:
    """Saved storages of the cell that may be recomputed: made by the cell alone, never written in place (draws repeat by their key)."""
    flow = study(graph, cell)
    return flow.natural & flow.rebuildable
