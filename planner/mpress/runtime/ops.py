"""Operators of emitted code that differ between CPU and GPUs, or draw random numbers.

Draws are keyed by (seed, step, micro-batch, operator), never by the order of execution, so masks do not depend on the partition and a
recomputed draw repeats itself.  The global generators are never used up.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Generator, Tensor

from mpress.runtime.context import Cell

aten = torch.ops.aten


def draw_seed(seed: int, step: int, micro_batch: int, key: str) -> int:
    """A stable 63-bit seed of one draw."""
    return int.from_bytes(blake2b(f"{seed}/{step}/{micro_batch}/{key}".encode(), digest_size=8).digest(), "little") >> 1


def keyed(c: Cell, key: str) -> Generator:
    """The generator of the draw that `key` (module path and number of the draw in it) names."""
    return Generator(device=c.device).manual_seed(draw_seed(c.seed, c.step, c.micro_batch, key))


def keep_mask(shape: torch.Size | tuple[int, ...], probability: float, generator: Generator) -> Tensor:
    """A byte mask that keeps an element with 1 - probability."""
    return torch.empty(shape, dtype=torch.bool, device=generator.device).bernoulli_(1.0 - probability, generator=generator)


def dropout(c: Cell, key: str, x: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Like torch.native_dropout, with a keyed draw."""
    mask = keep_mask(x.shape, probability, keyed(c, key))
    return torch.mul(x, mask).mul_(_scale(probability)), mask


def dropout_bwd(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Like aten.native_dropout_backward, without its two temporaries."""
    return torch.mul(gradient, mask).mul_(scale)


def _scale(probability: float) -> float:
    return 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
