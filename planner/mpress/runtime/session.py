"""Sets ranks up, runs steps, and collects what happened; one process for all stages or one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mpress.runtime.account import Accountant
from mpress.runtime.checks import Program, check_batch, declared, held
from mpress.runtime.engine import Rank, run_together
from mpress.runtime.parameters import Declared, Held, Knobs, Parameters
from mpress.runtime.pools import local_pools, shared_pools
from mpress.runtime.schedule_file import RunError, ScheduleFile
from mpress.runtime.synthetic import example_batch, random_weight
from mpress.runtime.transport import Transport
from mpress.runtime.wires import Local, Remote, Wires

Data = Sequence[Sequence[Mapping[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Settings:
    """state_dict, data: from files, made up when None.  keep_gradients: collect the gradients of every step (for tests)."""

    steps: int
    seed: int
    knobs: Knobs
    state_dict: Mapping[str, Tensor] | None = None
    data: Data | None = None
    account: bool = False
    keep_gradients: bool = False
    on_step: Callable[[int, float], None] | None = None


@dataclass(slots=True)
class Outcome:
    """losses: mean of each step, where the last stage is; gradients: by step and name; peak: measured bytes by rank, if accounted;
    moved: bytes copied by (rank, pool, direction); late: loads that were not prefetched; weights: what a state_dict holds of the stages
    here; buffers: all of them, by every name."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    peak: dict[int, int] = field(default_factory=dict)
    peak_action: dict[int, str] = field(default_factory=dict)
    moved: dict[tuple[int, int, str], int] = field(default_factory=dict)
    late: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def run_virtual(program: Program, schedule: ScheduleFile, settings: Settings) -> Outcome:
    """All stages in this process, on CPU."""
    count = len(schedule.stages)
    devices = [torch.device("cpu")] * count
    return _run(program, schedule, settings, range(count), devices, Local(schedule.tied), local_pools(schedule, devices))


def run_remote(program: Program, schedule: ScheduleFile, settings: Settings, rank: int, device: torch.device) -> Outcome:
    """The stage of this process; torch.distributed is up."""
    pools, keep = shared_pools(schedule, rank, device)
    devices = [device] * len(schedule.stages)
    every: list[dict[int, Tensor]] = [{} for _ in schedule.stages]
    every[rank] = pools
    outcome = _run(program, schedule, settings, (rank,), devices, Remote(schedule.tied), every)
    del every, pools
    dist.barrier()  # nobody maps our pool any more
    del keep
    return outcome


def _run(
    program: Program,
    schedule: ScheduleFile,
    settings: Settings,
    indices: Sequence[int],
    devices: list[torch.device],
    wires: Wires,
    pools: list[dict[int, Tensor]],
) -> Outcome:
    outcome = Outcome()
    accountant = Accountant(len(schedule.stages)) if settings.account else None
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if accountant is not None:
            stack.enter_context(accountant)
        ranks = []
        for index in indices:
            if accountant is not None:
                accountant.running = index
                accountant.lend(index, schedule.pools[index])
                for pool in pools[index].values():
                    accountant.ignore(pool)
            transport = Transport(pools[index], devices[index])
            stack.callback(transport.close)
            parameters = _parameters(program, schedule, settings, index, devices[index], accountant)
            ranks.append(
                Rank(index, program.STAGES[index], schedule, parameters, transport, wires, devices[index], settings.seed, accountant)
            )
        for step in range(settings.steps):
            _step(program, schedule, settings, ranks, step, accountant, outcome)
        for rank in ranks:
            outcome.late += rank.late
            outcome.moved |= {(rank.index, pool, way): size for (pool, way), size in rank.transport.moved.items()}
            outcome.weights |= rank.parameters.state()
            outcome.buffers |= dict(rank.parameters.buffers())
            if accountant is not None:
                outcome.peak[rank.index] = accountant.peak[rank.index]
                outcome.peak_action[rank.index] = accountant.where[rank.index]
        pools.clear()
    return outcome


def _parameters(
    program: Program, schedule: ScheduleFile, settings: Settings, index: int, device: torch.device, accountant: Accountant | None
) -> Parameters:
    knobs = replace(settings.knobs, name=schedule.optimizer)
    parameters = Parameters(declared(program, index), device, knobs, held(program, index))

    def read(one: Declared, weight: Tensor) -> None:
        if settings.state_dict is None:
            random_weight(one.canonical, weight, settings.seed)
        else:
            weight.copy_(settings.state_dict[next(name for name in one.names if name in settings.state_dict)])

    with ExitStack() as stack:
        if accountant is not None:
            stack.enter_context(accountant.paused())
        parameters.fill(read)
        parameters.start(lambda one: first_value(one, settings.state_dict))
    return parameters


def first_value(one: Held, state_dict: Mapping[str, Tensor] | None) -> Tensor:
    """The value a buffer starts from: the state_dict's if it is part of it, else as the user's constructor makes it."""
    if state_dict is not None and one.persistent:
        return state_dict[next(name for name in one.names if name in state_dict)]
    if one.make is None:
        raise RunError(f"the first value of buffer {one.names[0]} is random or unknown; pass --state-dict")
    return one.make()


def _step(
    program: Program,
    schedule: ScheduleFile,
    settings: Settings,
    ranks: list[Rank],
    step: int,
    accountant: Accountant | None,
    outcome: Outcome,
) -> None:
    gradients: dict[str, Tensor] = {}

    def collect(rank: Rank) -> None:
        with ExitStack() as stack:
            if accountant is not None:
                stack.enter_context(accountant.paused())
            gradients.update({name: gradient.detach().cpu().clone() for name, gradient in rank.parameters.gradients().items()})

    walks: dict[Rank, Iterator[None]] = {}
    for rank in ranks:
        if accountant is not None:
            accountant.running = rank.index
        inputs = [_inputs(program, settings, rank, step, k) for k in range(schedule.micro_batches)]
        walks[rank] = rank.walk(step, inputs, collect if settings.keep_gradients else None)
        del inputs
    run_together(walks, accountant)
    if settings.keep_gradients:
        outcome.gradients.append(gradients)
    for rank in ranks:
        if rank.last:
            outcome.losses.append(sum(loss.item() for loss in rank.losses) / len(rank.losses))
            if settings.on_step is not None:
                settings.on_step(step, outcome.losses[-1])
        rank.losses = []


def _inputs(program: Program, settings: Settings, rank: Rank, step: int, k: int) -> dict[str, Tensor]:
    """What one stage reads of one micro-batch, in memory of its own."""
    if settings.data is None:
        batch: Mapping[str, Tensor] = example_batch({name: program.INPUTS[name] for name in rank.stage.INPUTS}, settings.seed, step, k)
    else:
        try:
            batch = settings.data[step][k]
        except IndexError:
            wanted = f"{settings.steps} steps of {rank.schedule.micro_batches}"
            raise RunError(f"--data has no micro-batch {k} of step {step}; give {wanted}") from None
        check_batch(program, batch, f"micro-batch {k} of step {step}")
        batch = {name: tensor.clone() for name, tensor in batch.items() if name in rank.stage.INPUTS}  # not the mapped file
    return {name: batch[name].to(rank.device) for name in rank.stage.INPUTS}
