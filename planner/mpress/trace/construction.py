"""Watches the user's model being built on the meta device, where tensors have no values, and notes how the value of each comes about.

Every ATen call of the constructor becomes a Step that knows the steps it depends on, so what makes one buffer is the closure of one step.
A value that is drawn at random, or computed from such a one, is *unknown*: its history is dropped at once, so that initialising parameters
leaves next to nothing behind.  Values that exist (`torch.tensor([...])`, numpy) become literals.

Code that needs a value (`.item()`, `.tolist()`, `.numpy()`, a loop over `torch.linspace`) gets the right one: its closure is run for real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from mpress.errors import InputError
from mpress.graph import Source
from mpress.trace.source import current_source

LITERAL = "mpress.literal.default"
MOST_LITERALS = 4096  # elements of a tensor of Python values that are still written into a program as text
_RANDOM = "drawn at random"
_META, _CPU = torch.device("meta"), torch.device("cpu")
_aten: Any = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
_EMPTY = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})


class Layout(NamedTuple):
    """A view on a storage: the identity of a value, whatever Python object holds it.  An overwritten storage gets a new number."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the constructor; tensors among args, kwargs, outputs and writes are Layouts.  needs: numbers of earlier steps.

    func is None for a literal, whose args are (shape, flat values, dtype).
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Layout, ...]
    multi: bool
    view: bool
    writes: tuple[Layout, ...]
    needs: tuple[int, ...]
    source: Source


class UnknownValueError(Exception):
    """The constructor does not tell a value; the text says why, as the end of "it is ..."."""


