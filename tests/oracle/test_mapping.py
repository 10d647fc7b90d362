"""The choice of GPUs against enumeration: every order of every choice of GPUs, every partition, every mode, stripe and lag."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest

from enumeration import enumerate_best
from mpress.errors import InfeasibleError
from mpress.machine import Device, Machine
from mpress.problem import Problem
from mpress.solve.mapping import plan
from mpress.units import Bytes, BytesPerSecond
from mpress.verify import verify
from random_problems import random_cost, random_problem

INSTANCES = 192
BATCHES = 24
SWAPPING = 4  # every so manieth instance may swap; enumerating stripes and lags on every order takes its time


def uneven_machine(draw: random.Random, gpus: int, capacity: int) -> Machine:
    """Few speeds, so that some GPUs are alike; pairs without a link; sometimes memory, host links and uplinks that differ."""

    def drawn(choices: list[float]) -> list[BytesPerSecond]:
        return [BytesPerSecond(draw.choice(choices)) for _ in range(gpus)]

    speeds = [[0.0] * gpus for _ in range(gpus)]
    for a in range(gpus):
        for b in range(a):
            speeds[a][b] = speeds[b][a] = draw.choice([0.0, 20.0, 20.0, 40.0])
    mixed = draw.random() < 0.3
    capacities = [Bytes(capacity + draw.choice([0, 20]) * mixed) for _ in range(gpus)]
    pairs = tuple(tuple(range(g, min(g + 2, gpus))) for g in range(0, gpus, 2))
    return Machine(
        name="uneven",
        devices=tuple(Device(size, (), BytesPerSecond(1.0), 1.0, 0.0) for size in capacities),
        links=tuple(tuple(BytesPerSecond(x) for x in row) for row in speeds),
        port=BytesPerSecond(draw.choice([40.0, 100.0])),
        host_bandwidth=tuple(drawn([10.0, 20.0]) if draw.random() < 0.3 else [BytesPerSecond(10.0)] * gpus),
        uplinks=tuple((group, BytesPerSecond(12.0)) for group in pairs) if draw.random() < 0.4 else (),
        host_memory=Bytes(draw.choice([0, 100_000])),
        latency_seconds=0.1,
        reserve=0.0,
    )


def uneven_problem(seed: int) -> Problem:
    """3 or 4 GPUs, all of them used or all but one; at most 5 cells."""
    draw = random.Random(f"mapping {seed}")
    gpus = draw.choice([3, 4])
    stages = gpus - (draw.random() < 0.25)
    base = random_problem(seed)
    types = tuple(random_cost(draw, f"t{t}", 2, tie=False) for t in range(2))
    if seed % SWAPPING:
        types = tuple(replace(cost, modes=tuple(mode for mode in cost.modes if not mode.swapped_bytes)) for cost in types)
    segments = draw.choice([(((1,), 1), ((0,), stages)), (((0,), stages - 1), ((1,), 1)), (((0, 1), 2),)])
    cells = tuple(t for period, count in segments for _ in range(count) for t in period)
    workload = replace(base.workload, types=types, cells=cells, segments=segments)
    micro_batches = draw.randint(1, 3)
    whole = sum(types[t].modes[0].resident_bytes * min(stages, micro_batches) + types[t].parameter_elements * 4 for t in cells)
    capacity = int(whole / stages * draw.choice([0.85, 0.95, 1.05, 1.3])) + draw.choice([50, 90])
    machine = uneven_machine(draw, gpus, capacity)
    return Problem(workload, machine, base.schedule, micro_batches, gap=0.0, gpus=stages)


def best_of_all(problem: Problem) -> float | None:
    """The fastest plan of any order; orders that give the same machine are enumerated once."""
    orders = permutations(range(len(problem.machine.devices)), problem.stages)
    machines = dict.fromkeys(problem.machine.placed(order) for order in orders)
    found = (enumerate_best(replace(problem, machine=machine, gpus=0)) for machine in machines)
    return min((seconds for seconds in found if seconds is not None), default=None)


def check(seed: int) -> str:
    problem = uneven_problem(seed)
    best = best_of_all(problem)
    try:
        found = plan(problem)
    except InfeasibleError as refusal:
        assert refusal.code == "no-plan"
        assert best is None, f"seed {seed}: refused, but a plan of {best} s exists"
        return "refused"
    replay = verify(problem.workload, problem.machine, found.plan)
    seconds = float(replay.step_seconds)
    assert seconds == pytest.approx(float(found.replay.step_seconds), rel=1e-9)
    assert found.bound_seconds <= seconds * (1 + 1e-9)
    if best is None:
        assert any(len(stage.shares) > 1 for stage in found.plan.stages), f"seed {seed}: a plan of {seconds} s, enumeration none"
        return "split"
    assert found.bound_seconds <= best * (1 + 1e-6), f"seed {seed}: bound {found.bound_seconds} s above a plan of {best} s"
    assert seconds <= best * (1 + 1e-6), f"seed {seed}: {seconds} s, enumeration {best} s"
    if not any(mode.swapped_bytes for cost in problem.workload.types for mode in cost.modes):
        assert found.status == "optimal", f"seed {seed}: {found.status}"
    order = tuple(stage.device for stage in found.plan.stages)
    return "in order" if order == tuple(range(problem.stages)) else "moved"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_plan_is_as_fast_as_the_best_of_any_order(batch: int) -> None:
    for seed in range(batch, INSTANCES, BATCHES):
        check(seed)
