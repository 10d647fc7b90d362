"""Watches a training step on fake tensors: every ATen call with its tensors, storages, module, line and the forward call it differentiates.

Every tensor seen is kept alive, so that `id(object)` and storage addresses stay unique; fake tensors own no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mpress.errors import InputError, MpressError
from mpress.graph import Argument, Kind, Name, Ref, Source
from mpress.trace.costs_of_ops import flops_of, moved_bytes
from mpress.trace.semantics import draws
from mpress.trace.source import NOWHERE, current_source

ACCUMULATE = 2**64 - 1  # the sequence number of AccumulateGrad nodes
_engine: Any = torch.autograd  # private functions, absent from torch's stubs
_STATISTICS = frozenset({"aten.native_batch_norm.default", "aten.cudnn_batch_norm.default", "aten.miopen_batch_norm.default"})
_ADDS = ("aten.add.Tensor", "aten.add_.Tensor")


@dataclass(slots=True)
class Value:
    """A tensor as first seen; `differentiable` is read from `item` when the forward is over."""

    storage: int
    item: torch.Tensor
    name: str
    backward: bool
    differentiable: bool = False


@dataclass(slots=True)
class Memory:
    """A storage; `packed` = autograd saved a tensor on it."""

    bytes: int
    kind: Kind
    packed: bool = False


@dataclass(slots=True)
class Call:
    """One ATen call; ids are indices into Recorder.values and Recorder.calls.  summing: the engine adds up two gradients."""

    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[int, ...]
    multi: bool
    backward: bool
    module: str
    source: Source
    forward: int
    view: bool
    mutates: tuple[int, ...]
    random_key: str
    flops: float
    bytes_moved: int
    summing: bool = False


@dataclass(slots=True)
class Traits:
    """What the schema of an operator says, read once per operator."""

    target: str
    writes: tuple[int, ...]
    keyword_writes: tuple[str, ...]
    random: bool


def _traits(func: Any) -> Traits:
    arguments = func._schema.arguments
    positional = tuple(i for i, a in enumerate(arguments) if not a.kwarg_only and a.alias_info is not None and a.alias_info.is_write)
    keywords = tuple(a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write)
    return Traits(str(func), positional, keywords, torch.Tag.nondeterministic_seeded in func.tags)


def _hidden_writes(target: str, args: tuple[Any, ...]) -> list[Any]:
    """Running statistics, which batch normalisation writes in training although its schema does not say so."""
    return list(args[3:5]) if target in _STATISTICS and args[5] else []


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base class untyped
    """The dispatch mode.  Use: `adopt` parameters, buffers, inputs; run the forward; `start_backward`; run the backward."""

    def __init__(self, paths: dict[nn.Module, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.memories: list[Memory] = []
        self.seed = -1
        self.stack: list[str] = [""]
        self._paths = paths
        self._by_object: dict[int, int] = {}
        self._by_layout: dict[tuple[Any, ...], int] = {}
        self._by_storage: dict[int, int] = {}
        self._traits: dict[Any, Traits] = {}
        self._owners: dict[int, int] = {}
        self._draws: dict[str, int] = {}
        self._keep: list[Any] = []
        self._next_sequence = _engine._get_sequence_nr()
        self._backward = False
        self._paused = False
        self._view_written = False

    # -- tensors -----------------------------------------------------------------------------------------------------------------

    def adopt(self, tensor: torch.Tensor, kind: Kind, name: str) -> int:
        """Register a parameter, buffer or input that exists before the step."""
        return self._add(tensor, kind, name)

    def _add(self, tensor: torch.Tensor, kind: Kind, name: str) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        owner = self._by_storage.get(key)
        if owner is None:
            owner = self._by_storage[key] = len(self.memories)
            self.memories.append(Memory(storage.nbytes(), kind))
            self._keep.append(storage)
        number = len(self.values)
        self.values.append(Value(owner, tensor, name, self._backward))
        self._by_object[id(tensor)] = number
        self._by_layout[(owner, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)] = number
        return number

    def find(self, tensor: torch.Tensor) -> int:
        """The value of a tensor object; another object with the same storage and layout is the same value."""
        known = self._by_object.get(id(tensor))
        if known is not None:
            return known
        owner = self._by_storage.get(tensor.untyped_storage()._cdata)
        layout = (owner, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        known = None if owner is None else self._by_layout.get(layout)
        if known is None:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            raise self.refusal(
                "constant",
                f"a tensor ({shape}) is used that is neither a parameter, a buffer, an input nor computed in the forward",
                "register it with self.register_buffer, or pass it as an input",
            )
        self._by_object[id(tensor)] = known
        self._keep.append(tensor)
        return known

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hook for saved_tensors_hooks: autograd saves this tensor."""
        owner = self._by_storage.get(tensor.untyped_storage()._cdata)
        if owner is not None:
            self.memories[owner].packed = True
        return tensor

    # -- modules -----------------------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, _arguments: Any) -> None:
        """Global forward pre-hook."""
        self.stack.append(self._paths.get(module, self.stack[-1]))

    def leave(self, _module: nn.Module, _arguments: Any, _result: Any) -> None:
        """Global forward hook."""
        self.stack.pop()

    def refusal(self, code: str, message: str, hint: str) -> InputError:
        """A refusal that names the module and the line being run."""
        source = current_source()
        module = self.stack[-1]
        inside = f" in module '{module}'" if module else ""
        line = f": `{source.code}`" if source.code else ""
        return InputError(code, f"{message}{inside}{line}", source.place(module), hint)

    # -- calls -------------------------------------------------------------------------------------------------------------------

    def start_backward(self, seed: torch.Tensor) -> None:
        """Everything from here on is the backward pass; `seed` is the gradient of the loss it starts from."""
        self._note_nodes(-1)
        self._backward = True
        self.seed = self._add(seed, Kind.COMPUTED, "")

    def _note_nodes(self, call: int) -> None:
        """Give the autograd nodes created since the last call their owner.

        A node exists before its call reaches the mode, so new ones belong to `call`; only writing into a view creates
        one afterwards (CopySlices), which belongs to the call before.
        """
        now = _engine._get_sequence_nr()
        for sequence in range(self._next_sequence, now):
            late = self._view_written and sequence == self._next_sequence
            self._owners[sequence] = call - 1 if late and call > 0 else call
        self._next_sequence = now
        self._view_written = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls in this block run but are not recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # wrapping this mode would import and call torch._dynamo, which is never used here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            hint = "create tensors on the device of an input: device=x.device"
            raise self.refusal("device", f"the model asks for device '{device}'", hint)
        number = len(self.calls)
        sequence = -1
        if self._backward:
            node = torch._C._current_autograd_node()
            sequence = node._sequence_nr() if node is not None else -1
            if torch.is_grad_enabled():
                hint = "remove checkpointing and create_graph: the planner decides itself what is recomputed"
                raise self.refusal("activation-checkpoint", "the backward pass runs forward operators again", hint)
        else:
            self._note_nodes(number)
        constant = func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor)
        if constant:
            literal = self._literal(args[0])
        try:
            result = func(*args, **kwargs)
        except MpressError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self.refusal(
                "data-dependent",
                f"the result of {error.func} depends on values, but plans are made without data",
                "branch on shapes or configuration only, or use torch.where / masks of fixed size",
            ) from None
        if sequence == ACCUMULATE:
            return result
        if func is torch.ops.aten.detach.default:  # the same value under another Python object
            self._by_object[id(result)] = self.find(args[0])
            self._keep.append(result)
            return result
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = _traits(func)
        if constant:
            self._record_constant(literal, result)
            return result
        operands: list[torch.Tensor] = []
        call_args = tuple([self._argument(a, operands) for a in args])
        call_kwargs = tuple([(key, self._argument(kwargs[key], operands)) for key in sorted(kwargs)])
        mutates = [args[i] for i in traits.writes if i < len(args)] + [kwargs[k] for k in traits.keyword_writes if k in kwargs]
        mutates += _hidden_writes(traits.target, args)
        written = tuple([self.find(t) for t in mutates if isinstance(t, torch.Tensor)])
        before = len(self.memories)
        multi = isinstance(result, tuple | list)
        items = list(result) if multi else [result]
        outputs = tuple([self._add(t, Kind.COMPUTED, "") if isinstance(t, torch.Tensor) else -1 for t in items])
        shared = {self.values[self.find(t)].storage for t in operands}
        made = [self.values[o].storage for o in outputs if o >= 0]
        view = bool(made) and not written and len(self.memories) == before and all(s in shared for s in made)
        forward, module, source = -1, self.stack[-1], NOWHERE
        summing = False
        if self._backward:
            owner = self._owners.get(sequence, -1)
            if owner >= 0:
                module, source = self.calls[owner].module, self.calls[owner].source
            plain_add = traits.target in _ADDS and len(operands) == 2 and not kwargs
            summing = plain_add and all(self.values[self.find(t)].backward for t in operands)
            forward = -1 if summing else owner
        else:
            source = current_source()
            self._view_written = any(t._is_view() for t in mutates if isinstance(t, torch.Tensor))
        key = self._random_key(module, func, args, kwargs, traits)
        flops = 0.0 if view else flops_of(func, args, kwargs, result)
        moved = 0 if view else moved_bytes(traits.target, operands, [t for t in items if isinstance(t, torch.Tensor)])
        self.calls.append(
            Call(
                traits.target, call_args, call_kwargs, outputs, multi, self._backward, module, source, forward,
                view, written, key, flops, moved, summing,
            )
        )  # fmt: skip
        return result

    def _random_key(self, module: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], traits: Traits) -> str:
        if not traits.random or not draws(func, args, kwargs):
            return ""
        draw = self._draws.get(module, 0)
        self._draws[module] = draw + 1
        return f"{module}#{draw}"

    def _argument(self, value: Any, operands: list[torch.Tensor]) -> Argument:
        if isinstance(value, torch.Tensor):
            operands.append(value)
            return Ref(self.find(value))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return tuple([self._argument(item, operands) for item in value])
        convert = _CONSTANTS.get(type(value))
        if convert is None:
            kind = type(value).__name__
            raise self.refusal("trace", f"an operator takes an argument of type {kind}", "this kind of argument cannot be planned yet")
        return convert(value)

    def _literal(self, tensor: torch.Tensor) -> int | float | bool:
        if tensor.numel() != 1:
            raise self.refusal("constant", "the forward makes a tensor from Python values", "register it once with self.register_buffer")
        with _disable_current_modes():
            value: int | float | bool = tensor.item()
        return value

    def _record_constant(self, literal: int | float | bool, result: torch.Tensor) -> None:
        """`torch.tensor(3.0)` in a forward is written as a fill of that shape."""
        kwargs: tuple[tuple[str, Argument], ...] = (("device", Name("device", "cpu")), ("dtype", _CONSTANTS[torch.dtype](result.dtype)))
        args: tuple[Argument, ...] = (tuple(result.shape), literal)
        self.calls.append(
            Call(
                "aten.full.default", args, kwargs, (self._add(result, Kind.COMPUTED, ""),), False, self._backward, self.stack[-1],
                current_source(), -1, False, (), "", 0.0, result.element_size(),
            )
        )  # fmt: skip


def _last(value: Any) -> str:
    return str(value).rpartition(".")[2]


_CONSTANTS: dict[type, Callable[[Any], Name]] = {
    torch.dtype: lambda v: Name("dtype", _last(v)),
    torch.layout: lambda v: Name("layout", _last(v)),
    torch.memory_format: lambda v: Name("memory_format", _last(v)),
    torch.device: lambda v: Name("device", v.type),
}
