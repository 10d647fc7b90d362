"""Models of every kind, cut in 2 to 4 stages with every kind of memory action: gradients and memory of the emitted program.

The plans are made by hand, so that each model meets recomputation, swaps to the host and stripes on other GPUs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import models_of_all_kinds
from mpress.runtime.parameters import Knobs
from mpress.runtime.reference import keyed_dropout
from mpress.runtime.session import Settings, run_virtual
from tiny_plans import emit_model

MICRO_BATCHES = 3


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("stages", "kind"), [(2, "keep"), (3, "recompute"), (4, "all")])
@pytest.mark.parametrize("name", list(models_of_all_kinds.MODELS))
def test_the_emitted_program_trains_like_the_model(tmp_path: Path, name: str, stages: int, kind: str) -> None:
    path = models_of_all_kinds.write(name, tmp_path)
    emitted = emit_model(tmp_path, path, {}, kind, stages, MICRO_BATCHES)
    user = _user_module(path)
    torch.manual_seed(5)
    model: nn.Module = user.build_model()
    given = [user.example_inputs(batch=2) for _ in range(MICRO_BATCHES)]
    batches = [_named(one, list(emitted.program.INPUTS)) for one in given]
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    settings = Settings(1, 0, Knobs("adamw"), state_dict=weights, data=[batches], account=True, keep_gradients=True)
    outcome = run_virtual(emitted.program, emitted.schedule, settings)

    total = 0.0
    for k, one in enumerate(given):
        with keyed_dropout(model, 0, 0, k):
            out = model(**one) if isinstance(one, dict) else model(*one)
            value = out if not hasattr(user, "loss") else user.loss(out)
            (value / MICRO_BATCHES).backward()  # inside: the user's checkpoints draw again
        total += float(value.detach()) / MICRO_BATCHES
    expected = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    made = outcome.gradients[0]
    assert set(made) >= set(expected)
    for key, gradient in expected.items():
        assert gradient is not None
        torch.testing.assert_close(made[key], gradient, rtol=1e-5, atol=1e-7)
    assert outcome.losses[0] == pytest.approx(total, rel=1e-6)
    for index, stage in enumerate(emitted.schedule.stages):
        assert outcome.peak[index] <= stage.peak_bytes, f"stage {index} holds more than predicted"


def _user_module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("user_net", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _named(given: Any, names: list[str]) -> dict[str, Tensor]:
    """The tensors of one micro-batch under the names of the emitted program, which are in the order of the arguments."""
    leaves = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
    return dict(zip(names, leaves, strict=True))
