"""Fake kernels that torch has for fewer types of numbers than its real ones; importing this module registers them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_impls

_aten: Any = torch.ops.aten


@fake_impls.register_op_impl(_aten._grouped_mm.default)
def grouped_mm(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Products of groups of rows, as the experts of a mixture compute them: torch's fake kernel takes bfloat16 only, every GPU kernel all.

    The shapes are the same for every type; alignment to 16 bytes is refused by the real kernel, where it matters.
    """
    first, second = args[0], args[1]
    if first.dtype is torch.bfloat16 or first.dtype is not second.dtype or not first.is_floating_point():
        return NotImplemented
    offsets: Any = kwargs.get("offs", args[2] if len(args) > 2 else None)
    out_dtype = kwargs.get("out_dtype", args[4] if len(args) > 4 else None) or first.dtype
    if first.dim() == 2:
        shape = (first.shape[0], second.shape[-1]) if second.dim() == 3 else (offsets.shape[0], first.shape[0], second.shape[1])
    else:
        shape = (first.shape[1], second.shape[1]) if second.dim() == 2 else (*first.shape[:2], second.shape[2])
    with mode:
        return torch.empty(shape, dtype=out_dtype, device=first.device)
