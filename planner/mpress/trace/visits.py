"""Who calls the repeated layers, and with what: notes of a recording, as numbers and names, so that nothing is kept alive by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import nn

from mpress.trace.recorder import Recorder
from mpress.trace.stacks import Stack

Make = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Made:
    """The output `position` of the operator `op`."""

    op: int
    position: int


@dataclass(frozen=True, slots=True)
class Given:
    """A parameter, buffer or input."""

    name: str


@dataclass(frozen=True, slots=True)
class Visit:
    """A call of a layer: its path, the operators it ran ([first, end)), and what went in and came out, with Made and Given for tensors."""

    path: str
    first: int
    end: int
    inputs: Any
    outputs: Any


class Watcher(Protocol):
    """Whoever wants to follow a recording."""

    def begins(self, recorder: Recorder) -> None:
        """The forward is about to begin."""

    def forward_ends(self, recorder: Recorder) -> None:
        """The loss is there."""


class Nobody:
    """Follows nothing."""

    def begins(self, recorder: Recorder) -> None:
        """The forward is about to begin."""

    def forward_ends(self, recorder: Recorder) -> None:
        """The loss is there."""


def layers_of(model: nn.Module, stacks: Sequence[Stack]) -> Iterator[tuple[str, nn.Module]]:
    """All children of the containers of stacks, by path."""
    for container in dict.fromkeys(stack.container for stack in stacks):
        for name, child in model.get_submodule(container)._modules.items():
            if child is not None:
                yield (f"{container}.{name}" if container else name), child


class Visits:
    """Notes the visits of layers while a recording runs.  Tensors are noted by number: nothing is kept alive."""

    def __init__(self, model: nn.Module, stacks: Sequence[Stack]) -> None:
        self._paths = {id(child): path for path, child in layers_of(model, stacks)}
        self._layers = [child for _, child in layers_of(model, stacks)]
        self._open: list[tuple[int, Any]] = []
        self._seen: list[tuple[str, int, int, Any, Any]] = []
        self._recorder: Recorder | None = None
        self.visits: tuple[Visit, ...] = ()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hear of the calls of layers in this block."""
        handles: list[Any] = []
        for layer in self._layers:
            handles.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            handles.append(layer.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begins(self, recorder: Recorder) -> None:
        """The forward is about to begin."""
        self._recorder = recorder

    def forward_ends(self, recorder: Recorder) -> None:
        """Say where every tensor that was noted comes from."""
        self._recorder = None
        made = {value: Made(op, position) for op, call in enumerate(recorder.calls) for position, value in enumerate(call.outputs)}

        def token(number: int) -> Made | Given:
            return made[number] if number in made else Given(recorder.values[number].name)

        self.visits = tuple(
            Visit(path, first, end, mapped(inputs, token), mapped(outputs, token)) for path, first, end, inputs, outputs in self._seen
        )

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if self._recorder is not None:
            self._open.append((len(self._recorder.calls), noted(plain((args, kwargs)), self._recorder)))

    def _leave(self, layer: nn.Module, _arguments: Any, result: Any) -> None:
        if self._recorder is not None:
            first, inputs = self._open.pop()
            if not self._open:
                end = len(self._recorder.calls)
                self._seen.append((self._paths[id(layer)], first, end, inputs, noted(plain(result), self._recorder)))


@dataclass(frozen=True, slots=True)
class Number:
    """A value of a recorder."""

    value: int


def plain(value: Any) -> Any:
    """A structure of tensors and Python values as tuples; the class of what is no tuple is kept."""
    if isinstance(value, torch.Tensor | str | int | float | bool | type(None)):
        return value
    if isinstance(value, tuple | list):
        return (type(value), *[plain(item) for item in value])
    if isinstance(value, dict):
        return (type(value), *[(key, plain(item)) for key, item in value.items()])
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *[(field.name, plain(getattr(value, field.name))) for field in fields(value)])
    return value


def mapped(value: Any, change: Make, kind: type = Number) -> Any:
    """A plain structure with its numbers replaced."""
    if isinstance(value, kind):
        return change(value.value if isinstance(value, Number) else value)
    if isinstance(value, tuple):
        return tuple([mapped(item, change, kind) for item in value])
    return value


def noted(value: Any, recorder: Recorder) -> Any:
    """A plain structure with the numbers of its tensors."""
    return mapped(value, lambda tensor: Number(recorder.find(tensor)), torch.Tensor)
