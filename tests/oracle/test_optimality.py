"""The solver against exhaustive enumeration on small random problems, both judged by the replay."""

from __future__ import annotations

import pytest

from enumeration import enumerate_best
from mpress.errors import InfeasibleError
from mpress.solve.search import plan
from mpress.verify import verify
from random_problems import random_problem

INSTANCES = 240
BATCHES = 24


def check(seed: int) -> str:
    """Compare one instance; returns what kind of instance it was."""
    problem = random_problem(seed)
    best = enumerate_best(problem)
    try:
        found = plan(problem)
    except InfeasibleError as refusal:
        assert refusal.code == "no-plan"
        assert best is None, f"seed {seed}: refused, but a plan of {best} s exists"
        return "refused"
    replay = verify(problem.workload, problem.machine, found.plan)
    seconds = float(replay.step_seconds)
    split = any(len(stage.shares) > 1 for stage in found.plan.stages)
    if best is None:
        assert split, f"seed {seed}: the solver has a plan of {seconds} s, enumeration none"
        return "split"
    assert found.bound_seconds <= best * (1 + 1e-6), f"seed {seed}: bound {found.bound_seconds} s above a plan of {best} s"
    assert seconds <= best * (1 + 1e-6), f"seed {seed}: solver {seconds} s, enumeration {best} s"
    if not split:
        assert seconds >= best * (1 - 1e-6), f"seed {seed}: solver {seconds} s, enumeration {best} s"
    if not any(mode.swapped_bytes for cost in problem.workload.types for mode in cost.modes):
        assert found.status == "optimal"  # with swaps, stripes are continuous: the bound may stay below what any tried split reaches
    swaps = any(stage.shares for stage in found.plan.stages)
    acts = any(mode for stage in found.plan.stages for mode in stage.modes)
    return "split" if split else "swap" if swaps else "recompute" if acts else "keep"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_solver_equals_enumeration(batch: int) -> None:
    for seed in range(batch, INSTANCES, BATCHES):
        check(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("batch", range(BATCHES))
def test_solver_equals_enumeration_on_a_thousand_more(batch: int) -> None:
    for seed in range(INSTANCES + batch, INSTANCES + 1000, BATCHES):
        check(seed)
