"""One training step of the user's module really run on CPU and observed: its operators with a digest of every result, what autograd
saves, the bytes that live after each operator.

Nothing observed is kept alive: results are digested at once, storages are followed by weak references.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import graph as autograd_graph
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpress.graph import Source
from mpress.trace.source import NOWHERE, current_source, entry

_ACCUMULATE = 2**64 - 1  # the sequence number of AccumulateGrad nodes
_UNWRITTEN = ("aten.empty", "aten.new_empty")  # operators whose results hold what nobody wrote
# the CPU's kernels work in more memory than the result takes and leave it in the result's storage; fake tensors and GPUs do not
_ROOMY = ("aten._embedding_bag.default", "aten.col2im.default")
_LIFTS = ("aten.lift_fresh.default", "aten.lift_fresh_copy.default")
_LITERAL = _LIFTS[0]  # what a tensor from before the step is listed as: a graph makes it there from Python values
_ENGINE_CODE = autograd_graph._engine_run_backward.__code__
_NOTHING = ("aten.detach.default", "aten._local_scalar_dense.default")  # the same value again; a number for Python
_engine: Any = torch.autograd  # private functions, absent from torch's stubs
Digests = tuple[bytes, ...]
Maker = tuple[int, int]  # a storage: the call that made it, and which of that call's storages it is
_Key = tuple[Any, ...]  # a result: its storage and its layout


@dataclass(slots=True)
class Ran:
    """One call.  live: bytes of the step's own storages after it.

    digests: of its results, in order, b"" for what is no tensor, or lies in memory that was made without being filled.
    """

    target: str
    digests: Digests
    backward: bool
    module: str
    source: Source
    live: int
    counted: bool = True  # False: the engine's own bookkeeping, which a graph leaves out


@dataclass(slots=True)
class Observed:
    """A whole step.  ran: the calls a graph lists too; peak: most live bytes after any call.

    saved: bytes of each storage autograd saves, by its maker (the call's place in `ran`); held: likewise, of all that lives when the
    backward begins.  python_draw: the call before which the forward had drawn from Python's own generator, None if it never did.
    """

    loss: torch.Tensor
    ran: list[Ran]
    peak: int
    saved: dict[Maker, int]
    held: dict[Maker, int]
    python_draw: Ran | None


@dataclass(slots=True)
class _Memory:
    bytes: int
    maker: Maker
    backward: bool
    unwritten: bool  # nobody has filled it when it is made
    slack: int = 0  # bytes of the storage that are not counted


class _Held:
    """What the pack hook leaves with autograd; alive as long as autograd keeps it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def observe(model: nn.Module, seed: int, known: list[torch.Tensor], step: Callable[[], torch.Tensor]) -> Observed:
    """Run `step` (forward and loss) and its backward.  known: state and inputs, whose memory is there before."""
    watch = _Watch(model, {tensor.untyped_storage()._cdata for tensor in known})
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
    handles = [parameter.register_hook(watch.arrive) for parameter in trained]
    try:
        with (
            torch.random.fork_rng(devices=[]),
            _paths(watch),
            torch.autograd.set_multithreading_enabled(False),
            torch.enable_grad(),
            watch,
            torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda held: held.tensor),
        ):
            torch.manual_seed(seed)
            loss = _forward(step)
            saved, held = watch.saved(loss), watch.held(loss)
            with torch.no_grad(), watch.unlisted():
                gradient = torch.ones_like(loss)
            watch.start_backward()
            torch.autograd.backward(loss, gradient)
    finally:
        for handle in handles:
            handle.remove()
    return watch.observed(loss.detach(), saved, held)


def _forward(step: Callable[[], torch.Tensor]) -> torch.Tensor:
    return step()


entry(_forward.__code__)


def ran_at(ran: Ran) -> str:
    """ "gpt.py:22, module 'h.0.attn'" of a call, as far as it is known."""
    words = (ran.source.place(), f"module '{ran.module}'" if ran.module else "")
    return ", ".join(word for word in words if word) or "the step's own code"


