"""When are two cells of one type?  When this canonical text of both is equal: names relative, ids local, lines of code left out."""

from __future__ import annotations

import hashlib
import re

from mpress.cells import Cell
from mpress.graph import Argument, Graph, Name, Op, Ref

_BLOCK = re.compile(r"^(?P<container>(?:.*?\.)??)(?P<index>\d+)(?=\.|$)")


def canonical(graph: Graph, cell: Cell, tied: frozenset[str]) -> str:
    """A digest of structure, shapes, constants, relative parameter names and dataflow of a cell, forward and backward.

    `tied` are the parameters that several cells use: cells that use different ones differ.
    """
    writer = _Writer(graph, cell)
    ties = [f"tied {name}" for name in cell.parameters if name in tied]
    return hashlib.sha256("\n".join([*writer.lines(), *ties]).encode()).hexdigest()


class _Writer:
    def __init__(self, graph: Graph, cell: Cell) -> None:
        self._graph = graph
        self._cell = cell
        self._tensors: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._modules: dict[str, str] = {}
        self._ops = {op: index for index, op in enumerate(cell.forward)}
        self._new: list[str] = []

    def lines(self) -> list[str]:
        """Every fact two equal cells share, one a line, in an order that depends on structure only."""
        cell, graph = self._cell, self._graph
        lines = [f"inputs {self._list(cell.inputs)}"]
        for phase, ops in (("forward", cell.forward), ("backward", cell.backward)):
            for number in ops:
                lines.append(f"{phase} {self._op(graph.ops[number])}")
                lines += self._new
                self._new = []
        lines.append(f"outputs {self._list(cell.outputs)} gradients {self._list(cell.gradient_inputs)} {self._list(cell.gradient_outputs)}")
        for word, storages in (("shared", cell.shared), ("borrowed", cell.borrowed), ("carried", cell.carried)):
            lines.append(f"{word} {[self._storages.setdefault(s, len(self._storages)) for s in storages]}")
        for index in cell.contributions:
            contribution = graph.contributions[index]
            lines.append(f"contribution {self._relative(contribution.parameter)} {self._tensor(contribution.tensor)}")
        lines.append(f"parameters {[self._relative(name) for name in cell.parameters + cell.buffers]}")
        return lines + self._new

    def _op(self, op: Op) -> str:
        args = [self._argument(a) for a in op.args] + [f"{key}={self._argument(a)}" for key, a in op.kwargs]
        key = f"{self._relative(op.random_key.rpartition('#')[0])}#{op.random_key.rpartition('#')[2]}" if op.random_key else ""
        difference = self._ops.get(op.forward_op, -1)
        flags = f"{op.multi} {op.view} {self._list(op.mutates)} {key} {difference} {op.flops} {op.bytes_moved}"
        return f"{op.target} {self._module(op.module)} {args} -> {self._list(op.outputs)} {flags}"

    def _list(self, tensors: tuple[int, ...]) -> str:
        return str([self._tensor(t) for t in tensors])

    def _argument(self, argument: Argument) -> str:
        if isinstance(argument, Ref):
            return f"%{self._tensor(argument.tensor)}"
        if isinstance(argument, tuple):
            return f"({', '.join(self._argument(item) for item in argument)})"
        if isinstance(argument, Name):
            return f"{argument.group}.{argument.value}"
        return repr(argument)

    def _tensor(self, number: int) -> int:
        if number < 0:
            return -1
        known = self._tensors.get(number)
        if known is not None:
            return known
        local = self._tensors[number] = len(self._tensors)
        tensor = self._graph.tensors[number]
        storage = self._graph.storages[tensor.storage]
        memory = self._storages.setdefault(storage.id, len(self._storages))
        name = self._relative(tensor.name) if tensor.name else ""
        self._new.append(
            f"tensor {local} {memory} {tensor.shape} {tensor.stride} {tensor.offset} {tensor.dtype} {tensor.differentiable} {name}"
            f" {storage.bytes} {storage.kind.value} {storage.saved}"
        )
        return local

    def _module(self, path: str) -> str:
        """A module path; one below a neighbouring block is written by its distance ("layers.-1.1": the ReLU of the layer before)."""
        known = self._modules.get(path)
        if known is None:
            known = self._modules[path] = self._module_name(path)
        return known

    def _module_name(self, path: str) -> str:
        mine, other = _BLOCK.match(self._cell.prefix), _BLOCK.match(path)
        if mine is None or other is None or mine["container"] != other["container"] or mine["index"] == other["index"]:
            return self._relative(path)
        return f"{mine['container']}{int(other['index']) - int(mine['index'])}{path[other.end() :]}"

    def _relative(self, name: str) -> str:
        """A name below the cell's prefix starts with a dot; any other is written in full."""
        prefix = self._cell.prefix
        if prefix and (name == prefix[:-1] or name.startswith(prefix)):
            return name[len(prefix) - 1 :]
        return name
