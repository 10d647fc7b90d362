"""Whatever the problem: a plan passes verification, its bound holds for other plans too, and more memory never makes it slower."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mpress.errors import InfeasibleError, MpressError
from mpress.problem import Composition, Problem
from mpress.solve.backend import solve
from mpress.solve.decode import to_composition
from mpress.solve.encode import Variant, encode
from mpress.solve.judge import judge
from mpress.solve.search import plan
from mpress.solve.timeline import Timeline
from mpress.units import Bytes
from mpress.verify import verify
from random_problems import block_problem, random_problem

quick = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def roomier(problem: Problem, extra: int) -> Problem:
    devices = tuple(replace(d, capacity_bytes=Bytes(d.capacity_bytes + extra)) for d in problem.machine.devices)
    return replace(problem, machine=replace(problem.machine, devices=devices))


def seconds(problem: Problem) -> float:
    try:
        return float(plan(problem).replay.step_seconds)
    except InfeasibleError:
        return float("inf")
    except MpressError as refusal:  # the search gave up before it knew
        assert refusal.code == "work-limit"
        assume(False)
        raise


@quick
@given(st.integers(2000, 2400))
def test_plans_pass_verification_within_memory(seed: int) -> None:
    problem = random_problem(seed)
    try:
        solution = plan(problem)
    except MpressError as refusal:
        assert refusal.hint and refusal.code in ("no-plan", "work-limit")
        return
    replay = verify(problem.workload, problem.machine, solution.plan)
    assert solution.bound_seconds <= replay.step_seconds * (1 + 1e-9)
    assert all(stage.peak_bytes <= problem.machine.usable_bytes(s) for s, stage in enumerate(replay.stages))


@quick
@given(st.integers(3000, 3400), st.integers(1, 60))
def test_more_memory_is_never_slower(seed: int, extra: int) -> None:
    problem = random_problem(seed)
    assert seconds(roomier(problem, extra)) <= seconds(problem) * (1 + 1e-6)


def random_composition(problem: Problem, draw: random.Random) -> Composition:
    cells = problem.workload.cells
    cuts = sorted(draw.sample(range(1, len(cells)), problem.stages - 1))
    bounds = (0, *cuts, len(cells))
    modes = [[draw.randrange(len(problem.workload.types[cells[i]].modes)) for i in range(a, b)] for a, b in pairwise(bounds)]
    return to_composition(problem, modes)


@quick
@given(st.integers(0, 10_000), st.booleans())
def test_the_problem_is_a_relaxation_of_the_replay(seed: int, big: bool) -> None:
    """Any plan that fits in the replay satisfies every row of the problem, at a step time no longer than the replay's."""
    draw = random.Random(seed)
    problem = block_problem(blocks=draw.randint(5, 12), stages=draw.randint(1, 4), capacity=100_000) if big else random_problem(seed)
    composition = random_composition(problem, draw)
    verdict = judge(problem, composition)
    if not verdict.fits:
        problem = roomier(problem, max(verdict.excess))
        verdict = judge(problem, composition)
        if not verdict.fits:  # host memory
            return
    exact = problem if not big else roomier(problem, max(int(s.peak_bytes) for s in verdict.replay.stages) - 100_000)
    code = encode(exact, Variant(), Timeline(problem.schedule, problem.stages, problem.micro_batches).classic_paths())
    for s, row in enumerate(code.mode):
        for t, modes in enumerate(row):
            for m, variable in modes.items():
                code.model.fix(variable, float(composition.counts[s][t][m]))
    result = solve(code.model, 0.0, 1000)
    assert result.values, "a plan that fits breaks a row of the problem"
    assert result.objective / code.second <= verdict.seconds * (1 + 1e-6)
