"""Emitted programs train exactly as the user's module does, whatever the plan, and use the memory that was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mpress.plan import ScheduleKind
from mpress.recipe import Optimizer, Precision
from mpress.runtime.parameters import Knobs
from mpress.runtime.session import Outcome, Settings, run_virtual
from tiny_plans import KINDS, Emitted, emit
from user_training import TIED, Batches, batches, train, train_with_copies, user_model

SEED, STEPS, MICRO_BATCHES = 5, 3, 6


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def settings(weights: Mapping[str, Tensor], data: Batches) -> Settings:
    return Settings(len(data), SEED, Knobs(""), state_dict=weights, data=data, account=True, keep_gradients=True)


def check_memory(emitted: Emitted, outcome: Outcome) -> None:
    """Never above the prediction, and within 2 % of it."""
    for rank, stage in enumerate(emitted.replay.stages):
        assert 0.98 * stage.peak_bytes <= outcome.peak[rank] <= stage.peak_bytes, f"rank {rank} at {outcome.peak_action[rank]}"


def check_equal(mine: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]], close: tuple[str, ...] = ()) -> None:
    """Every gradient of every step bit for bit; those named in `close` within 1e-6 of the largest element."""
    assert len(mine) == len(theirs)
    for step, (ours, wanted) in enumerate(zip(mine, theirs, strict=True)):
        assert set(ours) == set(wanted)
        for name, gradient in wanted.items():
            if name in close:
                worst = (ours[name] - gradient).abs().max() / gradient.abs().max()
                assert worst <= 1e-6, f"{name} in step {step}: {worst:.1e}"
            else:
                assert torch.equal(ours[name], gradient), f"{name} in step {step}"


ONE_F_ONE_B, GPIPE = ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE
PLANS = [(kind, 4, ONE_F_ONE_B) for kind in KINDS] + [("all", 8, ONE_F_ONE_B), ("all", 4, GPIPE)]


@pytest.mark.parametrize(("kind", "stages", "schedule"), PLANS)
def test_tied_model(tmp_path: Path, kind: str, stages: int, schedule: ScheduleKind) -> None:
    """The tied weight is summed in another order than autograd's, which rounds differently.  So the trajectory is held bit for bit against
    the user's module summed in our order, and every gradient on it against the user's module as it is."""
    emitted = emit(tmp_path, kind, stages, MICRO_BATCHES, schedule)
    model, data = user_model(), batches(STEPS, MICRO_BATCHES)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = run_virtual(emitted.program, emitted.schedule, settings(weights, data))
    losses, _ = train(deepcopy(model), data, "adamw", SEED)
    assert outcome.losses[0] == losses[0]
    assert outcome.losses == pytest.approx(losses, rel=1e-6)
    copied, tied = train_with_copies(model, data, "adamw", SEED)
    check_equal(outcome.gradients, copied)
    check_equal(outcome.gradients, tied, close=TIED)
    assert outcome.late == 0
    assert bool(outcome.moved) == (kind in ("host", "d2d", "all"))
    check_memory(emitted, outcome)


@pytest.mark.parametrize(("kind", "stages"), [("all", 4), ("recompute", 8), ("keep", 1)])
def test_untied_model_is_equal_to_the_bit(tmp_path: Path, kind: str, stages: int) -> None:
    emitted = emit(tmp_path, kind, stages, MICRO_BATCHES, tied=False)
    model, data = user_model(tied=False), batches(STEPS, MICRO_BATCHES)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = run_virtual(emitted.program, emitted.schedule, settings(weights, data))
    losses, gradients = train(model, data, "adamw", SEED)
    assert outcome.losses == losses
    check_equal(outcome.gradients, gradients)
    assert all(torch.equal(outcome.weights[name], tensor) for name, tensor in model.state_dict().items())
    check_memory(emitted, outcome)


def test_tie_within_one_stage(tmp_path: Path) -> None:
    emitted = emit(tmp_path, "recompute", 1, MICRO_BATCHES)
    model, data = user_model(), batches(1, MICRO_BATCHES)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = run_virtual(emitted.program, emitted.schedule, settings(weights, data))
    losses, gradients = train(model, data, "adamw", SEED)
    assert outcome.losses == losses
    check_equal(outcome.gradients, gradients, close=TIED)
    check_memory(emitted, outcome)


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.SGD_MOMENTUM])
def test_other_optimizers(tmp_path: Path, optimizer: Optimizer) -> None:
    emitted = emit(tmp_path, "all", 4, MICRO_BATCHES, optimizer=optimizer)
    model, data = user_model(), batches(STEPS, MICRO_BATCHES)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = run_virtual(emitted.program, emitted.schedule, settings(weights, data))
    check_equal(outcome.gradients, train_with_copies(model, data, optimizer.value, SEED)[0])
    check_memory(emitted, outcome)


def test_mixed_precision_learns_within_the_predicted_memory(tmp_path: Path) -> None:
    emitted = emit(tmp_path, "all", 4, MICRO_BATCHES, precision=Precision.BF16)
    model, data = user_model().to(torch.bfloat16), batches(1, MICRO_BATCHES) * 8
    outcome = run_virtual(emitted.program, emitted.schedule, settings(model.state_dict(), data))
    assert outcome.losses[-1] < outcome.losses[0] - 0.01
    check_memory(emitted, outcome)
