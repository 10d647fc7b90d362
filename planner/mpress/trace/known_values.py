"""Where the user's code reads values: known ones are given, unknown ones are refused.  Real tensors get fake stand-ins.

A value that comes from an example input is given too, and every line that reads one is kept as an assumption of the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from mpress.errors import InputError
from mpress.trace.ledger import Ledger
from mpress.trace.shadows import Shadows
from mpress.trace.source import current_source

Tensor = torch.Tensor
_aten: Any = torch.ops.aten
_READERS = frozenset({_aten._local_scalar_dense.default, _aten.equal.default})
_CPU = torch.device("cpu")


class KnownValues:
    """`assumptions`: lines of the user's code that read example inputs, each once, in order."""

    def __init__(self, ledger: Ledger, fakes: FakeTensorMode, refusal: Callable[[str, str, str], InputError]) -> None:
        self.shadows = Shadows(ledger)
        ledger.on_death = self.shadows.died
        self._ledger = ledger
        self._fakes = fakes
        self.refusal = refusal
        self._assumptions: dict[str, None] = {}
        self._stand_ins: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    @property
    def assumptions(self) -> tuple[str, ...]:
        return tuple(self._assumptions)

    def assume(self, text: str) -> None:
        """Note something the plan takes for granted."""
        self._assumptions.setdefault(text)

    # -- reading values ----------------------------------------------------------------------------------------------------------

    def read(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> Any:
        """The Python value of a call that reads one and knows it, else NotImplemented."""
        if func not in _READERS or not self.shadows.all_known(operands):
            return NotImplemented
        value, inputs = self.shadows.run(func, args, kwargs)
        self._assume_read(inputs)
        return value

    def shaped(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor], error: Exception) -> Any:
        """The fake result of a call whose result depends on values; refuses where they are not known."""
        result: Any = NotImplemented
        inputs: frozenset[str] = frozenset()
        if self.shadows.all_known(operands):
            real, inputs = self.shadows.run(func, args, kwargs)
            result = tree_map(lambda leaf: self.fake(leaf) if isinstance(leaf, Tensor) else leaf, real)
        elif func is _aten.index.Tensor:
            found = [self._positions(index) for index in args[1]]
            if all(item is not None for item in found):
                inputs = frozenset(name for item in found if item is not None for name in item[1])
                result = func(args[0], [position for item in found if item is not None for position in item[0]])
        elif func is _aten.masked_select.default and (mask := self.shadows.read(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
            with _disable_current_modes():
                chosen, inputs = int(mask[0].expand(shape).sum()), mask[1]
            result = args[0].new_empty(chosen)
        if result is NotImplemented:
            raise self.refusal(
                "data-dependent",
                f"the result of {getattr(error, 'func', func)} depends on values, but plans are made without data",
                "branch on shapes or configuration only, or use torch.where / masks of fixed size",
            ) from None
        self._assume_read(inputs)
        return result

    def _positions(self, index: Tensor | None) -> tuple[list[Tensor | None], frozenset[str]] | None:
        """An index of `x[index]` as positions: a known mask is the positions of its ones.  None for an unknown mask."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index], frozenset()
        known = self.shadows.read(index)
        if known is None:
            return None
        with _disable_current_modes():
            positions = known[0].nonzero().unbind(1)
        return [self.fake(position) for position in positions], known[1]

    def _assume_read(self, inputs: frozenset[str]) -> None:
        if inputs:
            source = current_source()
            names = ", ".join(f"'{name}'" for name in sorted(inputs))
            code = f": `{source.code}`" if source.code else ""
            self.assume(f"{source.place('the model')} reads values of the example input {names}{code}")

    # -- real tensors ------------------------------------------------------------------------------------------------------------

    def fake(self, like: Tensor) -> Tensor:
        """A fake tensor of the same layout on a storage of its own."""
        with _disable_current_modes():
            meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            return FakeTensor(self._fakes, meta, _CPU)

    def fake_arguments(self, args: Any, kwargs: Any, on_new: Callable[[Tensor, Tensor], None]) -> Any:
        """Arguments with a stand-in for each real tensor; `on_new(real, stand_in)` hears of each that is new."""

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or type(leaf) is FakeTensor:
                return leaf
            known = self._stand_ins.get(id(leaf))
            if known is not None and known[0]() is leaf:
                return known[1]
            with _disable_current_modes():
                dense = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            fake = self.fake(dense)
            on_new(leaf, fake)
            self._ledger.same_storage(leaf, fake)
            self._stand_ins[id(leaf)] = (weakref.ref(leaf), fake)
            return fake

        return tree_map(stand_in, (args, kwargs))

    def is_stand_in(self, tensor: Tensor) -> bool:
        """Whether a fake tensor stands in for a real one."""
        return any(known[1] is tensor for known in self._stand_ins.values())