class Construction(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base class untyped
    """The dispatch mode.  Enter it inside `torch.device("meta")`, together with `Values(construction)`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self._numbers: dict[int, int] = {}  # storage address -> number
        self._count = 0
        self._roots: dict[int, Layout] = {}  # number -> the layout it was allocated with
        self._last: dict[int, int] = {}  # number -> the step that allocated it or wrote it last
        self._views: dict[Layout, int] = {}
        self._viewed: set[int] = set()
        self._unknown: dict[int, str] = {}
        self._keep: list[Any] = []  # storages stay alive, so that their addresses stay unique; meta storages own no memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # wrapping this mode would import and call torch._dynamo, which is never used here

    # -- identity ----------------------------------------------------------------------------------------------------------------

    def layout(self, tensor: torch.Tensor) -> Layout:
        """The value a tensor object stands for now."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._new(storage)
        found = Layout(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        self._roots.setdefault(number, found)
        return found

    def root(self, layout: Layout) -> Layout:
        """The layout its storage was allocated with."""
        return self._roots.get(layout.storage, layout)

    def _new(self, storage: Any) -> int:
        if storage._cdata not in self._numbers:
            self._keep.append(storage)
        number = self._numbers[storage._cdata] = self._count
        self._count += 1
        return number

    # -- what makes a value ------------------------------------------------------------------------------------------------------

    def closure(self, layout: Layout) -> tuple[int, ...]:
        """Numbers of the steps that make a value, in order.  Raises UnknownValueError."""
        todo, found = list(self._needs((layout,))), set[int]()
        while todo:
            number = todo.pop()
            if number not in found:
                found.add(number)
                todo += self.steps[number].needs
        numbers = tuple(sorted(found))
        if any(self.steps[n].func is not None and _name(self.steps[n].func) in _EMPTY for n in numbers):
            first, second = (self._run(numbers, fill)[layout] for fill in (0, 1))
            if not torch.equal(first, second):
                raise UnknownValueError("left uninitialised")
        return numbers

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a meta tensor, computed for real.  Raises UnknownValueError."""
        if tensor.device != _META:
            return tensor
        layout = self.layout(tensor)
        return self._run(self.closure(layout), 0)[layout]

    def literal(self, tensor: torch.Tensor) -> Layout:
        """Take a real tensor as it is now for Python values; a new value.  Raises UnknownValueError."""
        reason = self._reason(tensor)
        if reason:
            raise UnknownValueError(reason)
        if tensor.numel() > MOST_LITERALS:
            raise UnknownValueError(f"a table of {tensor.numel()} numbers made outside of torch")
        if tensor.is_complex():
            raise UnknownValueError("made of complex numbers outside of torch")
        with _disable_current_modes():
            values = tuple(tensor.detach().reshape(-1).tolist())
            stride = torch.empty(tensor.shape, device="meta").stride()
        made = Layout(self._count, tuple(tensor.shape), stride, 0, tensor.dtype)
        self._count += 1
        self._roots[made.storage] = made
        self._last[made.storage] = len(self.steps)
        self.steps.append(Step(None, (made.shape, values, made.dtype), {}, (made,), False, False, (), (), current_source()))
        return made

    def twin(self, real: torch.Tensor) -> torch.Tensor:
        """A meta tensor with the value a real one has now."""
        with _disable_current_modes():
            meta = torch.empty(real.shape, dtype=real.dtype, device="meta")
        try:
            self._numbers[meta.untyped_storage()._cdata] = self.literal(real).storage
            self._keep.append(meta.untyped_storage())
        except UnknownValueError as error:
            self._unknown[self.layout(meta).storage] = str(error)
        return meta

    def _reason(self, tensor: torch.Tensor) -> str:
        """Why a value is unknown, "" if it is not."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        return "" if number is None else self._unknown.get(number, "")

    def _needs(self, layouts: tuple[Layout, ...]) -> tuple[int, ...]:
        needs: list[int] = []
        for layout in layouts:
            if layout.storage in self._unknown:
                raise UnknownValueError(self._unknown[layout.storage])
            number = self._last.get(layout.storage)
            if number is None:
                raise UnknownValueError("made before the constructor began")
            needs.append(number)
            if layout != self._roots[layout.storage]:
                if layout not in self._views:
                    raise UnknownValueError("seen through a view that torch does not show")
                needs.append(self._views[layout])
        return tuple(dict.fromkeys(needs))

    def _run(self, numbers: tuple[int, ...], fill: int) -> dict[Layout, torch.Tensor]:
        """Run steps on the CPU; what is left uninitialised is filled with a number."""
        values: dict[Layout, torch.Tensor] = {}

        def real(argument: Any) -> Any:
            if isinstance(argument, Layout):
                return values[argument]
            if isinstance(argument, tuple | list):
                return [real(item) for item in argument]
            return _CPU if isinstance(argument, torch.device) else argument

        with _disable_current_modes(), torch.no_grad():
            for number in numbers:
                step = self.steps[number]
                if step.func is None:
                    shape, flat, dtype = step.args
                    values[step.outputs[0]] = torch.tensor(flat, dtype=dtype, device="cpu").reshape(shape)
                    continue
                result = step.func(*[real(a) for a in step.args], **{key: real(a) for key, a in step.kwargs.items()})
                if _name(step.func) in _EMPTY:
                    result.fill_(fill)
                items = result if isinstance(result, tuple | list) else [result]
                values.update(zip(step.outputs, items, strict=False))
        return values

    # -- calls -------------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        operands = _tensors((args, kwargs))
        metas = any(t.is_meta for t in operands)
        written = _written(func, args, kwargs)
        if metas and (func is _aten._local_scalar_dense.default or func is _aten.equal.default):
            return func(*self.real(args), **kwargs)
        if metas and func is _aten._to_copy.default and kwargs.get("device") == _CPU:
            try:
                return func(*[self.value(a) for a in args], **kwargs)
            except UnknownValueError:
                kwargs = {**kwargs, "device": _META}  # model.cpu() on the way: nothing to copy
        elif metas and any(t.device != _META for t in written):
            return func(*self.real(args), **self.real(kwargs))
        elif metas and any(t.device != _META for t in operands):
            args, kwargs = tree_map(self._on_meta, (args, kwargs))
            operands = _tensors((args, kwargs))
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:  # an operator whose result's shape depends on values
            if not metas or written:
                raise
            result = tree_map(_like, func(*self.real(args), **self.real(kwargs)))
        if func in _SAME:
            return result
        made = _tensors(result)
        if not any(t.is_meta for t in (*made, *written)):
            self._taint(func, operands, made)
        else:
            self._record(func, args, kwargs, operands, written, result, made)
        return result

    def real(self, arguments: Any) -> Any:
        """Arguments with the values of meta tensors; refuses where they are unknown."""
        try:
            return tree_map(lambda leaf: self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf, arguments)
        except UnknownValueError as error:
            raise refusal(error) from None

    def _on_meta(self, leaf: Any) -> Any:
        return self.twin(leaf) if isinstance(leaf, torch.Tensor) and leaf.device != _META else leaf

    def _taint(self, func: Any, operands: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Real tensors carry their value themselves; only whether it is random has to be followed."""
        reasons = [reason for t in operands if (reason := self._reason(t))]
        if reasons or torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in made:
                self._unknown[self.layout(tensor).storage] = (reasons or [_RANDOM])[0]

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: list[torch.Tensor],
        written: list[torch.Tensor],
        result: Any,
        made: list[torch.Tensor],
    ) -> None:
        if written and made and made[0] is written[0]:
            func, args, kwargs, written = self._overwritten(func, args, kwargs, written)
            operands = _tensors((args, kwargs))
        before = {self.layout(t).storage for t in operands}
        view = not written and all(t.untyped_storage()._cdata in self._numbers and self.layout(t).storage in before for t in made)
        targets = written or [t for t in made if self.layout(t).storage not in before]
        try:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise UnknownValueError(_RANDOM)
            needs = self._needs(tuple(self.layout(t) for t in operands))
        except UnknownValueError as error:
            for tensor in targets:
                self.forget(tensor, str(error))
            if not view:
                return
            needs = tuple(self._views[one] for t in operands if (one := self.layout(t)) in self._views)
        number = len(self.steps)
        step_args, step_kwargs = (args, kwargs) if not operands else tree_map(self._layout_of, (args, kwargs))
        outputs = tuple(self.layout(t) for t in made)
        writes = tuple(self.layout(t) for t in written)
        multi = isinstance(result, tuple | list)
        self.steps.append(Step(func, step_args, step_kwargs, outputs, multi, view, writes, needs, current_source()))
        if view:
            for layout in outputs:
                if layout != self._roots[layout.storage]:
                    self._views.setdefault(layout, number)
                    self._viewed.add(layout.storage)
        for tensor in (*targets, *written):
            self._last[self.layout(tensor).storage] = number

    def _layout_of(self, leaf: Any) -> Any:
        return self.layout(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def forget(self, tensor: torch.Tensor, reason: str = _RANDOM) -> None:
        """The value of the storage a tensor is on is unknown from now on."""
        number = self.layout(tensor).storage
        self._unknown[number] = reason
        self._last.pop(number, None)

    def _overwritten(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """A call that replaces the whole storage makes a new value: what was there before is of no interest any more."""
        target = args[0]
        layout = self.layout(target)
        whole = layout == self._roots[layout.storage] and layout.storage not in self._viewed and target.is_contiguous()
        if not whole or target.untyped_storage().nbytes() != target.numel() * target.element_size():
            return func, args, kwargs, written
        changed: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        if func is _aten.zero_.default:
            changed = (_aten.zeros.default, (layout.shape,), {"dtype": layout.dtype})
        elif func is _aten.fill_.Scalar:
            changed = (_aten.full.default, (layout.shape, args[1]), {"dtype": layout.dtype})
        elif (
            func is _aten.copy_.default
            and args[1].shape == target.shape
            and args[1].untyped_storage()._cdata != target.untyped_storage()._cdata
        ):
            dense: dict[str, Any] = {} if args[1].is_contiguous() else {"memory_format": torch.contiguous_format}
            changed = (_aten._to_copy.default, (args[1],), {"dtype": layout.dtype, **dense})
        if changed is None:
            return func, args, kwargs, written
        self._new(target.untyped_storage())
        return *changed, []


class Values(TorchFunctionMode):
    """Python values that become tensors, and tensors that become Python values, which no dispatch mode sees on the meta device."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        known = self._construction
        if func in _MAKERS and kwargs.get("device") in (None, "meta", _META):
            if isinstance(args[0] if args else None, torch.Tensor):
                copied = args[0].detach().clone() if func is torch.tensor else args[0]
                return copied.to(kwargs["dtype"]) if kwargs.get("dtype") else copied
            real = func(*known.real(args), **({**kwargs, "device": "cpu"} if func is not torch.from_numpy else kwargs))
            return known.twin(real).requires_grad_(real.requires_grad)
        if func in _DRAWS:  # what is drawn is unknown: nothing needs to run, and there is one such call a parameter
            target = args[0] if args else kwargs["tensor"]
            if target.is_meta:
                known.forget(target)
                return target
        if func in _READERS and args[0].device == _META:
            return func(known.real(args[0].detach()), *args[1:], **kwargs)
        return func(*args, **kwargs)


_MAKERS: frozenset[Callable[..., Any]] = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy})
_DRAWS: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.trunc_normal_, torch.nn.init.kaiming_uniform_,
        torch.nn.init.kaiming_normal_, torch.nn.init.xavier_uniform_, torch.nn.init.xavier_normal_, torch.Tensor.uniform_,
        torch.Tensor.normal_,
    }
)  # fmt: skip
_READERS: frozenset[Callable[..., Any]] = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})


def refusal(error: UnknownValueError) -> InputError:
    """The constructor reads a value nobody has."""
    source = current_source()
    line = f": `{source.code}`" if source.code else ""
    hint = "build_model runs without weights: it must not read the values of random tensors"
    return InputError("model-file", f"building the model reads a tensor that is {error}{line}", source.place(), hint)


def _like(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in (nested) tuples, lists and dictionaries; quicker than torch's pytree, which matters once a parameter."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    found: list[torch.Tensor] = []
    for item in value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, tuple | list | dict):
            found += _tensors(item)
    return found


def _name(func: Any) -> str:
    return str(func).split(".")[1]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors the schema says are written in place."""
    if not func._schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found