def digest(tensor: torch.Tensor) -> bytes:
    """A digest of a tensor's values, bit by bit, whatever its layout."""
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    size = plain.numel() * plain.element_size()
    content = (ctypes.c_char * size).from_address(plain.data_ptr()) if size else b""
    return hashlib.blake2b(content, digest_size=12).digest()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base class untyped
    """Lists the calls of a step."""

    def __init__(self, model: nn.Module, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths = {module: name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self._stack = [""]
        self._known = known
        self._memories: dict[int, _Memory] = {}
        self._bytes = 0
        self._peak = 0
        self._ran: list[Ran] = []
        self._owners: dict[int, int] = {}
        self._next_sequence = _engine._get_sequence_nr()
        self._backward = False
        self._unlisted = False
        self._packed: list[tuple[weakref.ref[_Held], Maker, int]] = []
        self._sums: dict[_Key, tuple[int, list[_Key]]] = {}
        self._uses: Counter[_Key] = Counter()
        self._arrived: list[_Key] = []
        self._python_state = random.getstate()
        self._python_draw: Ran | None = None

    # -- what was seen -----------------------------------------------------------------------------------------------------------

    def observed(self, loss: torch.Tensor, saved: dict[Maker, int], held: dict[Maker, int]) -> Observed:
        """Everything, once the step is over."""
        for key in self._arrived:
            self._leave_out(key)
        places: dict[int, int] = {}
        for number, item in enumerate(self._ran):
            if item.counted:
                places[number] = len(places)
        ran = [item for item in self._ran if item.counted]
        numbered = [{(places[number], nth): size for (number, nth), size in found.items()} for found in (saved, held)]
        return Observed(loss, ran, self._peak, numbered[0], numbered[1], self._python_draw)

    def _leave_out(self, key: _Key) -> None:
        """Take a parameter's gradient apart as a graph does: sums that nothing else reads are the engine's bookkeeping."""
        found = self._sums.get(key)
        if found is None or self._uses[key] != 1:
            return
        number, operands = found
        self._ran[number].counted = False
        for operand in operands:
            self._leave_out(operand)

    def saved(self, loss: torch.Tensor) -> dict[Maker, int]:
        """Bytes autograd holds now, by the call that made them; not the loss's."""
        apart = self._maker(loss)
        return {maker: size for held, maker, size in self._packed if held() is not None and maker != apart}

    def held(self, loss: torch.Tensor) -> dict[Maker, int]:
        """Bytes that live now, by the call that made them; not the loss's."""
        apart = self._maker(loss)
        return {memory.maker: memory.bytes for memory in self._memories.values() if memory.maker != apart}

    # -- hooks -------------------------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> _Held:
        """Autograd saves a tensor."""
        held = _Held(tensor.detach())  # a result still knows its node, and the node would keep it for ever
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        if memory is not None and not self._backward:
            self._packed.append((weakref.ref(held), memory.maker, memory.bytes))
        return held

    def arrive(self, gradient: torch.Tensor) -> None:
        """A parameter's gradient is complete."""
        key = self._key(gradient)
        self._uses[key] += 1
        self._arrived.append(key)

    def enter(self, module: nn.Module, _arguments: Any) -> None:
        self._stack.append(self._paths.get(module, self._stack[-1]))

    def leave(self, _module: nn.Module, _arguments: Any, _result: Any) -> None:
        self._stack.pop()

    @contextmanager
    def unlisted(self) -> Iterator[None]:
        """What is called inside is followed, but not listed."""
        self._unlisted = True
        try:
            yield
        finally:
            self._unlisted = False

    def start_backward(self) -> None:
        self._note_nodes(len(self._ran) - 1)
        self._backward = True

    # -- calls -------------------------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # wrapping this mode would import and call torch._dynamo, which is never used here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        target = str(func)
        if target not in _LIFTS:  # their operand is what Python has just made
            self._meet(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        number = len(self._ran)
        node = torch._C._current_autograd_node() if self._backward else None
        sequence = node._sequence_nr() if node is not None else -1
        direct = sys._getframe(1).f_code is _ENGINE_CODE  # not from a hook of the user's
        counted = target not in _NOTHING and not (sequence == _ACCUMULATE and direct)
        operands = [self._key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)] if self._backward else []
        adding = direct and self._adding(target, args, kwargs)
        if counted:
            self._uses.update(operands)
        if not self._backward:
            self._note_nodes(number)
        result = func(*args, **kwargs)
        items = result if isinstance(result, tuple | list) else (result,)
        made = 0
        for item in items:
            if isinstance(item, torch.Tensor):
                made += self._follow(item, (number, made), target.startswith(_UNWRITTEN), target in _ROOMY)
        self._peak = max(self._peak, self._bytes)
        if self._unlisted:
            return result
        module, source = self._stack[-1], NOWHERE
        if self._backward:
            owner = self._owners.get(sequence, -1)
            if owner >= 0:
                module, source = self._ran[owner].module, self._ran[owner].source
        else:
            source = current_source()
        digests = tuple(digest(item) if counted and isinstance(item, torch.Tensor) and self._written(item) else b"" for item in items)
        if adding:
            self._sums[self._key(result)] = (number, operands)
        self._ran.append(Ran(target, digests, self._backward, module, source, self._bytes, counted))
        if self._python_draw is None and not self._backward and random.getstate() != self._python_state:
            self._python_draw = self._ran[-1]
        return result

    def _meet(self, operands: Iterable[torch.Tensor]) -> None:
        """Tensors that were there before the step and are neither state nor inputs; their memory is not the step's."""
        for tensor in operands:
            address = tensor.untyped_storage()._cdata
            if self._unlisted or address in self._known or address in self._memories:
                continue
            self._memories[address] = _Memory(tensor.untyped_storage().nbytes(), (len(self._ran), 0), self._backward, False)
            weakref.finalize(tensor.untyped_storage(), self._memories.pop, address)
            self._ran.append(Ran(_LITERAL, (digest(tensor),), self._backward, self._stack[-1], current_source(), self._bytes))

    def _note_nodes(self, call: int) -> None:
        """The autograd nodes made since the last call belong to this one."""
        now = _engine._get_sequence_nr()
        for sequence in range(self._next_sequence, now):
            self._owners[sequence] = call
        self._next_sequence = now

    def _key(self, tensor: torch.Tensor) -> _Key:
        return (self._maker(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)

    def _maker(self, tensor: torch.Tensor) -> Maker:
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        return memory.maker if memory is not None else (-1, tensor.untyped_storage()._cdata)

    def _adding(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A plain sum of two results of the backward."""
        if not self._backward or torch.is_grad_enabled() or target != "aten.add.Tensor" or len(args) != 2 or kwargs:
            return False
        made = [self._memories.get(a.untyped_storage()._cdata) for a in args if isinstance(a, torch.Tensor)]
        return len(made) == 2 and all(memory is not None and memory.backward for memory in made)

    def _written(self, tensor: torch.Tensor) -> bool:
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        return memory is None or not memory.unwritten

    def _follow(self, tensor: torch.Tensor, maker: Maker, unwritten: bool, roomy: bool) -> bool:
        """Count the memory of a result; whether it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return False
        memory = self._memories.get(address)
        if memory is None:
            seed = self._unlisted  # made between the forward and the backward
            slack = storage.nbytes() - tensor.numel() * tensor.element_size() if roomy else 0
            size = storage.nbytes() - slack
            self._memories[address] = _Memory(size, (-2, 0) if seed else maker, self._backward or seed, unwritten, slack)
            self._bytes += size
            weakref.finalize(storage, self._freed, address)
            return True
        size = storage.nbytes() - memory.slack
        self._bytes += size - memory.bytes  # resized
        memory.bytes = size
        return False

    def _freed(self, address: int) -> None:
        self._bytes -= self._memories.pop(address).bytes


@contextmanager
def _paths(watch: _Watch) -> Iterator[None]:
    handles = [
        module_hooks.register_module_forward_pre_hook(watch.enter),
        module_hooks.register_module_forward_hook(watch.leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
