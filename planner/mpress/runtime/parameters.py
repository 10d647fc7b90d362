"""Weights, gradient buffers, optimizer and the model's own buffers of one stage, under the user's own names.

Everything is allocated before the first step: weight, gradient, optimizer state, and with a 16-bit precision an fp32 master copy.  The
optimizer steps one parameter at a time, so its only temporary is the fp32 copy of one 16-bit gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Shape = tuple[int, ...]
Entry = TypeVar("Entry")
Row = tuple[Shape, str, Callable[[], Tensor] | None, bool]
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")


@dataclass(frozen=True, slots=True)
class Knobs:
    """Hyperparameters of the optimizer, torch's own defaults."""

    name: str
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    momentum: float = 0.9


@dataclass(frozen=True, slots=True)
class Declared:
    """A parameter a stage needs.  names: the one used in the stage first, then its aliases; canonical: the first name of a tie."""

    names: tuple[str, ...]
    canonical: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer a stage needs.  names: as of a parameter; make: makes its first value, None where only a state_dict has it;
    persistent: the state_dict has it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor] | None
    persistent: bool


def layers(template: str, numbers: Iterable[int], entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Shapes or rows of equal layers by name: layers("h.{}.", range(2), {"w": (4,)}) holds "h.0.w" and "h.1.w"."""
    return {template.format(number) + name: entry for number in numbers for name, entry in entries.items()}


class Parameters:
    """`p["h.3.mlp.c_fc.weight"]`, or `p.at("h.3")["mlp.c_fc.weight"]` for names relative to a module; `p.grad` likewise."""

    def __init__(self, declared: Iterable[Declared], device: torch.device, knobs: Knobs, held: Iterable[Held] = ()) -> None:
        self._weights: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._optimized: list[tuple[Tensor, Tensor, Tensor, torch.optim.Optimizer]] = []
        self.declared, self.held = tuple(declared), tuple(held)
        for one in self.declared:
            weight = torch.empty(one.shape, dtype=one.dtype, device=device)
            for name in one.names:
                self._weights[name] = weight
            if one.trainable:
                gradient = torch.zeros_like(weight)
                for name in one.names:
                    self._gradients[name] = gradient
                self._optimized.append(_optimized(weight, gradient, knobs))
        self._buffers: dict[str, Tensor] = {}
        for each in self.held:
            buffer = torch.empty(each.shape, dtype=each.dtype, device=device)
            for name in each.names:
                self._buffers[name] = buffer
        self._values = self._weights | self._buffers

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def key(self, draw: str) -> str:
        """The absolute key of a random draw."""
        return draw

    @property
    def grad(self) -> Gradients:
        """Gradient buffers: `p.grad[name] += value` adds in place."""
        return Gradients(self._gradients, "")

    def at(self, module: str) -> View:
        """The same with names relative to `module`; names found nowhere below it are absolute."""
        return View(self._values, self._gradients, module + ".")

    def start(self, first: Callable[[Held], Tensor]) -> None:
        """`first(held)` is the first value of each buffer."""
        for each in self.held:
            self._buffers[each.names[0]].copy_(first(each))

    def fill(self, read: Callable[[Declared, Tensor], None]) -> None:
        """`read(declared, weight)` writes each weight; masters follow."""
        for one in self.declared:
            read(one, self._weights[one.names[0]])
        for weight, _, master, _ in self._optimized:
            if master is not weight:
                master.copy_(weight)

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradient buffers by every name."""
        return self._gradients

    def weights(self) -> Mapping[str, Tensor]:
        """Weights by every name."""
        return self._weights

    def buffers(self) -> Mapping[str, Tensor]:
        """The model's buffers by every name."""
        return self._buffers

    def state(self) -> dict[str, Tensor]:
        """What a state_dict holds of this stage, by every name."""
        return self._weights | {name: self._buffers[name] for each in self.held if each.persistent for name in each.names}

    def step(self) -> None:
        """One optimizer step, then zero gradients."""
        for weight, gradient, master, optimizer in self._optimized:
            master.grad = gradient if gradient.dtype == master.dtype else gradient.to(master.dtype)
            optimizer.step()
            master.grad = None
            if master is not weight:
                weight.copy_(master)
            gradient.zero_()


def _optimized(weight: Tensor, gradient: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor, Tensor, torch.optim.Optimizer]:
    """The master copy and an optimizer of its own for one parameter, its state made up front."""
    if weight.is_complex():  # the optimizer steps its real numbers, in place
        weight, gradient = torch.view_as_real(weight), torch.view_as_real(gradient)
    master = weight if weight.dtype in (torch.float32, torch.float64) else torch.zeros_like(weight, dtype=torch.float32)
    optimizer: torch.optim.Optimizer
    if knobs.name == "adamw":
        optimizer = torch.optim.AdamW([master], lr=knobs.learning_rate, weight_decay=knobs.weight_decay, fused=True)
        optimizer.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
        }
    elif knobs.name in OPTIMIZERS:
        momentum = knobs.momentum if knobs.name == "sgd-momentum" else 0.0
        optimizer = torch.optim.SGD([master], lr=knobs.learning_rate, weight_decay=knobs.weight_decay, momentum=momentum, fused=True)
        if momentum:
            optimizer.state[master] = {"momentum_buffer": torch.zeros_like(master)}
    else:
        raise ValueError(f"unknown optimizer {knobs.name}")
    return weight, gradient, master, optimizer


class View:
    """Parameters and buffers below one module."""

    __slots__ = ("_gradients", "_prefix", "_values")

    def __init__(self, values: dict[str, Tensor], gradients: dict[str, Tensor], prefix: str) -> None:
        self._values, self._gradients, self._prefix = values, gradients, prefix

    def __getitem__(self, name: str) -> Tensor:
        value = self._values.get(self._prefix + name)
        return self._values[name] if value is None else value

    def key(self, draw: str) -> str:
        """ "drop#0" below "h.3" is "h.3.drop#0", and its own draw "#0" is "h.3#0"."""
        return self._prefix[:-1] + draw if draw.startswith("#") else self._prefix + draw

    @property
    def grad(self) -> Gradients:
        """Gradient buffers below the module."""
        return Gradients(self._gradients, self._prefix)


class Gradients:
    """Buffers that `+=` adds to in place."""

    __slots__ = ("_buffers", "_prefix")

    def __init__(self, buffers: dict[str, Tensor], prefix: str) -> None:
        self._buffers, self._prefix = buffers, prefix

    def __getitem__(self, name: str) -> Tensor:
        buffer = self._buffers.get(self._prefix + name)
        return self._buffers[name] if buffer is None else buffer

    def __setitem__(self, name: str, value: Tensor) -> None:
        if value is not self[name]:
            raise TypeError(f"the gradient of {self._prefix}{name} is a fixed buffer: add to it with +=")
