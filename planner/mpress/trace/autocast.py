"""torch.autocast("cuda") without a GPU: the CPU's autocast switch with the casting rules of CUDA.

torch turns autocast("cuda") off where there is no GPU, and autocast("cpu") has other lists of operators.  While the rules below are
installed, every autocast of the thread follows CUDA's lists (torch/include/ATen/autocast_mode.h; a test compares them with what torch has
registered), by Python kernels in the AutocastCPU slot of the dispatcher.  Removing them restores torch's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.amp import autocast_mode


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION = _names(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
)
FP32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
    softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
    mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """
)
FP32_DTYPE = _names(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
    sum sum.dim_IntList
    """
)  # compute in fp32 unless the call names a dtype
NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
BANNED = ("binary_cross_entropy",)

_aten: Any = torch.ops.aten
_C: Any = torch._C
_library: Any = torch.library.Library
_Kernel = Callable[..., Any]
_AUTOCAST = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)
_casts: dict[tuple[int, torch.dtype, bool], tuple[torch.Tensor, torch.Tensor]] = {}


def rules() -> dict[str, Callable[[Any], _Kernel]]:
    """Operator -> the maker of its kernel."""
    table: dict[str, Callable[[Any], _Kernel]] = {}
    for names, maker in ((LOWER_PRECISION, _lower), (FP32, _fp32), (FP32_DTYPE, _fp32_dtype), (NORMS, _norm), (WIDEST, _widest)):
        table |= dict.fromkeys(names, maker)
    return table | dict.fromkeys(BANNED, _banned)


@contextmanager
def cuda_rules() -> Iterator[None]:
    """Install CUDA's casting rules and let "cuda" mean "cpu" in every question about autocast; undo both."""
    with ExitStack() as cleanup, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library = _library("aten", "IMPL")
        cleanup.callback(library._destroy)
        table = rules()
        for name, maker in table.items():
            base, _, overload = name.partition(".")
            library.impl(name, maker(getattr(getattr(_aten, base), overload or "default")), "AutocastCPU")
        for name in sorted(_C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")):
            if (short := name.removeprefix("aten::")) not in table and name.startswith("aten::"):
                library.impl(short, torch.library.fallthrough_kernel, "AutocastCPU")  # on CUDA nothing is cast here
        for owner, attribute, replacement in _questions():
            cleanup.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, replacement)
        cleanup.callback(_casts.clear)
        cleanup.callback(_C.set_autocast_dtype, "cpu", _C.get_autocast_dtype("cpu"))
        _C.set_autocast_dtype("cpu", _C.get_autocast_dtype("cuda"))
        yield


@contextmanager
def remember_wishes() -> Iterator[None]:
    """While the user's file is loaded: an autocast("cuda") made now (a decorator) remembers what was asked of it."""
    original: Any = autocast_mode.autocast.__init__

    def init(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if dtype is None and device_type == "cpu" and not torch._C.is_autocast_enabled("cpu"):
            dtype = torch.bfloat16  # while a trace runs, the switch of the CPU holds CUDA's default, float16
        with warnings.catch_warnings():
            if device_type == "cuda":
                warnings.filterwarnings("ignore", message="CUDA is not available or torch_xla")
            original(self, device_type, dtype, enabled, cache_enabled)
        self._wish = enabled

    setattr(autocast_mode.autocast, "__init__", init)  # noqa: B010  # mypy: methods are not assignable
    try:
        yield
    finally:
        setattr(autocast_mode.autocast, "__init__", original)  # noqa: B010


def _questions() -> list[tuple[Any, str, Any]]:
    """Functions that take a device type, with "cuda" understood as "cpu"."""
    found: list[tuple[Any, str, Any]] = []
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        found.append((torch, name, _mapped(getattr(torch, name))))
    original_cast: Any = autocast_mode._cast
    original_clear: Any = torch.clear_autocast_cache
    autocast: Any = autocast_mode.autocast
    enter, leave = autocast.__enter__, autocast.__exit__

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original_cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    def clear() -> None:
        _casts.clear()
        original_clear()

    def on_enter(self: Any) -> Any:
        self._was = (self.device, self._enabled)
        if self.device == "cuda":
            self.device, self._enabled = "cpu", getattr(self, "_wish", True)
        return enter(self)

    def on_leave(self: Any, *raised: Any) -> Any:
        result = leave(self, *raised)
        self.device, self._enabled = self._was
        return result

    found += [
        (autocast_mode, "_cast", cast),
        (torch, "clear_autocast_cache", clear),
        (torch, "get_autocast_gpu_dtype", lambda: torch._C.get_autocast_dtype("cpu")),
        (autocast_mode.autocast, "__enter__", on_enter),
        (autocast_mode.autocast, "__exit__", on_leave),
    ]
    return found


def _mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def mapped(*args: Any) -> Any:
        if args and args[0] == "cuda":
            return function("cpu", *args[1:])
        if not args or isinstance(args[0], bool):  # the old forms without a device mean CUDA
            return function("cpu", *args)
        return function(*args)

    return mapped


# -- kernels -----------------------------------------------------------------------------------------------------------------------


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """C++'s cached_cast: a 16-bit copy of a parameter is made once for each outermost autocast region."""
    if isinstance(value, tuple | list):
        return [_cast(item, dtype) for item in value] if any(isinstance(item, torch.Tensor) for item in value) else value
    if not _eligible(value) or value.dtype == dtype:
        return value
    keep = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view() and dtype != torch.float32
    if not (keep and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    key = (id(value), dtype, torch.is_grad_enabled())
    if key not in _casts:
        _casts[key] = (value, value.to(dtype))  # the original is held too: its id must stay its own
    return _casts[key][1]


def _call(function: _Kernel, dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _C._ExcludeDispatchKeyGuard(_AUTOCAST):
        if dtype is None:
            return function(*args, **kwargs)
        return function(*[_cast(a, dtype) for a in args], **{k: _cast(v, dtype) for k, v in kwargs.items()})


def _lower(operator: Any) -> _Kernel:
    return lambda *args, **kwargs: _call(operator, _C.get_autocast_dtype("cpu"), args, kwargs)


def _fp32(operator: Any) -> _Kernel:
    return lambda *args, **kwargs: _call(operator, torch.float32, args, kwargs)


def _fp32_dtype(operator: Any) -> _Kernel:
    place = next(i for i, argument in enumerate(operator._schema.arguments) if argument.name == "dtype")
    positional = not operator._schema.arguments[place].kwarg_only

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = args[place] if positional and len(args) > place else kwargs.get("dtype")
        if named is None and _eligible(args[0]):
            args = args[:place] if positional else args
            kwargs = {**kwargs, "dtype": torch.float32}
        return _call(operator, None, args, kwargs)

    return kernel


def _norm(operator: Any) -> _Kernel:
    name = operator._schema.name.partition("::")[2]
    target = getattr(_aten.norm, NORMS[f"{name}.{operator._schema.overload_name}"])
    defaults = [argument.default_value for argument in operator._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        full = (*args, *defaults[len(args) :])
        return _call(target, None, full, {**kwargs, "dtype": torch.float32 if _eligible(args[0]) else args[0].dtype})

    return kernel


def _widest(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        wide = any(_eligible(item) and item.dtype == torch.float32 for item in _flat((*args, *kwargs.values())))
        return _call(operator, torch.float32 if wide else _C.get_autocast_dtype("cpu"), args, kwargs)

    return kernel


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def _banned(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "binary_cross_entropy and BCELoss are unsafe to autocast on CUDA: use binary_cross_entropy_with_logits or BCEWithLogitsLoss"
        )

    return kernel
