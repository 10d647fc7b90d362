"""Operators and arguments as Python text.  Views are written inside the expression that uses them; they own no memory."""

from __future__ import annotations

import math
import re

from mpress.cells import Cell
from mpress.dataflow import alias_source
from mpress.emit.names import LocalNames, parameter_name, relative
from mpress.errors import InputError
from mpress.graph import Argument, Buffer, Graph, Kind, Name, Op, Parameter, Ref

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_METHODS = frozenset(
    {"view", "t", "transpose", "permute", "expand", "split", "chunk", "unbind", "unsqueeze", "squeeze", "select", "detach"}
)
_LAST_VIEW = re.compile(r"\.view\(\([\d, ]*\)\)$")
_DTYPE_FREE = ("pin_memory", "layout")


class Expressions:
    """Writes the operators of one cell; `names` are its locals."""

    def __init__(self, graph: Graph, cell: Cell, names: LocalNames) -> None:
        self._graph, self._cell, self._names = graph, cell, names
        self._maker = {t: graph.ops[i] for i in (*cell.forward, *cell.backward) for t in graph.ops[i].outputs if t >= 0}
        self._tensors = {tensor.id: tensor for tensor in graph.tensors}
        self._parameter: dict[int, Parameter | Buffer] = {self._tensors[p.tensor].storage: p for p in graph.holders}

    def tensor(self, tensor: int) -> str:
        """A local, a parameter, a user input, or a chain of views on one of these."""
        if self._names.has(tensor):
            return self._names.of(tensor)
        op = self._maker.get(tensor)
        if op is None:
            return self._leaf(tensor)
        if not op.view:  # an in-place operator returns its argument
            source = alias_source(op, tensor, self._tensors)
            assert source is not None, f"tensor {tensor} of {op.target} is no local"
            return self.tensor(source)
        return self._view(op, tensor)

    def parameter(self, canonical: str) -> str:
        """A parameter's name as this cell writes it."""
        return relative(parameter_name(self._graph, self._cell, canonical), self._cell.prefix)

    def call(self, op: Op) -> str:
        """A non-view operator as a call, without its result."""
        name, args = op.name, op.args
        keywords = dict(op.kwargs)
        if name == "native_dropout":
            below = op.random_key.startswith(self._cell.prefix)
            key = f'p.key("{relative(op.random_key, self._cell.prefix)}")' if below else f'"{op.random_key}"'
            return f"dropout(c, {key}, {self._argument(args[0])}, {args[1]!r})"
        if name == "native_dropout_backward":
            return f"dropout_bwd({', '.join(self._argument(a) for a in args)})"
        if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
            return self._attention(op)
        if op.random_key:
            raise _no_form(op, "draws random numbers in a way that cannot be keyed")
        if name in _INFIX and op.target.endswith(".Tensor") and len(args) == 2 and not keywords and all(isinstance(a, Ref) for a in args):
            return f"{self._argument(args[0])} {_INFIX[name]} {self._argument(args[1])}"
        words = [self._argument(a) for a in args] + self._keywords(op)
        overload = op.target.split(".")[2]
        return f"aten.{name}{'' if overload == 'default' else '.' + overload}({', '.join(words)})"

    def _attention(self, op: Op) -> str:
        backward = op.name.endswith("_backward")
        tensors = 6 if backward else 3
        rest, keywords = op.args[tensors:], dict(op.kwargs)
        if keywords.get("attn_mask") is not None or (rest and rest[0] != 0.0):
            raise _no_form(op, "uses an attention mask or attention dropout")
        words = [self._argument(a) for a in op.args[:tensors]]
        if len(rest) > 1 and rest[1]:
            words.append("causal=True")
        if keywords.get("scale") is not None:
            words.append(f"scale={keywords['scale']!r}")
        return f"{'sdpa_bwd' if backward else 'sdpa'}({', '.join(words)})"

    def _keywords(self, op: Op) -> list[str]:
        return [f"{key}={self._argument(value)}" for key, value in op.kwargs if key not in _DTYPE_FREE and value is not None]

    def _view(self, op: Op, tensor: int) -> str:
        name = {"_unsafe_view": "view", "alias": "detach"}.get(op.name, op.name)
        source = op.args[0]
        if name not in _METHODS or not isinstance(source, Ref):
            words = [self._argument(a) for a in op.args] + self._keywords(op)
            text = f"aten.{op.target.removeprefix('aten.').removesuffix('.default')}({', '.join(words)})"
        else:
            text = self.tensor(source.tensor)
            if name == "t" and text.endswith(".t()"):
                return text.removesuffix(".t()")
            if name == "detach":
                return text
            if name == "view":  # a view of a view is a view of the first
                text = _LAST_VIEW.sub("", text)
            if " " in text.split("(")[0]:
                text = f"({text})"
            words = [self._argument(a) for a in op.args[1:]] + self._keywords(op)
            text = f"{text}.{name}({', '.join(words)})"
        return f"{text}[{op.outputs.index(tensor)}]" if op.multi else text

    def _leaf(self, tensor: int) -> str:
        found = self._tensors[tensor]
        storage = self._graph.storages[found.storage]
        if storage.kind is Kind.INPUT:
            return f'c.input("{found.name}")'
        entry = self._parameter.get(found.storage)
        if entry is None:
            raise AssertionError(f"tensor {tensor} reaches cell {self._cell.name} from nowhere")
        return f'p["{self.parameter(entry.names[0])}"]'

    def _argument(self, value: Argument) -> str:
        if isinstance(value, Ref):
            return self.tensor(value.tensor)
        if isinstance(value, Name):
            return "c.device" if value.group == "device" else f"torch.{value.value}"
        if isinstance(value, tuple):
            words = [self._argument(item) for item in value]
            return f"({words[0]},)" if len(words) == 1 else f"({', '.join(words)})"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return repr(value)


def _no_form(op: Op, why: str) -> InputError:
    return InputError(
        "no-form",
        f"{op.target} {why}; it has no form in the emitted module",
        where=f"{op.source.place()} in module '{op.module}'",
        hint="rewrite this line, or wait for a version that can emit it",
    )
