"""Counts live bytes per rank: every storage an operator makes, from its allocation to the moment it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Accountant(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, charges new storages to the rank that is `running`.  live, peak: bytes by rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = 0
        self.live = [0] * ranks
        self.peak = [0] * ranks
        self.where = ["start"] * ranks
        self.action = "start"
        self._known: set[int] = set()
        self._paused = False

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never count this storage, which outlives the accountant: a pool is host memory, or charged to its lender by `lend`."""
        self._known.add(tensor.untyped_storage()._cdata)

    def lend(self, rank: int, size: int) -> None:
        """Count a pool that `rank` lends for the whole run."""
        self.live[rank] += size
        self.peak[rank] = max(self.peak[rank], self.live[rank])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is made here (files being read, host memory)."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            if isinstance(result, torch.Tensor):
                self._note(result)
            elif isinstance(result, tuple | list):
                for item in result:
                    if isinstance(item, torch.Tensor):
                        self._note(item)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or storage.nbytes() == 0:
            return
        self._known.add(key)
        rank, size = self.running, storage.nbytes()
        self.live[rank] += size
        if self.live[rank] > self.peak[rank]:
            self.peak[rank], self.where[rank] = self.live[rank], self.action
        weakref.finalize(storage, self._freed, key, rank, size).atexit = False

    def _freed(self, key: int, rank: int, size: int) -> None:
        self._known.discard(key)
        self.live[rank] -= size
