"""Operators of emitted code that differ between CPU and GPUs, or draw random numbers.

Draws are keyed by (seed, step, micro-batch, operator), never by the order of execution, so masks do not depend on the partition and a
recomputed dropout draws the same mask again.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from mpress.runtime.context import Cell

aten = torch.ops.aten


def draw_seed(seed: int, step: int, micro_batch: int, key: str) -> int:
    """A stable 63-bit seed of one draw."""
    return int.from_bytes(blake2b(f"{seed}/{step}/{micro_batch}/{key}".encode(), digest_size=8).digest(), "little") >> 1


def keep_mask(shape: torch.Size, probability: float, device: torch.device, seed: int) -> Tensor:
    """A byte mask that keeps an element with 1 - probability."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1.0 - probability, generator=generator)


def dropout(c: Cell, key: str, x: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Like torch.native_dropout, with a draw that `key` (module path and number of the draw in it) names."""
    mask = keep_mask(x.shape, probability, x.device, draw_seed(c.seed, c.step, c.micro_batch, key))
    return torch.mul(x, mask).mul_(_scale(probability)), mask


def dropout_bwd(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Like aten.native_dropout_backward, without its two temporaries."""
    return torch.mul(gradient, mask).mul_(scale)


def _scale(probability: float) -> float:
    return 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention without a T x T matrix, and its log-sum-exp, in the layout the backward wants."""
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    elif q.dtype == torch.float32:
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    else:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    return out, lse


def sdpa_bwd(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if q.device.type == "cpu":
        gq, gk, gv = aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, lse, 0.0, causal, scale=scale)
        return gq, gk, gv
    none = torch.empty(0, dtype=torch.int64, device=q.device)  # philox state, read only when attention drops
    if q.dtype == torch.float32:
        gq, gk, gv, _ = aten._scaled_dot_product_efficient_attention_backward(
            g, q, k, v, None, out, lse, none, none, 0.0, (True, True, True, False), causal, scale=scale
        )
    else:
        gq, gk, gv = aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
        )
    return gq, gk, gv
