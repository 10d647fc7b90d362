"""What CUDA would run, on CPU tensors: fused attention, dropout that saves a byte mask, CUDA's autocast.

The operators are replaced in the dispatcher, above autograd, so every caller meets them: names imported before the trace, C++ code such
as LSTM or the math form of attention, and code that runs again inside a backward pass (where torch-function modes do not reach).
Everything is undone when the trace ends.  View.CPU replaces nothing.

kernel               replacement
scaled_dot_product_attention   the kernel of `attention.py`, on fake tensors; real ones keep torch's own
dropout              native_dropout, as a CUDA build does
autocast             `autocast.py`
statistics           of norms in 16 bits are fp32, as CUDA's kernels keep them
oneDNN               switched off, so that LSTM and GRU are the operators a GPU can run too
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._refs  # registers the fake norms that are replaced here
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mpress.options import Attention, View
from mpress.trace.attention import attention
from mpress.trace.autocast import cuda_rules, remember_wishes

_aten: Any = torch.ops.aten
_C: Any = torch._C
_COMPOSITE = _C.DispatchKey.CompositeImplicitAutograd  # torch's own kernel; `decompose` would take a Python decomposition
_library: Any = torch.library.Library
_KEYS = ("AutogradCPU", "CPU")  # the second is met in inference mode only

_STATISTICS = (_aten.native_layer_norm.default, _aten.native_batch_norm.default, _aten._native_batch_norm_legit.default,
               _aten._native_batch_norm_legit.no_stats)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Semantics:
    """What a trace shows: the view, and the attention kernel of the CUDA view.  flash: the GPU has a flash kernel."""

    view: View = View.CUDA
    attention: Attention = Attention.AUTO
    flash: bool = True


_active: list[Semantics] = []


@contextmanager
def gpu_semantics(tracing: bool, semantics: Semantics = Semantics()) -> Iterator[None]:
    """Run the user's code as `semantics` say; tracing=False: the file is only loaded, or the model built."""
    with ExitStack() as cleanup:
        if not _active:  # a trace within a trace keeps the outer one's semantics
            cleanup.enter_context(remember_wishes())
            if tracing and semantics.view is View.CUDA:
                _active.append(semantics)
                cleanup.callback(_active.pop)
                cleanup.enter_context(_operators(semantics))
                cleanup.enter_context(cuda_rules())
                cleanup.enter_context(_wide_statistics())
                cleanup.callback(_C._set_mkldnn_enabled, _C._get_mkldnn_enabled())
                _C._set_mkldnn_enabled(False)
        yield


@contextmanager
def _operators(semantics: Semantics) -> Iterator[None]:
    """Install attention and dropout."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        if isinstance(query, FakeTensor):
            return attention(semantics.attention, semantics.flash, query, key, value, *rest, **keywords)
        return _aten.scaled_dot_product_attention.default._op_dk(_COMPOSITE, query, key, value, *rest, **keywords)

    library = _library("aten", "IMPL")
    try:
        for key in _KEYS:
            library.impl("scaled_dot_product_attention", attend, key)
            library.impl("dropout", _dropout, key)
        yield
    finally:
        library._destroy()


def _dropout(input: torch.Tensor, p: float, train: bool) -> Any:
    if train and 0 < p < 1 and input.numel() > 0:
        return torch.native_dropout(input, p, True)[0]
    return _aten.dropout.default._op_dk(_COMPOSITE, input, p, train)


@contextmanager
def _wide_statistics() -> Iterator[None]:
    """Fake tensors of a CPU give the mean and deviation of a 16-bit norm 16 bits, too; CUDA's kernels give them 32.

    What fake tensors remember of earlier calls is forgotten on both sides, because it does not say which rule it was made under.
    """
    table: Any = fake_impls.op_implementations_dict
    before = {func: table.get(func) for func in _STATISTICS}

    def put_back(func: Any) -> None:
        if before[func] is None:
            table.pop(func, None)
        else:
            table[func] = before[func]

    def wide(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        put_back(func)
        try:
            with mode:
                out, *statistics = func(*args, **kwargs)
                half = args[0].dtype in (torch.float16, torch.bfloat16)
                return (out, *(t.float() if half and t.is_floating_point() else t for t in statistics))
        finally:
            table[func] = wide

    FakeTensorMode.cache_clear()
    try:
        for func in _STATISTICS:
            table[func] = wide
        yield
    finally:
        for func in _STATISTICS:
            put_back(func)
        FakeTensorMode.cache_clear()


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator that may draw random numbers does: attention where it drops, others in training."""
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    if "philox_seed" in given:
        return False  # a backward repeats the draw of its forward
    given |= {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return bool(given.get("dropout_p", True)) and given.get("train", True) is not False and given.get("training", True) is not False
