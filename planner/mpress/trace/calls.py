"""One recorded call, and what the schema and the arguments of an operator say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mpress.graph import Argument, Name, Source

_STATISTICS = frozenset({"aten.native_batch_norm.default", "aten.cudnn_batch_norm.default", "aten.miopen_batch_norm.default"})


@dataclass(slots=True)
class Call:
    """One ATen call; ids are indices into Recorder.ledger.values and Recorder.calls.

    summing: the engine adds up two gradients.  engine: the engine puts a gradient into a parameter, which is no part of the graph.
    """

    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[int, ...]
    multi: bool
    backward: bool
    module: str
    source: Source
    forward: int
    view: bool = False
    mutates: tuple[int, ...] = ()
    random_key: str = ""
    flops: float = 0.0
    bytes_moved: int = 0
    repeats: int = -1
    atom: str = ""
    summing: bool = False
    engine: bool = False


@dataclass(slots=True)
class Traits:
    """What the schema of an operator says, read once per operator."""

    target: str
    writes: tuple[int, ...]
    keyword_writes: tuple[str, ...]
    random: bool


def traits_of(func: Any) -> Traits:
    arguments = func._schema.arguments
    positional = tuple(i for i, a in enumerate(arguments) if not a.kwarg_only and a.alias_info is not None and a.alias_info.is_write)
    keywords = tuple(a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write)
    return Traits(str(func), positional, keywords, torch.Tag.nondeterministic_seeded in func.tags)


def hidden_writes(target: str, args: tuple[Any, ...]) -> list[Any]:
    """Running statistics, which batch normalisation writes in training although its schema does not say so."""
    return list(args[3:5]) if target in _STATISTICS and args[5] else []


def collect(values: Any, found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            collect(value, found)


def _last(value: Any) -> str:
    return str(value).rpartition(".")[2]


CONSTANTS: dict[type, Callable[[Any], Argument]] = {
    torch.dtype: lambda v: Name("dtype", _last(v)),
    torch.layout: lambda v: Name("layout", _last(v)),
    torch.memory_format: lambda v: Name("memory_format", _last(v)),
    torch.device: lambda v: Name("device", v.type),
    complex: lambda v: Name("complex", repr(v)),
}
