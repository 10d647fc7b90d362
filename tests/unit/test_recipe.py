"""Bytes per parameter against the arithmetic of mixed-precision training."""

from __future__ import annotations

import pytest

from mpress.recipe import Optimizer, Precision, Recipe


@pytest.mark.parametrize(
    ("precision", "optimizer", "trainable", "frozen", "tensor", "step"),
    [
        (Precision.BF16, Optimizer.ADAMW, 16, 2, 4, 4),
        (Precision.FP16, Optimizer.ADAMW, 16, 2, 4, 4),
        (Precision.FP32, Optimizer.ADAMW, 16, 4, 4, 0),
        (Precision.FP32, Optimizer.SGD, 8, 4, 0, 0),
        (Precision.FP32, Optimizer.SGD_MOMENTUM, 12, 4, 0, 0),
        (Precision.BF16, Optimizer.SGD, 8, 2, 0, 4),
        (Precision.BF16, Optimizer.SGD_MOMENTUM, 12, 2, 0, 4),
    ],
)
def test_bytes(precision: Precision, optimizer: Optimizer, trainable: int, frozen: int, tensor: int, step: int) -> None:
    recipe = Recipe(precision, optimizer)
    assert (recipe.bytes_per_trainable, recipe.bytes_per_frozen) == (trainable, frozen)
    assert (recipe.bytes_per_tensor, recipe.step_bytes_per_element) == (tensor, step)
    assert recipe.words().startswith(f"{trainable} B/parameter: ")
    assert sum(int(word) for word in recipe.words().partition(":")[2].split() if word.isdigit()) == trainable


def test_words() -> None:
    assert (
        Recipe(Precision.BF16, Optimizer.ADAMW).words() == "16 B/parameter: 2 weight + 2 gradient + 4 master weight + 4 + 4 AdamW moments"
    )


def test_step_traffic() -> None:
    """fp32 AdamW reads and writes weight and both moments, reads and zeroes the gradient; bf16 pays for two copies more."""
    assert Recipe(Precision.FP32, Optimizer.ADAMW).step_traffic_bytes == 32
    assert Recipe(Precision.BF16, Optimizer.ADAMW).step_traffic_bytes == 4 + 24 + 8 + 2
    assert Recipe(Precision.FP32, Optimizer.SGD).step_traffic_bytes == 16
