"""The tensors and storages of a step and how long each storage lives.  Nothing here keeps a tensor alive.

A value is a layout (shape, stride, offset, dtype) on a storage; several Python objects may stand for one value (`detach`).  Objects and
storages are followed by weak references, so a storage dies here exactly when the user's step lets it go, and keys of dead ones are
dropped at once: `id` and the address of a storage are given away again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from mpress.graph import Kind

Tensor = torch.Tensor
_engine: Any = torch.autograd  # private functions, absent from torch's stubs


@dataclass(slots=True)
class Value:
    """A tensor as first seen.  call: the call that made it, -1 if none; backward: made in the backward."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    name: str
    backward: bool
    call: int
    differentiable: bool = False


@dataclass(slots=True)
class Memory:
    """A storage.  born, dies: calls (-1: before the step, or after it).  packed: autograd still holds it when the backward begins."""

    bytes: int
    kind: Kind
    born: int
    dies: int = -1
    packed: bool = False


def _nobody(_memory: int) -> None:
    return None


class Packed:
    """What the recorder leaves with autograd in place of a saved tensor: alive as long as autograd keeps it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Follow(weakref.ref[Any]):
    """A weak reference that knows the key it is filed under, and the number (of a value or a memory) it stands for."""

    __slots__ = ("key", "number")
    key: int
    number: int


def _may_be_result(tensor: Tensor) -> bool:
    """Whether autograd may be saving a result of the node it has just made: it knows the node, and would hold it for ever."""
    node: Any = tensor.grad_fn
    return node is not None and (isinstance(node, BackwardCFunction) or node._sequence_nr() >= _engine._get_sequence_nr() - 1)


class Ledger:
    """Values and memories by number.  `last` is the call that ended last; the recorder moves it."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.memories: list[Memory] = []
        self.last = -1
        self._objects: dict[int, _Follow] = {}
        self._storages: dict[int, _Follow] = {}
        self._layouts: dict[tuple[Any, ...], int] = {}
        self._packed: list[weakref.ref[Packed]] = []
        self._fresh: list[_Follow] = []
        self._open = True
        self.on_death: Callable[[int], Any] = _nobody  # hears of every memory that dies

    # -- identity ----------------------------------------------------------------------------------------------------------------

    def memory(self, tensor: Tensor) -> int | None:
        """The memory a tensor lies in, None if it was never seen."""
        follow = self._storages.get(tensor.untyped_storage()._cdata)
        return None if follow is None else follow.number

    def add(self, tensor: Tensor, kind: Kind, name: str = "", *, born: int = -1, backward: bool = False) -> int:
        """A new value; its storage too, if it was not seen before."""
        owner = self.memory(tensor)
        if owner is None:
            storage = tensor.untyped_storage()
            owner = len(self.memories)
            self.memories.append(Memory(storage.nbytes(), kind, born))
            follow = _Follow(storage, self._storage_died)
            follow.key, follow.number = storage._cdata, owner
            self._storages[follow.key] = follow
        number = len(self.values)
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        self.values.append(Value(owner, shape, stride, offset, str(tensor.dtype).rpartition(".")[2], name, backward, born))
        self._layouts[(owner, shape, stride, offset, tensor.dtype)] = number
        self._fresh.append(self.stands_for(tensor, number))
        return number

    def stands_for(self, tensor: Tensor, number: int) -> _Follow:
        """From now on this Python object means this value."""
        key = id(tensor)
        follow = self._objects.get(key)
        if follow is None:
            follow = self._objects[key] = _Follow(tensor, self._object_died)
            follow.key = key
        follow.number = number
        return follow

    def same_storage(self, other: Tensor, tensor: Tensor) -> None:
        """The storage of `other`, which is alive, is another body of that of `tensor`."""
        owner, storage = self.memory(tensor), other.untyped_storage()
        assert owner is not None
        follow = _Follow(storage, self._other_body_died)
        follow.key, follow.number = storage._cdata, owner
        self._storages[follow.key] = follow

    def find(self, tensor: Tensor) -> int | None:
        """The value of a tensor object; an object never seen means the value of the same layout on the same storage."""
        follow = self._objects.get(id(tensor))
        if follow is not None:
            return follow.number
        owner = self.memory(tensor)
        if owner is None:
            return None
        number = self._layouts.get((owner, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype))
        if number is not None:
            self.stands_for(tensor, number)
        return number

    # -- life --------------------------------------------------------------------------------------------------------------------

    def _object_died(self, follow: _Follow) -> None:
        if self._objects.get(follow.key) is follow:
            del self._objects[follow.key]

    def _other_body_died(self, follow: _Follow) -> None:
        if self._storages.get(follow.key) is follow:
            del self._storages[follow.key]

    def _storage_died(self, follow: _Follow) -> None:
        if self._storages.get(follow.key) is follow:
            del self._storages[follow.key]
        if self._open:
            self.memories[follow.number].dies = self.last
            self.on_death(follow.number)

    def note_differentiable(self) -> None:
        """Ask the results of the last call whether they need a gradient: autograd tells only after the call."""
        for follow in self._fresh:
            tensor = follow()
            if tensor is not None and tensor.requires_grad:
                self.values[follow.number].differentiable = True
        self._fresh.clear()

    def pack(self, tensor: Tensor) -> Packed:
        """Autograd saves a tensor of the forward."""
        packed = Packed(tensor.detach() if _may_be_result(tensor) else tensor)
        self._packed.append(weakref.ref(packed))
        return packed

    def end_forward(self) -> None:
        """Settle what is saved and what is differentiable."""
        self._fresh = list(self._objects.values())
        self.note_differentiable()
        for reference in self._packed:
            packed = reference()
            owner = None if packed is None else self.memory(packed.tensor)
            if owner is not None:
                self.memories[owner].packed = True
        self._packed.clear()

    def close(self) -> None:
        """The step is over: what dies from now on outlives it."""
        self._open = False
