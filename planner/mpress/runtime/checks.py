"""Everything that can be refused before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mpress.runtime.engine import Stage
from mpress.runtime.parameters import Declared
from mpress.runtime.schedule_file import RunError, ScheduleFile
from mpress.runtime.synthetic import InputRanges


class Program(Protocol):
    """What an emitted module provides.

    ALIASES: every name of each tied parameter; FROZEN: names without gradient; BUFFERS: names of buffers (also in PARAMS of their stage);
    DTYPES: names whose dtype is not DTYPE.
    """

    __file__: str
    GRAPH_SHA256: str
    DTYPE: str
    DTYPES: Mapping[str, str]
    INPUTS: InputRanges
    ALIASES: Sequence[tuple[str, ...]]
    FROZEN: Sequence[str]
    STAGES: Sequence[type[Stage]]


def check_program(program: Program, schedule: ScheduleFile, world: int | None) -> None:
    """The schedule must be of this module, and one process run each stage; raises RunError."""
    if program.GRAPH_SHA256 != schedule.fingerprint:
        raise RunError("the schedule was written for another module; run mpress-plan again and keep both of its files together")
    if len(program.STAGES) != len(schedule.stages):
        raise RunError(f"the module has {len(program.STAGES)} stages, the schedule {len(schedule.stages)}; run mpress-plan again")
    if world is not None and world != len(schedule.stages):
        raise RunError(f"{world} processes for {len(schedule.stages)} stages; start torchrun --nproc-per-node {len(schedule.stages)}")


def declared(program: Program, stage: type[Stage]) -> tuple[Declared, ...]:
    """The parameters and buffers of a stage, in its order."""
    result = []
    for name, shape in stage.PARAMS.items():
        names = (name, *(alias for group in program.ALIASES if name in group for alias in group if alias != name))
        dtype = getattr(torch, program.DTYPES.get(name, program.DTYPE))
        result.append(Declared(names, tuple(shape), dtype, trainable=name not in program.FROZEN))
    return tuple(result)


def check_state_dict(program: Program, state: Mapping[str, Tensor]) -> None:
    """Names and shapes of all stages against a state_dict; raises RunError."""
    every = [one for stage in program.STAGES for one in declared(program, stage)]
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
            found = f"{tuple(batch[name].shape)} {str(batch[name].dtype).removeprefix('torch.')}"
            raise RunError(f"'{name}' in {place} is {found}, the plan was made for {tuple(shape)} {dtype}; plan again for other shapes")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
