"""Facts about a whole plan that no other part states: tied copies, where inputs enter, whether every layer is placed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpress.emit.layers import placed_layers
from mpress.emit.report import InputReport, TieReport, entries, tied_copies
from mpress.holdings import tied_stages
from mpress.units import Bytes
from tiny_plans import Emitted, emit


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Emitted:
    """The toy GPT (tied, 128 x 64 embeddings, 6 layers) on 4 stages, fp32, micro-batches of 2 x 32 tokens."""
    return emit(tmp_path_factory.mktemp("report"), "keep", stages=4)


def test_a_tied_embedding_is_on_the_first_and_last_gpu(made: Emitted) -> None:
    ties = tied_copies(made.graph, made.chain, made.workload, made.plan)
    copy = 128 * 64 * 16 + 4  # weight, gradient and two moments in fp32, and the step counter
    assert ties == (TieReport(("wte.weight", "lm_head.weight"), (0, 3), Bytes(copy), Bytes(128 * 64 * 4)),)
    assert tied_stages(made.workload, made.plan) == (((0, 3), 128 * 64 * 4),)  # what the replay moves
    moved = replace(made.plan, stages=tuple(replace(stage, device=7 - stage.device) for stage in made.plan.stages))
    assert tied_copies(made.graph, made.chain, made.workload, moved)[0].gpus == (7, 4)


def test_nothing_is_tied_where_one_stage_has_both_copies(tmp_path: Path) -> None:
    one = emit(tmp_path, "keep", stages=1)
    assert tied_copies(one.graph, one.chain, one.workload, one.plan) == ()


def test_tokens_enter_first_and_targets_last(made: Emitted) -> None:
    assert entries(made.graph, made.chain, made.plan) == (
        InputReport("tokens", (2, 32), "int64", (0,)),
        InputReport("targets", (2, 32), "int64", (3,)),
    )


def test_a_layer_that_is_not_whole_on_the_stages_is_missing(made: Emitted) -> None:
    assert placed_layers(made.graph, made.chain, made.plan) == (6, 6)
    first, *rest = made.plan.stages
    lost = replace(made.plan, stages=(replace(first, first=first.first + 2), *rest))  # wte..drop and h.0.attn
    assert placed_layers(made.graph, made.chain, lost) == (5, 6)
    assert placed_layers(made.graph, made.chain, replace(made.plan, stages=())) == (0, 6)
