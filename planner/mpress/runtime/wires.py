"""Boundary tensors between neighbouring stages, and the all-reduce of tied gradients.

A message is a tuple of tensors.  `Local` joins all stages of one process; `Remote` uses torch.distributed: one process group for
activations and one for gradients, so that the two directions of an edge never wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mpress.runtime.schedule_file import Boundary, Tied
from mpress.runtime.transport import raw


class Message(Protocol):
    """A send or receive under way."""

    def ready(self) -> bool:
        """Whether `wait` would return without another stage of this process having to run first."""

    def wait(self) -> None:
        """Block until the buffers may be read (receive) or reused (send)."""


class Wires(Protocol):
    """What the engine needs of the outside world."""

    def send(self, stage: int, word: str, micro_batch: int, tensors: Sequence[Tensor]) -> Message:
        """Start sending to the next ("F") or previous ("B") stage."""

    def receive(self, stage: int, word: str, micro_batch: int, tensors: Sequence[Tensor]) -> Message:
        """Start receiving into `tensors` from the previous ("F") or next ("B") stage."""

    def reduce(self, stage: int, group: int, gradient: Tensor) -> Message:
        """Sum a tied gradient over the stages of tied group number `group`, in place."""


def buffers(shapes: Sequence[Boundary], device: torch.device) -> tuple[Tensor, ...]:
    """Empty tensors for what is about to arrive."""
    return tuple(torch.empty_strided(b.shape, b.stride, dtype=getattr(torch, b.dtype), device=device) for b in shapes)


def sendable(tensor: Tensor) -> Tensor:
    """The tensor itself when it fills its storage, else a copy that does."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize else tensor.clone()


@dataclass(slots=True)
class _Meeting:
    """A message that is there once all its ends have come."""

    arrived: bool = field(default=False, init=False)

    def ready(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        if not self.arrived:
            raise RuntimeError("a message or a tied gradient was used before all its stages had come")


@dataclass(slots=True)
class _Letter(_Meeting):
    sent: Sequence[Tensor] | None = None
    wanted: Sequence[Tensor] | None = None

    def match(self) -> _Letter:
        if self.sent is not None and self.wanted is not None:
            for source, target in zip(self.sent, self.wanted, strict=True):
                raw(target).copy_(raw(source))
            self.sent = self.wanted = None
            self.arrived = True
        return self


@dataclass(slots=True)
class _Sum(_Meeting):
    size: int
    gradients: list[Tensor] = field(default_factory=list)

    def add(self, gradient: Tensor) -> _Sum:
        self.gradients.append(gradient)
        if len(self.gradients) == self.size:
            total = self.gradients[0]
            for other in self.gradients[1:]:
                total.add_(other)
            for other in self.gradients[1:]:
                other.copy_(total)
            self.gradients = []
            self.arrived = True
        return self


class Local:
    """All stages in one process."""

    def __init__(self, tied: Sequence[Tied]) -> None:
        self._letters: dict[tuple[int, str, int], _Letter] = {}
        self._sums: dict[int, _Sum] = {}
        self._tied = tied

    def _letter(self, sender: int, word: str, micro_batch: int) -> _Letter:
        key = (sender, word, micro_batch)
        letter = self._letters.setdefault(key, _Letter())
        if letter.sent is not None or letter.wanted is not None:
            del self._letters[key]  # the second end has come: the next step starts afresh
        return letter

    def send(self, stage: int, word: str, micro_batch: int, tensors: Sequence[Tensor]) -> Message:
        letter = self._letter(stage, word, micro_batch)
        letter.sent = tensors
        return letter.match()

    def receive(self, stage: int, word: str, micro_batch: int, tensors: Sequence[Tensor]) -> Message:
        letter = self._letter(stage - 1 if word == "F" else stage + 1, word, micro_batch)
        letter.wanted = tensors
        return letter.match()

    def reduce(self, stage: int, group: int, gradient: Tensor) -> Message:
        total = self._sums.setdefault(group, _Sum(len(self._tied[group].copies)))
        total.add(gradient)
        if total.arrived:
            del self._sums[group]
        return total


class _Works:
    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = list(works)

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


class Remote:
    """One stage a process.  Build it on every rank in the same order: it makes process groups."""

    def __init__(self, tied: Sequence[Tied]) -> None:
        self._groups = {"F": dist.new_group(), "B": dist.new_group()}
        self._tied = [dist.new_group(sorted({stage for stage, _ in group.copies})) for group in tied]
        self._tags = dist.get_backend() == "gloo"

    def send(self, stage: int, word: str, micro_batch: int, tensors: Sequence[Tensor]) -> Message:
        return self._start(dist.isend, stage + 1 if word == "F" else stage - 1, word, micro_batch, tensors)

    def receive(self, stage: int, word: str, micro_batch: int, tensors: Sequence[Tensor]) -> Message:
        return self._start(dist.irecv, stage - 1 if word == "F" else stage + 1, word, micro_batch, tensors)

    def _start(self, call: Callable[..., dist.Work | None], peer: int, word: str, micro_batch: int, tensors: Sequence[Tensor]) -> Message:
        """One isend or irecv a tensor."""
        tags = [micro_batch * len(tensors) + i if self._tags else 0 for i in range(len(tensors))]
        works = [call(raw(tensor), peer, self._groups[word], tag) for tensor, tag in zip(tensors, tags, strict=True)]
        return _Works([work for work in works if work is not None])

    def reduce(self, stage: int, group: int, gradient: Tensor) -> Message:
        work = dist.all_reduce(gradient, group=self._tied[group], async_op=True)
        return _Works([] if work is None else [work])
