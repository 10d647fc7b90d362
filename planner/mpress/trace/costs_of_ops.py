"""FLOPs and bytes of one recorded call, from shapes alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils import flop_counter

from mpress.errors import InputError
from mpress.trace.source import current_source

_GATHERS = ("aten.embedding.default", "aten.index_select.default", "aten.index.Tensor", "aten.gather.default")
_aten: Any = torch.ops.aten
_counter: Any = flop_counter  # untyped in torch
# names of products; their costs must never be taken for zero
_PRODUCT = re.compile(
    r"(^|_)(mm|bmm|addmm|addbmm|baddbmm|matmul|mv|addmv|dot|vdot|addr|ger|outer)($|_)|conv(?!ert)|attention|rnn|lstm_|gru_|gemm|einsum"
)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """FLOPs of matrix products, convolutions and attention; 0 for everything else, which memory bandwidth bounds.

    Causal attention counts in full, as torch's own counter does.  Raises InputError("flops") for a product without a formula.
    """
    packet = func._overloadpacket
    own = _OWN.get(packet)
    if own is not None:
        return float(own(args, kwargs, result))
    formula = _counter.flop_registry.get(packet)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    name = str(packet).rpartition(".")[2]
    if _PRODUCT.search(name) and name not in _NO_PRODUCTS:
        raise InputError(
            "flops",
            f"{func} looks like a matrix product, but nothing says how many operations it takes",
            current_source().place(),
            "write this line with torch.matmul, F.linear, a convolution or scaled_dot_product_attention",
        )
    return 0.0


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    flops: int = _counter.sdpa_flop_count(args[0].shape, *_expanded(args[0], args[1], args[2]))
    return flops


def _attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    flops: int = _counter.sdpa_backward_flop_count(args[0].shape, args[1].shape, *_expanded(args[1], args[2], args[3]))
    return flops


def _expanded(query: Any, key: Any, value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of keys and values with as many heads as the queries have: grouped heads are multiplied as often."""
    heads = query.shape[1]
    return (key.shape[0], heads, *key.shape[2:]), (value.shape[0], heads, *value.shape[2:])


def _grouped(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Rows of each group times the matrix of the group: each row of the ragged side is multiplied once.

    Both sides ragged (the gradient of the weights): the inner dimension is what is split into groups.
    """
    first, second = args[0], args[1]
    return 2 * int(prod(first.shape)) * int(second.shape[-1])


def _products(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """A vector product: two operations for every element of the matrix that takes part."""
    return 2 * max(t.numel() for t in (*args, result) if isinstance(t, torch.Tensor))


def _trilinear(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """F.bilinear: every element of the common shape of the three operands takes two products and a sum."""
    shapes = [list(t.shape) for t in args[:3]]
    for shape, places in zip(shapes, args[3:6], strict=True):
        for place in places:
            shape.insert(place, 1)
    sizes = zip(*shapes, strict=True)
    return 3 * int(prod(max(size) for size in sizes))


def _recurrent_layer(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """oneDNN's layer of an LSTM: both weights times every step of every sequence."""
    return 2 * int(args[0].shape[0]) * int(args[0].shape[1]) * int(args[1].numel() + args[2].numel())


def _in_place(packet: Any) -> Any:
    return lambda args, kwargs, result: _counter.flop_registry[packet](*args, **kwargs, out_val=result)


_OWN = {
    _aten._trilinear: _trilinear,
    _aten.mkldnn_rnn_layer: _recurrent_layer,
    _aten.mkldnn_rnn_layer_backward: lambda args, kwargs, result: 2 * _recurrent_layer(args, kwargs, result),
    _aten.addmm_: _in_place(_aten.addmm),
    _aten.baddbmm_: _in_place(_aten.baddbmm),
    _aten.addbmm: _in_place(_aten.baddbmm),
    _aten.addbmm_: _in_place(_aten.baddbmm),
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_efficient_attention: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped,
    **dict.fromkeys((_aten.mv, _aten.addmv, _aten.dot, _aten.vdot, _aten.addr), _products),
}
# pointwise parts of a recurrent cell: their products are calls of their own
_NO_PRODUCTS = frozenset(
    {"_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward"}
)


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
