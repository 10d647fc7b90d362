"""Names of the locals of a cell function, from module paths and operator kinds; and which of its names a parameter bears in a cell."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Container

from mpress.cells import Cell
from mpress.graph import Graph, Op, Phase, reads

# what an emitted module may import from the runtime
RUNTIME = ("dropout", "dropout_bwd", "keyed", "layers", "main", "sdpa_efficient", "sdpa_efficient_bwd", "sdpa_flash", "sdpa_flash_bwd")
_RESERVED = frozenset({"c", "p", "i", "aten", "torch", *RUNTIME, *keyword.kwlist, *dir(builtins)})
# operators whose result is best called after the module that holds the weights, rather than after the arithmetic
_OF_MODULE = frozenset({"addmm", "mm", "bmm", "native_layer_norm", "native_dropout", "embedding", "convolution", "native_batch_norm"})
_OUTPUTS = {
    "native_layer_norm": ("", "_mean", "_rstd"),
    "native_dropout": ("", "_mask"),
    "_scaled_dot_product_flash_attention": ("", "_lse", "", "", "", "", "_seed", "_offset", "_debug"),
    "_scaled_dot_product_efficient_attention": ("", "_lse", "_seed", "_offset"),
    "_scaled_dot_product_flash_attention_for_cpu": ("", "_lse"),
    "native_batch_norm": ("", "_mean", "_rstd"),
    "native_batch_norm_backward": ("", "_weight", "_bias"),
    "nll_loss_forward": ("", "_weight"),
    "native_layer_norm_backward": ("", "_weight", "_bias"),
    "_scaled_dot_product_flash_attention_backward": ("_q", "_k", "_v"),
    "_scaled_dot_product_efficient_attention_backward": ("_q", "_k", "_v", "_bias"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ("_q", "_k", "_v"),
}
_WORDS = {
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_efficient_attention": "attention",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_log_softmax": "log_probabilities",
    "nll_loss_forward": "loss",
    "add": "total",
    "sum": "reduced",
}


def identifier(text: str) -> str:
    """Turn any text into a Python identifier that shadows nothing."""
    word = re.sub(r"\W+", "_", text).strip("_") or "value"
    if word[0].isdigit():
        word = f"layer_{word}"
    return f"{word}_" if word in _RESERVED else word


def unique(wanted: str, taken: Container[str]) -> str:
    """The wanted name, numbered from 2 where it is taken."""
    name, number = wanted, 2
    while name in taken:
        name, number = f"{wanted}_{number}", number + 1
    return name


def relative(name: str, prefix: str) -> str:
    """A name as the cell function writes it: without the cell's prefix."""
    return name.removeprefix(prefix)


def parameter_name(graph: Graph, cell: Cell, canonical: str) -> str:
    """The name under which this cell's modules know a parameter: `lm_head.weight` in the head although it is tied to `wte.weight`."""
    entry = next(p for p in graph.holders if p.names[0] == canonical)
    if len(entry.names) > 1:
        storage = graph.tensors[entry.tensor].storage
        for index in cell.forward:
            op = graph.ops[index]
            if any(graph.tensors[t].storage == storage for t in reads(op)):
                for name in entry.names:
                    if name.rpartition(".")[0] == op.module:
                        return name
    return canonical


def writes_into(graph: Graph, op: Op, output: int) -> bool:
    """The output is the memory the operator wrote in place: it keeps the name it had."""
    storage = graph.tensors[output].storage
    return any(graph.tensors[t].storage == storage for t in op.mutates)


class LocalNames:
    """Unique names for every tensor a cell function binds: its inputs, incoming gradients, and results of non-view operators."""

    def __init__(self, graph: Graph, cell: Cell) -> None:
        self._graph = graph
        self._names: dict[int, str] = {}
        for tensor in cell.inputs:
            self._bind(tensor, "x")
        forward_name: dict[int, str] = {}
        for index in cell.forward:
            op = graph.ops[index]
            if not op.view:
                forward_name[index] = self._operator(op, self._forward_base(op), _OUTPUTS.get(op.name, ()))
            else:
                forward_name[index] = identifier(op.module.rpartition(".")[2] or op.name)
        for tensor in cell.gradient_inputs:
            if tensor >= 0:
                self._bind(tensor, "g")
        weights = {graph.contributions[n].tensor: graph.contributions[n].parameter for n in cell.contributions}
        owners = {graph.tensors[t].storage: relative(name, cell.prefix) for t, name in weights.items()}
        for index in cell.backward:
            op = graph.ops[index]
            if op.view:
                continue
            stem = forward_name.get(op.forward_op, "g" if op.forward_op < 0 else "value")
            base = "g" if op.forward_op < 0 else f"g_{stem}"
            suffixes = _OUTPUTS.get(op.name, ())
            for place, tensor in enumerate(op.outputs):
                if tensor < 0 or writes_into(graph, op, tensor):
                    continue
                owner = owners.get(graph.tensors[tensor].storage)
                suffix = suffixes[place] if place < len(suffixes) else ""
                self._bind(tensor, f"g_{identifier(owner)}" if owner else base + suffix)

    def of(self, tensor: int) -> str:
        """The local's name; KeyError when the function does not bind the tensor."""
        return self._names[tensor]

    def has(self, tensor: int) -> bool:
        """Whether the function binds the tensor (otherwise it is a view, a parameter or an input)."""
        return tensor in self._names

    def _forward_base(self, op: Op) -> str:
        last = op.module.rpartition(".")[2]
        if op.name in _OF_MODULE and last and not last.isdigit():
            return identifier(last)
        return identifier(_WORDS.get(op.name, op.name))

    def _operator(self, op: Op, base: str, suffixes: tuple[str, ...]) -> str:
        assert op.phase is Phase.FORWARD
        first = ""
        for place, tensor in enumerate(op.outputs):
            if tensor >= 0 and not writes_into(self._graph, op, tensor):
                suffix = suffixes[place] if place < len(suffixes) else ""
                name = self._bind(tensor, base + suffix)
                first = first or name
        return first or base

    def _bind(self, tensor: int, wanted: str) -> str:
        if tensor in self._names:
            return self._names[tensor]
        name = self._names[tensor] = unique(wanted, self._names.values())
        return name
