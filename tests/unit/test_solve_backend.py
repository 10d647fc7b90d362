"""The door to the solver: statuses, bounds, and Ctrl-C."""

from __future__ import annotations

import _thread
import random
import threading

import pytest

from mpress.solve.backend import Linear, Model, Status, solve


def knapsack() -> Model:
    model = Model()
    picks = [model.variable(f"x{i}", upper=1.0, integer=True) for i in range(3)]
    model.at_most("weight", Linear(dict(zip(picks, (3.0, 4.0, 5.0), strict=True))), 7.0)
    model.objective = Linear(dict(zip(picks, (-4.0, -5.0, -6.0), strict=True)), 20.0)
    return model


def market_split(rows: int, seed: int) -> Model:
    """Equations no solver settles quickly."""
    draw = random.Random(seed)
    model = Model()
    picks = [model.variable(f"x{i}", upper=1.0, integer=True) for i in range(60)]
    for r in range(rows):
        model.equal(f"row{r}", Linear({v: float(draw.randint(1, 1000)) for v in picks}), 14_000.0 + r)
    model.objective = Linear({v: float(draw.randint(1, 1000)) for v in picks})
    return model


def test_optimum_and_bound() -> None:
    result = solve(knapsack(), 0.0, 1000)
    assert result.status is Status.OPTIMAL
    assert result.values == pytest.approx((1.0, 1.0, 0.0))
    assert result.objective == pytest.approx(11.0) == result.bound


def test_relaxation_bounds_from_below() -> None:
    relaxed = solve(knapsack(), 0.0, 1, relax=True)
    assert relaxed.bound == pytest.approx(relaxed.objective)
    assert relaxed.objective <= 11.0


def test_infeasible_has_an_infinite_bound() -> None:
    model = knapsack()
    model.at_least("too much", Linear({0: 1.0}), 2.0)
    result = solve(model, 0.0, 1000)
    assert result.status is Status.INFEASIBLE
    assert result.values == () and result.bound == float("inf")


def test_fixed_variable() -> None:
    model = knapsack()
    model.fix(0, 0.0)
    assert solve(model, 0.0, 1000).objective == pytest.approx(14.0)


def test_work_limit_is_a_result() -> None:
    result = solve(market_split(5, 1), 0.0, 5)
    assert result.status is Status.LIMIT
    assert result.nodes <= 5


def test_same_model_same_answer() -> None:
    assert solve(market_split(2, 3), 0.0, 200) == solve(market_split(2, 3), 0.0, 200)


def test_ctrl_c_stops_the_solver() -> None:
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    try:
        result = solve(market_split(6, 1), 0.0, 1_000_000)
    finally:
        timer.join()
    assert result.status is Status.INTERRUPTED
