"""Real values beside fake tensors, where they are known: small tensors that come from constants or from the given example inputs only.

A shadow belongs to a storage, so views share it and writing in place changes it for all of them.  What is computed from unknown values is
unknown.  Reading a value that comes from an example input is an assumption of the plan, and is noted as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from mpress.trace.ledger import Ledger

Tensor = torch.Tensor
_aten: Any = torch.ops.aten
WHOLE, FLOATS = 4 * 2**20, 64 * 2**10  # most elements of an integer (or bool) tensor and of a float tensor that are followed
_UNKNOWN = ("aten.empty", "aten.new_empty")  # results without a value
_FILLS = {"aten.zeros_like": 0, "aten.new_zeros": 0, "aten.ones_like": 1, "aten.new_ones": 1}
_FILLS_WITH = {"aten.full_like": 1, "aten.new_full": 2}  # which argument is the value
_OVERWRITES = (_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default)


@dataclass(slots=True)
class Shadow:
    """The real storage behind a fake one.  inputs: the example inputs its values come from."""

    storage: Any
    inputs: frozenset[str]


class Shadows:
    """Shadows by memory number."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: dict[int, Shadow] = {}

    def give(self, fake: Tensor, real: Tensor, inputs: frozenset[str]) -> None:
        """`fake` has the values of `real`, if it is small enough to be followed."""
        number = self._ledger.memory(fake)
        if number is None or not _small(fake) or real.is_meta:
            return
        with _disable_current_modes(), torch.no_grad():
            copy = torch.empty(fake.untyped_storage().nbytes() // fake.element_size(), dtype=fake.dtype)
            copy.as_strided(fake.shape, fake.stride(), fake.storage_offset()).copy_(real.detach())
        self._known[number] = Shadow(copy.untyped_storage(), inputs)

    def died(self, number: int) -> None:
        """A storage is gone."""
        self._known.pop(number, None)

    def read(self, tensor: Tensor) -> tuple[Tensor, frozenset[str]] | None:
        """The real values of a fake tensor and the example inputs they come from, None if they are not known."""
        number = self._ledger.memory(tensor)
        shadow = None if number is None else self._known.get(number)
        if shadow is None:
            return None
        with _disable_current_modes():
            empty = torch.empty(0, dtype=tensor.dtype)
            return empty.set_(shadow.storage, tensor.storage_offset(), tensor.shape, tensor.stride()), shadow.inputs

    def all_known(self, operands: Sequence[Tensor]) -> bool:
        """Whether the values of all of them are known."""
        return all(self._ledger.memory(t) in self._known for t in operands)

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, frozenset[str]]:
        """The call on real values, which must be known; and the example inputs the result comes from."""
        inputs: set[str] = set()

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            found = self.read(leaf)
            assert found is not None
            inputs.update(found[1])
            return found[0]

        real_args, real_kwargs = tree_map(real, (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            return func(*real_args, **real_kwargs), frozenset(inputs)

    def follow(
        self,
        target: str,
        func: Any,
        args: Any,
        kwargs: Any,
        operands: Sequence[Tensor],
        written: Sequence[Tensor],
        result: Any,
        random: bool,
    ) -> None:
        """After a call: compute what it makes of known values, forget what it overwrites with unknown ones."""
        packet = target.rpartition(".")[0]
        made = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, Tensor)]
        if written and func in _OVERWRITES and args[0].untyped_storage().nbytes() == args[0].numel() * args[0].element_size():
            sources = operands[1:]
            if self.all_known(sources) and _small(args[0]):
                value = args[1] if len(args) > 1 else 0
                real, inputs = (value, frozenset[str]()) if not isinstance(value, Tensor) else self.read(value) or (0, frozenset())
                with _disable_current_modes():
                    real = real if isinstance(real, Tensor) else torch.tensor(real)
                self.give(args[0], real.expand(args[0].shape), inputs)
                return
        if not random and not packet.startswith(_UNKNOWN) and all(_small(t) for t in made):
            if not written and (packet in _FILLS or packet in _FILLS_WITH):
                value = _FILLS[packet] if packet in _FILLS else args[_FILLS_WITH[packet]]
                with _disable_current_modes():
                    self.give(result, torch.tensor(value).expand(result.shape), frozenset())
                return
            if self.all_known(operands):
                self._compute(func, args, kwargs, written, made)
                return
        for tensor in written:
            number = self._ledger.memory(tensor)
            if number is not None:
                self.died(number)

    def _compute(self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        real, inputs = self.run(func, args, kwargs)
        for tensor in written:  # the shadow itself was written; only where its values come from has to be told
            number = self._ledger.memory(tensor)
            if number is not None and number in self._known:
                self._known[number].inputs |= inputs
        values = [t for t in (real if isinstance(real, tuple | list) else [real]) if isinstance(t, Tensor)]
        for fake, value in zip(made, values, strict=True):
            number = self._ledger.memory(fake)
            if number is not None and number not in self._known:
                self.give(fake, value, inputs)


def _small(tensor: Tensor) -> bool:
    """Whether the whole storage may be followed."""
    elements = tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1)
    return elements <= (FLOATS if tensor.is_floating_point() or tensor.is_complex() else WHOLE)
