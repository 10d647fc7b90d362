"""Made-up weights and batches, equal on every rank, for runs without files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mpress.runtime.ops import draw_seed

InputRanges = Mapping[str, tuple[tuple[int, ...], str, int, int]]


def random_weight(name: str, weight: Tensor, seed: int) -> None:
    """Fill a weight in place: matrices normal with deviation 0.02, vectors named weight 1, other vectors 0.

    `name`: the canonical one, so that copies of a tie are equal.
    """
    if weight.dim() > 1:
        generator = torch.Generator().manual_seed(draw_seed(seed, 0, 0, f"weight/{name}"))
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    else:
        weight.fill_(1.0 if name.endswith("weight") else 0.0)


def example_batch(inputs: InputRanges, seed: int, step: int, micro_batch: int) -> dict[str, Tensor]:
    """One micro-batch within the ranges the model was traced with: integers low <= x < high, floats normal."""
    batch = {}
    for name, (shape, dtype, low, high) in inputs.items():
        generator = torch.Generator().manual_seed(draw_seed(seed, step, micro_batch, f"input/{name}"))
        kind = getattr(torch, dtype)
        if kind.is_floating_point:
            batch[name] = torch.randn(shape, generator=generator).to(kind)
        else:
            batch[name] = torch.randint(low, max(high, low + 1), shape, generator=generator, dtype=torch.int64).to(kind)
    return batch
