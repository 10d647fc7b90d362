"""The search loop: no needless action, refusals with numbers, Ctrl-C, limits, determinism."""

from __future__ import annotations

import _thread
import threading
from dataclasses import replace

import pytest

from mpress.errors import InfeasibleError, MpressError
from mpress.plan import ScheduleKind
from mpress.problem import Problem, mode_order, moments, totals
from mpress.schedule import Word
from mpress.solve.explain import unplanned
from mpress.solve.greedy import balanced_ends
from mpress.solve.search import plan
from mpress.verify import verify
from random_problems import block_problem, random_problem


def test_a_model_that_fits_gets_no_action() -> None:
    problem = block_problem(blocks=20, stages=4, capacity=100_000)
    solution = plan(problem)
    assert solution.status in ("optimal", "within_gap")
    assert not any(mode for stage in solution.plan.stages for mode in stage.modes)
    assert not any(stage.shares for stage in solution.plan.stages)


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_tight_memory_is_met_within_the_gap(kind: ScheduleKind) -> None:
    problem = block_problem(blocks=20, stages=4, capacity=1500 if kind is ScheduleKind.ONE_F_ONE_B else 2300, kind=kind)
    _, plain = unplanned(problem)
    assert any(stage.peak_bytes > problem.machine.usable_bytes(s) for s, stage in enumerate(plain.stages))
    solution = plan(problem)
    replay = verify(problem.workload, problem.machine, solution.plan)
    assert replay.step_seconds == solution.replay.step_seconds
    assert solution.bound_seconds <= solution.replay.step_seconds
    assert any(mode for stage in solution.plan.stages for mode in stage.modes)
    assert solution.gap <= 0.05


def test_twice_the_same() -> None:
    problem = block_problem(blocks=20, stages=4, capacity=1500)
    assert plan(problem) == plan(problem)


def test_refusal_names_stage_bytes_and_cures() -> None:
    problem = block_problem(blocks=20, stages=4, capacity=600)
    with pytest.raises(InfeasibleError) as refusal:
        plan(problem)
    error = refusal.value
    assert error.code == "no-plan" and error.exit_code == 1
    assert error.where.startswith("stage ")
    assert "bytes)" in error.message and "misses" in error.message
    assert "GPUs with at least" in error.hint


def test_refusal_of_fewer_cells_than_gpus() -> None:
    problem = block_problem(blocks=2, stages=8, capacity=10_000)
    for ask in (plan, unplanned):
        with pytest.raises(InfeasibleError) as refusal:
            ask(problem)
        assert "6 cells" in refusal.value.message


def test_ctrl_c_gives_the_best_plan_so_far() -> None:
    problem = replace(block_problem(blocks=40, stages=4, capacity=2200), gap=0.0, work_limit=10_000_000.0)
    solution = None
    heard: list[str] = []

    def listen(words: str) -> None:
        if not heard and words.startswith("best"):
            threading.Timer(0.2, _thread.interrupt_main).start()
            heard.append(words)

    solution = plan(problem, listen)
    assert solution.status in ("interrupted", "optimal")
    verify(problem.workload, problem.machine, solution.plan)


def test_work_limit_without_a_plan_says_so() -> None:
    problem = replace(random_problem(0), work_limit=1e-9)
    try:
        solution = plan(problem)
    except MpressError as error:
        assert error.code in ("work-limit", "no-plan")
    else:
        assert solution.status in ("optimal", "limit")


def test_balanced_ends() -> None:
    assert balanced_ends([1.0] * 6, 3) == (2, 4, 6)
    assert balanced_ends([9.0, 1.0, 1.0, 1.0], 2) == (1, 4)
    assert balanced_ends([1.0, 1.0], 1) == (2,)


def test_modes_are_dealt_most_swapped_first_and_kept_last() -> None:
    cost = block_problem(blocks=2, stages=2, capacity=1000).workload.types[1]
    order = mode_order(cost)
    assert order[-1] == 0
    assert [cost.modes[m].swapped_bytes for m in order] == sorted((mode.swapped_bytes for mode in cost.modes), reverse=True)


def test_moments_of_1f1b() -> None:
    problem: Problem = block_problem(blocks=20, stages=4, capacity=1000)
    assert [moment.others for moment in moments(problem, 0, Word.F)] == [3]
    assert [moment.others for moment in moments(problem, 3, Word.B)] == [0]
    middle = moments(problem, 1, Word.B)
    assert any(m.receives_output and m.sent_output and m.sent_gradient for m in middle)
    assert sum(totals(problem.workload)) == len(problem.workload.cells)
