"""Operators and arguments as Python text.  Views are written inside the expression that uses them; they own no memory."""

from __future__ import annotations

import math
import re

from mpress.cells import Cell
from mpress.dataflow import alias_source
from mpress.emit.forms import KERNELS, keyed_overload
from mpress.emit.names import LocalNames, parameter_name, relative
from mpress.errors import InputError
from mpress.graph import Argument, Buffer, Graph, Kind, Name, Op, Parameter, Ref, reads

_PARTS = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}  # dtype of the parts of complex numbers
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_METHODS = frozenset(
    {"view", "t", "transpose", "permute", "expand", "split", "chunk", "unbind", "unsqueeze", "squeeze", "select", "detach"}
)
# What makes a tensor from numbers.  Not "whatever reads no tensor": a backward may conjugate a number, and that takes no device.
_FACTORIES = frozenset(
    {
        *("_efficientzerotensor", "arange", "bartlett_window", "blackman_window", "empty", "empty_permuted", "empty_strided", "eye"),
        *("fft_fftfreq", "fft_rfftfreq", "full", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal"),
        *("ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tril_indices", "triu_indices", "zeros"),
    }
)
_ON_DEFAULT = frozenset({"linspace", "logspace"})  # on the default device even where their ends are tensors
_LAST_VIEW = re.compile(r"\.view\(\([\d, ]*\)\)$")


class Expressions:
    """Writes the operators of one cell; `names` are its locals.

    device: where tensors are made, "" for code that runs on the CPU.  The recorded device says nothing: a trace runs on fake tensors.
    """

    def __init__(self, graph: Graph, cell: Cell, names: LocalNames, device: str = "c.device") -> None:
        self._graph, self._cell, self._names, self._device = graph, cell, names, device
        self._maker: dict[int, Op] = {}
        for index in (*cell.forward, *cell.backward):
            for tensor in graph.ops[index].outputs:
                if tensor >= 0 and tensor not in graph.ops[index].mutates:
                    self._maker.setdefault(tensor, graph.ops[index])
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
        if name == "native_dropout" and args[2] is not False:
            return f"dropout(c, {self._key(op)}, {self._argument(args[0])}, {args[1]!r})"
        if name == "native_dropout_backward":
            return f"dropout_bwd({', '.join(self._argument(a) for a in args)})"
        if name == "literal":
            return self._literal(op)
        kernel = KERNELS.get(name)
        if kernel is not None:
            words = [f"{key}={self._argument(v)}" if key else self._argument(v) for key, v in kernel.arguments(op)]
            if op.random_key:
                words.append(self._generator(op))
            return f"{kernel.function}({', '.join(words)})"
        overload = op.target.split(".")[2]
        keywords = self._keywords(op)
        if op.random_key:
            overload = keyed_overload(op)
            if not overload:
                raise _no_form(op, "draws random numbers in a way that cannot be keyed")
            keywords.append(self._generator(op))
        infix = name in _INFIX and overload == "Tensor" and len(args) == 2 and not keywords
        if infix and all(isinstance(a, Ref) for a in args):
            return f"{self._operand(args[0])} {_INFIX[name]} {self._operand(args[1])}"
        words = [self._argument(a) for a in args] + keywords
        return f"aten.{name}{'' if overload == 'default' else '.' + overload}({', '.join(words)})"

    def _operand(self, value: Argument) -> str:
        text = self._argument(value)
        return f"({text})" if " " in text.split("(")[0] else text

    def _key(self, op: Op) -> str:
        prefix = self._cell.prefix
        if prefix and op.random_key.startswith(f"{prefix[:-1]}#"):  # the block itself draws: "h.3#0" is "#0" of "h.3"
            return f'p.key("{op.random_key[len(prefix) - 1 :]}")'
        below = op.random_key.startswith(prefix)
        return f'p.key("{relative(op.random_key, prefix)}")' if below else f'"{op.random_key}"'

    def _generator(self, op: Op) -> str:
        return f"generator=keyed(c, {self._key(op)})"

    def _literal(self, op: Op) -> str:
        """A tensor made from Python values: args are shape, flat values, dtype."""
        shape, values, dtype = op.args
        assert isinstance(shape, tuple) and isinstance(values, tuple) and isinstance(dtype, Name)
        if dtype.value in _PARTS:  # a complex number is two values
            parts = f"torch.tensor({self._argument(values)}, dtype=torch.{_PARTS[dtype.value]}, device=c.device)"
            return f"torch.view_as_complex({parts}.view({self._argument((*shape, 2))}))"
        scalar = not shape
        text = f"torch.tensor({self._argument(values[0] if scalar else values)}, dtype={self._argument(dtype)}, device=c.device)"
        return text if len(shape) < 2 else f"{text}.view({self._argument(shape)})"

    def _keywords(self, op: Op) -> list[str]:
        given = {key: self._argument(value) for key, value in op.kwargs if not _left_out(key, value) and key != "device"}
        recorded = dict(op.kwargs).get("device") is not None  # of a tensor made like another: _to_copy, ones_like, new_zeros
        if self._device and (recorded or op.name in _ON_DEFAULT or (op.name in _FACTORIES and not reads(op))):
            given["device"] = self._device
        return [f"{key}={given[key]}" for key in sorted(given)]

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
            if name == "view" and not op.target.endswith(".dtype"):  # a view of a view is a view of the first
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
            return {"device": self._device or '"cpu"', "complex": value.value}.get(value.group, f"torch.{value.value}")
        if isinstance(value, tuple) and any(isinstance(item, Ref) for item in value):
            return f"[{', '.join(self._argument(item) for item in value)}]"
        if isinstance(value, tuple):
            words = [self._argument(item) for item in value]
            return f"({words[0]},)" if len(words) == 1 else f"({', '.join(words)})"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return f'"{value}"' if isinstance(value, str) else repr(value)


def _left_out(key: str, value: Argument) -> bool:
    """Keywords that say nothing about values: where memory is pinned, the one layout there is, factory keywords left open."""
    return key in ("pin_memory", "layout", "generator") or (value is None and key in ("dtype", "device", "memory_format", "scale"))


def _no_form(op: Op, why: str) -> InputError:
    return InputError(
        "no-form",
        f"{op.target} {why}; it has no form in the emitted module",
        where=f"{op.source.place()} in module '{op.module}'",
        hint="rewrite this line, or plan without a module: --schedule-only",
    )
