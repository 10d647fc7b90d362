"""The fused attention kernels of emitted code, on a GPU the kernels themselves, on a CPU something equal for tests.

The four functions return the tensors of the ATen operator they are named after, in its order, sizes and strides, on a CPU too: whoever
moves or counts them goes by the plan, which knows the GPU's.
On a CPU torch's own flash kernel computes wherever torch would use it, else the math form.  There the log-sum-exp of the math form is NaN,
because its backward starts again from queries, keys and values; and the kernels' workspace is hidden from dispatch modes that count bytes,
as it would be on a GPU.

Dropout: `generator` seeds the draw.  The seed is among the results, so that the backward draws the same mask again without a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mpress.runtime.ops import keep_mask

aten = torch.ops.aten
Results = tuple[Tensor, Tensor, Tensor, Tensor]
_FLASH_ON_CPU = 1  # of torch._fused_sdp_choice
_SUMS_ALIGNMENT = 32  # the efficient kernel pads its log-sum-exp to this many queries,
_BIAS_ALIGNMENT = 16  # and the rows of a bias' gradient to this many keys


def sdpa_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    generator: Generator | None = None,
) -> Results:
    """aten._scaled_dot_product_flash_attention: output, log-sum-exp, seed, offset."""
    if q.device.type == "cpu":
        out, lse = torch.empty_like(q), _no_sums(q, q.shape[2])
        _forward(out, lse, q, k, v, None, causal, scale, dropout, generator)
        return out, lse, _seed(generator, torch.uint64).expand(2).clone(), torch.zeros((), dtype=torch.uint64)
    with _seeded(generator):
        made = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)
    return made[0], made[1], made[6], made[7]


def sdpa_flash_bwd(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if q.device.type == "cpu":
        made = [torch.empty_like(t) for t in (q, k, v)]
        _backward(made, g, q, k, v, None, out, lse, seed, causal, scale, dropout)
        return made[0], made[1], made[2]
    gq, gk, gv = aten._scaled_dot_product_flash_attention_backward(
        g, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], dropout, causal, seed, offset, scale=scale
    )
    return gq, gk, gv


def sdpa_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    sums: bool = True,
    generator: Generator | None = None,
) -> Results:
    """aten._scaled_dot_product_efficient_attention: output, log-sum-exp (empty without `sums`), seed, offset."""
    if q.device.type == "cpu":
        out, lse = _sequence_first(q, v.shape[-1]), _no_sums(q, _aligned(q.shape[2], _SUMS_ALIGNMENT) if sums else 0)
        _forward(out, lse, q, k, v, bias, causal, scale, dropout, generator)
        return out, lse, _seed(generator, torch.int64), torch.zeros((), dtype=torch.int64)
    with _seeded(generator):
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, bias, sums, dropout, causal, scale=scale)
    return out, lse, seed, offset


def sdpa_efficient_bwd(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    wanted: tuple[bool, ...] = (True, True, True, False),
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and the bias; None for what is not wanted."""
    if q.device.type == "cpu":
        made = [_sequence_first(t, t.shape[-1]) for t in (q, k, v)]
        if bias is not None and wanted[3]:
            made.append(torch.empty(*bias.shape[:-1], _aligned(bias.shape[-1], _BIAS_ALIGNMENT), dtype=bias.dtype)[..., : bias.shape[-1]])
        _backward(made, g, q, k, v, bias, out, lse, seed, causal, scale, dropout)
        return tuple(made) if len(made) == 4 else (*made, None)
    found: tuple[Tensor | None, ...] = aten._scaled_dot_product_efficient_attention_backward(
        g, q, k, v, bias, out, lse, seed, offset, dropout, list(wanted), causal, scale=scale
    )
    return found


# -- on a CPU ----------------------------------------------------------------------------------------------------------------------


def _forward(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    generator: Generator | None,
) -> None:
    """Fill `out` and, where there are any, the log-sum-exp of the queries."""
    with _disable_current_modes():
        if _fused(q, k, v, bias, causal, scale, dropout):
            made, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
            if lse.shape[2]:
                lse[..., : q.shape[2]].copy_(sums)
        else:
            mask = None if generator is None else keep_mask((*q.shape[:3], k.shape[2]), dropout, generator)
            made = _math(q, k, v, bias, causal, scale, dropout, mask)
        out.copy_(made)


def _backward(
    made: list[Tensor],
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> None:
    """Fill `made` with the gradients of q, k, v and, where it has a fourth tensor, the bias."""
    bias_too = len(made) == 4
    with _disable_current_modes():
        if _fused(q, k, v, bias, causal, scale, dropout) and not bias_too:
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, out, lse[..., : q.shape[2]].contiguous(), 0.0, causal, attn_mask=bias, scale=scale
            )  # fmt: skip
        else:
            start = int(seed.flatten()[0])
            mask = None if dropout == 0.0 else keep_mask((*q.shape[:3], k.shape[2]), dropout, Generator().manual_seed(start))
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            if bias is not None:
                bias = bias.detach().requires_grad_(bias_too)
                leaves += [bias] if bias_too else []
            with torch.enable_grad():
                again = _math(leaves[0], leaves[1], leaves[2], bias, causal, scale, dropout, mask)
            found = torch.autograd.grad(again, leaves, g)
        for target, source in zip(made, found, strict=True):
            target.copy_(source)


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None, dropout: float) -> bool:
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, bias, dropout, causal, scale=scale, enable_gqa=grouped)
    return dropout == 0.0 and choice == _FLASH_ON_CPU


def _math(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None, dropout: float, mask: Tensor | None
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    made: Tensor = aten._scaled_dot_product_attention_math(
        q, k, v, bias, dropout, causal, mask, scale=scale, enable_gqa=grouped
    )[0]  # fmt: skip
    return made


def _sequence_first(like: Tensor, head: int) -> Tensor:
    """What the efficient kernel returns: the sequence before the heads in memory."""
    return torch.empty(like.shape[0], like.shape[2], like.shape[1], head, dtype=like.dtype).transpose(1, 2)


def _no_sums(q: Tensor, queries: int) -> Tensor:
    """A log-sum-exp nobody has computed yet."""
    return torch.full((*q.shape[:2], queries), float("nan"), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _aligned(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def _seed(generator: Generator | None, dtype: torch.dtype) -> Tensor:
    return torch.tensor(0 if generator is None else generator.initial_seed(), dtype=dtype)


# -- on a GPU ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _seeded(generator: Generator | None) -> Iterator[None]:
    """The kernels draw from the device's default generator: seed it for this call, then put it back."""
    if generator is None:
        yield
        return
    default = torch.cuda.default_generators[generator.device.index or 0]
    before = default.get_state()
    default.manual_seed(generator.initial_seed())
    try:
        yield
    finally:
        default.set_state(before)
