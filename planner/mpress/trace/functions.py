"""The user's own torch.autograd.Functions while they run: the operators inside one belong together, whatever they compute.

Both directions are heard at places that torch looks up at the moment of the call, so `relu = MyRelu.apply` at import time is heard too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import function as functions

_engine: Any = functions


class Atoms:
    """`name` is the outermost custom Function that runs, "" outside of any."""

    def __init__(self, after_forward: Callable[[], None]) -> None:
        self.name = ""
        self._after_forward = after_forward

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Hear of every custom Function that runs in this block."""
        atoms = self
        below: Any = _engine._SingleLevelFunction
        backward: Any = _engine.BackwardCFunction
        boxed, plain = backward.apply_boxed, backward.apply

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            with atoms._inside(cls):
                parent: Any = super(below, cls)
                result = parent.apply(*args, **kwargs)
                atoms._after_forward()
                return result

        def apply_backward(self: Any, *args: Any) -> Any:
            with atoms._inside(self._forward_cls):
                return plain(self, *args)

        def apply_boxed(self: Any, *args: Any) -> Any:
            with atoms._inside(self._forward_cls):
                return boxed(self, *args)

        below.apply = classmethod(apply)
        backward.apply, backward.apply_boxed = apply_backward, apply_boxed
        try:
            yield
        finally:
            del below.apply
            backward.apply, backward.apply_boxed = plain, boxed

    @contextmanager
    def _inside(self, cls: type) -> Iterator[None]:
        before = self.name
        if not before and not cls.__module__.startswith("torch."):
            self.name = cls.__name__
        try:
            yield
        finally:
            self.name = before
