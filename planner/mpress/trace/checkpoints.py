"""Regions the user recomputes with torch.utils.checkpoint: what the backward runs again is recognised as what the forward ran.

Both kinds of checkpoint are heard where torch looks them up at the moment of the call, so any way of importing `checkpoint` is heard, and
libraries that call it too.  A call that is repeated has the target and, value by value, the arguments of its original.  Early stop
repeats the beginning of a region only; a region inside a region is repeated with it and again on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import checkpoint as torch_checkpoint

from mpress.graph import Argument, Ref

_torch: Any = torch_checkpoint
Arguments = tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]


class Recorded(Protocol):
    """What this module reads of a recorded call."""

    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[int, ...]
    random_key: str


@dataclass(slots=True)
class _Region:
    """The forward calls start..end - 1."""

    start: int
    end: int = -1


@dataclass(slots=True)
class _Rerun:
    """A region while the backward runs it: the forward call expected next, and where the region ends."""

    expected: int
    end: int


class Checkpoints:
    """Regions of one step.  `count` regions were entered in the forward."""

    def __init__(self, calls: Sequence[Recorded]) -> None:
        self.count = 0
        self._calls = calls
        self._forward = -1  # number of forward calls, once the backward has begun
        self._running: list[_Rerun] = []
        self._twins: dict[int, int] = {}  # value made by a repetition -> the value it repeats
        self._index: dict[tuple[str, Arguments], int] = {}

    @property
    def repeating(self) -> bool:
        """Whether a region runs again right now."""
        return bool(self._running)

    def start_backward(self) -> None:
        """The forward is complete: regions that run from now on are repetitions."""
        self._forward = len(self._calls)

    def original(self, target: str, args: tuple[Argument, ...], kwargs: tuple[tuple[str, Argument], ...]) -> int:
        """The forward call that this one repeats, -1 if the forward made no such call."""
        wanted = (self._twin(args), tuple([(key, self._twin(value)) for key, value in kwargs]))
        rerun = self._running[-1]
        for number in range(rerun.expected, rerun.end):
            call = self._calls[number]
            if call.target == target and (call.args, call.kwargs) == wanted:
                rerun.expected = number + 1
                return number
        if not self._index:  # such as a cast that autocast cached before the region
            self._index = {(c.target, (c.args, c.kwargs)): n for n, c in enumerate(self._calls[: self._forward])}
        return self._index.get((target, wanted), -1)

    def pair(self, outputs: tuple[int, ...], original: int) -> None:
        """These values repeat those of a forward call."""
        for mine, first in zip(outputs, self._calls[original].outputs, strict=True):
            if mine >= 0 and first >= 0:
                self._twins[mine] = self._twins.get(first, first)

    def _twin(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return Ref(self._twins.get(argument.tensor, argument.tensor))
        if isinstance(argument, tuple):
            return tuple([self._twin(item) for item in argument])
        return argument

    def _here(self) -> int:
        """The forward call that comes next, also while one is repeated."""
        return self._running[-1].expected if self._running else len(self._calls)

    def _begin(self, counts: bool) -> _Region:
        if self._forward < 0 and counts:
            self.count += 1
        return _Region(self._here())

    @contextmanager
    def _again(self, region: _Region) -> Iterator[None]:
        self._running.append(_Rerun(region.start, region.end))
        try:
            yield
        finally:
            self._running.pop()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Hear of every checkpoint that begins or is repeated in this block."""
        generator, reentrant = _torch._checkpoint_without_reentrant_generator, _torch.CheckpointFunction
        forward: Callable[..., Any] = reentrant.__dict__["forward"].__func__

        def heard_generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
            region = self._begin(torch.is_grad_enabled())

            def rerun(*inputs: Any, **named: Any) -> Any:
                with self._again(region):
                    return fn(*inputs, **named)

            try:
                yield from generator(rerun, *args, **kwargs)
            finally:
                region.end = self._here()

        def heard_forward(ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            region = self._begin(any(ctx.needs_input_grad))

            def run(*inputs: Any) -> Any:
                if region.end < 0:
                    try:
                        return run_function(*inputs)
                    finally:
                        region.end = self._here()
                with self._again(region):
                    return run_function(*inputs)

            return forward(ctx, run, preserve_rng_state, *args)

        _torch._checkpoint_without_reentrant_generator = heard_generator
        reentrant.forward = staticmethod(heard_forward)
        try:
            yield
        finally:
            _torch._checkpoint_without_reentrant_generator = generator
            reentrant.forward = staticmethod(forward)
