"""Which kernel scaled_dot_product_attention runs on a GPU, and the call of that kernel on fake CPU tensors.

The rules are those of torch's dispatch, without cuDNN's kernel: flash (compute capability 8.0 and newer: A100, H100, not V100), else
efficient, else math, each only where its constraints hold and the user has not disabled it (torch.nn.attention.sdpa_kernel).  What torch
does around the kernels is done here in the same operators: bool masks become a bias, head dimensions and biases are padded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from mpress.errors import InputError
from mpress.options import Attention
from mpress.trace.source import current_source

_aten: Any = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256
_BIAS_ALIGNMENT = 8


def attention(
    asked: Attention,
    has_flash: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention by the kernel asked for, AUTO: the one torch would choose; without `has_flash` there is no flash kernel.

    Raises InputError("attention") where the kernel asked for cannot take the tensors.
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    kernel = _choose(asked, has_flash, query, key, value, attn_mask, is_causal, enable_gqa)
    result: torch.Tensor
    if kernel is Attention.FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.where(bias, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype, device=bias.device))
    if kernel is Attention.EFFICIENT:
        shape = (query.size(0), query.size(1), query.size(2), key.size(2))
        bias = None if bias is None else _aligned(bias).expand(shape)
        result = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, _wants_gradient(query, key, value), dropout_p, is_causal, scale=scale
        )[0]
        return result
    result = _aten._scaled_dot_product_attention_math(
        query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]  # fmt: skip
    return result


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """The kernel wants head dimensions that are multiples of 8; padding must not change the scale."""
    head = query.size(-1)
    extra = -head % 8
    if extra:
        query, key, value = (functional.pad(t, (0, extra)) for t in (query, key, value))
    factor = 1.0 / math.sqrt(head) if scale is None else scale
    result: torch.Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=factor)[0]
    return result[..., :head] if extra else result


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """The efficient kernel reads rows of a bias that begin at multiples of 8 elements: a view on a padded copy where they do not."""
    if bias.stride(-1) == 1 and all(step % _BIAS_ALIGNMENT == 0 for step in bias.stride()[:-1]):
        return bias
    last = bias.size(-1)
    return functional.pad(bias, (0, _BIAS_ALIGNMENT - last % _BIAS_ALIGNMENT))[..., :last]


def _wants_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _choose(
    asked: Attention,
    has_flash: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    grouped: bool,
) -> Attention:
    if asked is Attention.MATH:
        return asked
    obstacles = {
        Attention.FLASH: _flash_obstacle(query, key, value, mask, causal, grouped) if has_flash else "these GPUs have none",
        Attention.EFFICIENT: _efficient_obstacle(query, key, value, grouped),
    }
    if asked is not Attention.AUTO:
        if obstacles[asked]:
            raise InputError(
                "attention",
                f"--attention {asked.value}: the kernel cannot take this attention: {obstacles[asked]}",
                current_source().place(),
                "use --attention auto, or change what the message names",
            )
        return asked
    cuda: Any = torch.backends.cuda
    if not obstacles[Attention.FLASH] and cuda.flash_sdp_enabled():
        return Attention.FLASH
    if not obstacles[Attention.EFFICIENT] and cuda.mem_efficient_sdp_enabled():
        return Attention.EFFICIENT
    return Attention.MATH


def _flash_obstacle(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, grouped: bool
) -> str:
    if found := _shape_obstacle(query, key, value):
        return found
    if query.dtype not in _HALF:
        return f"it computes in 16 bits only, the tensors are {_dtype(query)}"
    if mask is not None:
        return "it takes no mask"
    heads = (query.size(-1), key.size(-1), value.size(-1))
    if len(set(heads)) > 1 or heads[0] > _FLASH_HEAD:
        return f"it wants one head dimension of at most {_FLASH_HEAD}, they are {heads[0]}, {heads[1]} and {heads[2]}"
    if causal and query.size(2) != key.size(2):
        return f"causal attention of {query.size(2)} queries to {key.size(2)} keys"
    return _group_obstacle(query, key, value, grouped)


def _efficient_obstacle(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> str:
    if found := _shape_obstacle(query, key, value):
        return found
    if query.dtype not in (*_HALF, torch.float32):
        return f"it computes in bfloat16, float16 and float32, the tensors are {_dtype(query)}"
    alignment = 8 if query.dtype in _HALF else 4
    if query.size(-1) != key.size(-1) or any(t.size(-1) % alignment or not t.size(-1) for t in (query, value)):
        return f"it wants head dimensions in multiples of {alignment}, they are {query.size(-1)}, {key.size(-1)} and {value.size(-1)}"
    if grouped and query.size(1) != key.size(1):
        return "it takes as many heads of keys and values as of queries (enable_gqa is set)"
    return _group_obstacle(query, key, value, False)


def _shape_obstacle(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    tensors = (query, key, value)
    if any(t.dim() != 4 for t in tensors):
        return "the tensors do not have four dimensions (batch, heads, sequence, head)"
    if len({t.dtype for t in tensors}) > 1:
        return "queries, keys and values differ in dtype"
    if len({t.size(0) for t in tensors}) > 1:
        return "queries, keys and values differ in batch size"
    if any(t.size(2) == 0 for t in tensors):
        return "a sequence is empty"
    if any(t.stride(-1) != 1 for t in tensors):
        return "the last dimension of a tensor is not contiguous"
    return ""


def _group_obstacle(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool) -> str:
    queries, keys, values = query.size(1), key.size(1), value.size(1)
    if keys != values or (queries != keys and not (grouped and keys and queries % keys == 0)):
        return f"{queries} heads of queries, {keys} of keys, {values} of values"
    return ""


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
