"""Everything that can be refused before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mpress.runtime.engine import Stage
from mpress.runtime.parameters import Declared, Held, Row
from mpress.runtime.schedule_file import RunError, ScheduleFile
from mpress.runtime.synthetic import InputRanges


class Program(Protocol):
    """What an emitted module provides.

    DTYPE: of parameters that DTYPES does not name; FROZEN: parameters without gradient; ALIASES: all names of each tied parameter and
    shared buffer, the canonical one first; UNUSED: buffers of the state_dict that no stage needs.
    """

    __file__: str
    GRAPH_SHA256: str
    DTYPE: str
    DTYPES: Mapping[str, str]
    FROZEN: Sequence[str]
    ALIASES: Sequence[tuple[str, ...]]
    INPUTS: InputRanges
    UNUSED: Mapping[str, Row]
    STAGES: Sequence[type[Stage]]


def check_program(program: Program, schedule: ScheduleFile, world: int | None) -> None:
    """The schedule must be of this module, and one process run each stage; raises RunError."""
    if schedule.fingerprint != program.GRAPH_SHA256:
        raise RunError("the schedule was written for another module; run mpress-plan again and keep both of its files together")
    if len(program.STAGES) != len(schedule.stages):
        raise RunError(f"the module has {len(program.STAGES)} stages, the schedule {len(schedule.stages)}; run mpress-plan again")
    if world is not None and world != len(schedule.stages):
        raise RunError(f"{world} processes for {len(schedule.stages)} stages; start torchrun --nproc-per-node {len(schedule.stages)}")


def declared(program: Program, index: int) -> tuple[Declared, ...]:
    """The parameters of a stage in its order, each once however many of its names the stage uses; the first of them comes first."""
    found: dict[str, Declared] = {}
    for name, shape in program.STAGES[index].PARAMS.items():
        tie = next((group for group in program.ALIASES if name in group), (name,))
        names = (name, *(alias for alias in tie if alias != name))
        dtype = getattr(torch, program.DTYPES.get(name, program.DTYPE))
        trainable = not any(alias in program.FROZEN for alias in names)
        found.setdefault(tie[0], Declared(names, tie[0], tuple(shape), dtype, trainable))
    return tuple(found.values())


def held(program: Program, index: int) -> tuple[Held, ...]:
    """The buffers of a stage in its order; see `declared`."""
    return _held(program, program.STAGES[index].BUFFERS)


def unused(program: Program) -> tuple[Held, ...]:
    """Buffers of the state_dict that no stage needs."""
    return _held(program, program.UNUSED)


def _held(program: Program, rows: Mapping[str, Row]) -> tuple[Held, ...]:
    found: dict[str, Held] = {}
    for name, (shape, dtype, make, persistent) in rows.items():
        tie = next((group for group in program.ALIASES if name in group), (name,))
        names = (name, *(alias for alias in tie if alias != name))
        found.setdefault(tie[0], Held(names, tuple(shape), getattr(torch, dtype), make, persistent))
    return tuple(found.values())


def check_buffers(program: Program) -> None:
    """Without a state_dict every buffer must have a first value of its own; raises RunError."""
    lost = [one.names[0] for index in range(len(program.STAGES)) for one in held(program, index) if one.make is None]
    if lost:
        raise RunError(f"the first values of the buffers {_few(lost)} are random or unknown; pass --state-dict with the user's module's")


def check_state_dict(program: Program, state: Mapping[str, Tensor]) -> None:
    """Names and shapes of all stages against a state_dict; raises RunError."""
    every: list[Declared | Held] = [one for index in range(len(program.STAGES)) for one in declared(program, index)]
    every += [one for index in range(len(program.STAGES)) for one in held(program, index) if one.persistent]
    every += unused(program)
    missing = sorted(one.names[0] for one in every if not any(name in state for name in one.names))
    extra = sorted(set(state) - {name for one in every for name in one.names})
    if missing or extra:
        words = [f"lacks {_few(missing)}"] * bool(missing) + [f"has the unknown {_few(extra)}"] * bool(extra)
        raise RunError(f"the state_dict {' and '.join(words)}; save it from the module that was planned, or plan again")
    for one in every:
        for name in one.names:
            if name in state and tuple(state[name].shape) != one.shape:
                raise RunError(f"{name} has the shape {tuple(state[name].shape)} in the state_dict, {one.shape} in the plan; plan again")


def check_batch(program: Program, batch: Mapping[str, Tensor], place: str) -> None:
    """One micro-batch of --data; raises RunError."""
    for name, (shape, dtype, _, _) in program.INPUTS.items():
        if name not in batch:
            raise RunError(f"{place} has no input '{name}'; give a dict of {', '.join(program.INPUTS)}")
        if tuple(batch[name].shape) != tuple(shape) or batch[name].dtype != getattr(torch, dtype):
            found, wanted = _form(batch[name].shape, batch[name].dtype), _form(shape, getattr(torch, dtype))
            raise RunError(f"'{name}' in {place} is {found}, the plan was made for {wanted}; plan again for other shapes")


def _form(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
