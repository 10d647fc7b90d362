"""The precedence graph of a step against closed forms and against the replay."""

from __future__ import annotations

import pytest

from mpress.plan import ScheduleKind
from mpress.solve.timeline import Durations, Timeline


def uniform(stages: int, forward: float, backward: float, message: float) -> Durations:
    edges = (message,) * (stages - 1)
    return Durations((forward,) * stages, (backward,) * stages, edges, edges, (0.0,) * stages)


@pytest.mark.parametrize("kind", list(ScheduleKind))
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 3), (2, 2), (3, 4), (4, 2), (4, 8)])
def test_equal_stages_without_messages(kind: ScheduleKind, stages: int, micro_batches: int) -> None:
    seconds, path = Timeline(kind, stages, micro_batches).critical(uniform(stages, 1.0, 2.0, 0.0))
    assert seconds == pytest.approx((micro_batches + stages - 1) * 3.0)
    assert path.length(uniform(stages, 1.0, 2.0, 0.0)) == pytest.approx(seconds)


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_every_path_is_a_lower_bound(kind: ScheduleKind) -> None:
    timeline = Timeline(kind, 3, 4)
    mixed = Durations((1.0, 3.0, 2.0), (4.0, 1.0, 2.0), (0.5, 0.1), (0.2, 0.7), (0.0, 0.0, 9.0))
    seconds, path = timeline.critical(mixed)
    assert path.length(mixed) == pytest.approx(seconds)
    for known in (*timeline.classic_paths(), timeline.critical(uniform(3, 1.0, 2.0, 1.0))[1]):
        assert known.length(mixed) <= seconds * (1 + 1e-12)


def test_round_trip_of_1f1b_counts_messages() -> None:
    """With little compute and slow messages a step of 1F1B is made of round trips, which the classic paths do not see."""
    timeline = Timeline(ScheduleKind.ONE_F_ONE_B, 3, 6)
    slow = uniform(3, 0.1, 0.1, 5.0)
    seconds, path = timeline.critical(slow)
    assert seconds > max(known.length(slow) for known in timeline.classic_paths())
    assert sum(path.outputs) + sum(path.gradients) > 4
