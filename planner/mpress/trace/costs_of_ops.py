"""FLOPs and bytes of one recorded call, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import flop_counter

_GATHERS = ("aten.embedding.default", "aten.index_select.default", "aten.index.Tensor", "aten.gather.default")
_aten: Any = torch.ops.aten
_counter: Any = flop_counter  # untyped in torch


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """FLOPs of matrix products, convolutions and attention; 0 for everything else, which memory bandwidth bounds.

    Causal attention counts in full, as torch's own counter does.
    """
    packet = func._overloadpacket
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        return float(_counter.sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return float(_counter.sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape))
    formula = _counter.flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes a kernel touches: an expanded tensor is no larger than its memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def moved_bytes(target: str, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes read and written.  A gather reads of its table as much as it returns, a row as often as it is asked for."""
    written = sum(_bytes(t) for t in outputs)
    read = [_bytes(t) for t in operands]
    if target in _GATHERS and read:
        read[0] = written
    return sum(read) + written
