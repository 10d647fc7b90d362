"""What one micro-batch leaves behind on a stage between its forward and its backward.

c.save(x=x)          keep on this GPU until the backward loads it
c.swap_out(qkv=qkv)  start copying away; the memory is still in use
c.free(behind=1)     copies of cells at least one cell back are done: their memory is free.  c.free(): all copies
c.prefetch(ahead=1)  allocate and start copying back what the next cell and the one before it need
c.load("qkv")        take it out for good; waits for its copy
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from mpress.runtime.schedule_file import Swapped
from mpress.runtime.transport import Transport, Work, raw


@dataclass(slots=True)
class Away:
    """A swapped tensor: `raw` is its storage as bytes while it is allocated here, `work` the copy under way."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    place: Swapped
    raw: Tensor | None
    work: Work | None


class Context:
    """All cells of one stage for one micro-batch.  `inbox` holds boundary tensors, `inputs` the module's own inputs."""

    def __init__(
        self,
        transport: Transport,
        swapped: dict[tuple[str, str], Swapped],
        device: torch.device,
        inputs: dict[str, Tensor],
        seed: int,
        step: int,
        micro_batch: int,
    ) -> None:
        self.device, self.inputs = device, inputs
        self.seed, self.step, self.micro_batch = seed, step, micro_batch
        self.late = 0
        self._transport, self._places = transport, swapped
        self._inbox: tuple[Tensor, ...] = ()
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._away: dict[str, dict[str, Away]] = {}  # by cell, then by name in the order they left
        self._cells: list[str] = []
        self._freed = 0
        self._fetched = 0
        self._pending = 0  # cells whose backward has not begun; counts down once the forward is over
        self._backward = False

    def give(self, tensors: tuple[Tensor, ...], backward: bool) -> None:
        """The engine hands over what arrived from the neighbour and says which way we go."""
        self._inbox = tensors
        if backward:
            self._backward, self._pending = True, len(self._cells)
            self._fetched = self._pending

    def take(self) -> tuple[Tensor, ...]:
        """What arrived from the neighbouring stage; from here on the caller is its only owner."""
        tensors, self._inbox = self._inbox, ()
        return tensors

    def at(self, cell: str) -> Cell:
        """The part of one cell; calling it marks the begin of the cell's forward or backward."""
        if self._backward:
            self._pending -= 1
            if self._cells[self._pending] != cell:
                raise RuntimeError(f"backward of {cell} runs when it is the turn of {self._cells[self._pending]}")
        else:
            self._cells.append(cell)
        return Cell(self, cell)

    def free(self, behind: int = 0) -> None:
        """Wait for the copies of all cells at least `behind` cells before the last one, and drop their memory here."""
        for cell in self._cells[self._freed : max(len(self._cells) - behind, 0)]:
            self._freed += 1
            for away in self._away.get(cell, {}).values():
                if away.work is not None:
                    away.work.wait()
                    away.work = away.raw = None

    def prefetch(self, ahead: int) -> None:
        """Start copying back what the next cell to run backward needs, and the `ahead` cells after it."""
        until = max(self._pending - 1 - ahead, 0)
        while self._fetched > until:
            self._fetched -= 1
            for away in reversed(self._away.get(self._cells[self._fetched], {}).values()):
                self._fetch(away)

    def _fetch(self, away: Away) -> None:
        away.raw = torch.empty(away.place.bytes, dtype=torch.uint8, device=self.device)
        away.work = self._transport.get(away.raw, away.place.stripes, self.micro_batch % away.place.slots)

    def put_away(self, key: tuple[str, str], tensor: Tensor) -> None:
        """See Cell.swap_out."""
        place = self._places[key]
        source = raw(tensor)
        work = self._transport.put(source, place.stripes, self.micro_batch % place.slots)
        self._away.setdefault(key[0], {})[key[1]] = Away(
            tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), place, source, work
        )

    def keep(self, key: tuple[str, str], tensor: Tensor) -> None:
        """See Cell.save."""
        self._kept[key] = tensor

    def take_out(self, key: tuple[str, str]) -> Tensor:
        """See Cell.load."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            return kept
        away = self._away[key[0]].pop(key[1])
        if away.raw is None:  # nobody prefetched it: correct, but the copy cannot hide behind compute
            self.late += 1
            self._fetch(away)
        stored, work = away.raw, away.work
        if stored is None or work is None:
            raise RuntimeError(f"{key[0]} {key[1]} is loaded before its copy out was freed")
        work.wait()
        return torch.empty(0, dtype=away.dtype, device=self.device).set_(stored.untyped_storage(), away.offset, away.shape, away.stride)

    def left(self) -> list[str]:
        """Names of everything still here; empty after a backward."""
        away = [(cell, name) for cell, names in self._away.items() for name in names]
        return [f"{cell} {name}" for cell, name in (*self._kept, *away)]


class Cell:
    """The context as one cell sees it: names need only be unique within the cell."""

    __slots__ = ("_context", "_name")

    def __init__(self, context: Context, name: str) -> None:
        self._context, self._name = context, name

    @property
    def seed(self) -> int:
        return self._context.seed

    @property
    def step(self) -> int:
        return self._context.step

    @property
    def micro_batch(self) -> int:
        return self._context.micro_batch

    @property
    def device(self) -> torch.device:
        return self._context.device

    def input(self, name: str) -> Tensor:
        """One of the module's own inputs."""
        return self._context.inputs[name]

    def save(self, **tensors: Tensor) -> None:
        """Keep tensors on this GPU until the backward loads them."""
        for name, tensor in tensors.items():
            self._context.keep((self._name, name), tensor)

    def swap_out(self, **tensors: Tensor) -> None:
        """Start copying the storages of tensors to their stripes; they stay allocated until the stage frees them."""
        for name, tensor in tensors.items():
            self._context.put_away((self._name, name), tensor)

    @overload
    def load(self, name: str, /) -> Tensor: ...
    @overload
    def load(self, name: str, second: str, /, *more: str) -> tuple[Tensor, ...]: ...
    def load(self, *names: str) -> Tensor | tuple[Tensor, ...]:
        """Take tensors out of the context, waiting for their copies; one tensor for one name."""
        if len(names) == 1:
            return self._context.take_out((self._name, names[0]))
        return tuple(self._context.take_out((self._name, name)) for name in names)
