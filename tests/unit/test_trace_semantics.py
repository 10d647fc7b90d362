"""What a GPU runs, on fake CPU tensors: the choice of the attention kernel, CUDA's autocast, and that nothing is left behind."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mpress.errors import InputError
from mpress.options import Attention, View
from mpress.trace import autocast
from mpress.trace.record import trace
from mpress.trace.semantics import Semantics, gpu_semantics
from tiny_models import write_model

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operators that ran, and the dtypes of their first results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.dtypes: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        self.names.append(name)
        first = result[0] if isinstance(result, tuple | list) else result
        if isinstance(first, Tensor):
            self.dtypes[name] = first.dtype
        return result

    def kernel(self) -> str:
        """The attention kernel that ran."""
        for name, words in (("flash", "_scaled_dot_product_flash_attention"), ("efficient", "_scaled_dot_product_efficient_attention")):
            if words in self.names:
                assert f"{words}_backward" in self.names
                return name
        assert "_safe_softmax" in self.names
        return "math"


def attend(
    dtype: torch.dtype = BF16,
    *,
    asked: Attention = Attention.AUTO,
    flash: bool = True,
    head: int = 16,
    value: int = 0,
    heads: tuple[int, int] = (4, 4),
    lengths: tuple[int, int] = (8, 8),
    mask: tuple[int, ...] | None = None,
    mask_dtype: torch.dtype = torch.bool,
    learned: bool = False,
    cast: torch.dtype | None = None,
    **keywords: Any,
) -> str:
    """The kernel that one attention, forward and backward, runs."""
    with gpu_semantics(True, Semantics(attention=asked, flash=flash)), FakeTensorMode():
        sizes = ((2, heads[0], lengths[0], head), (2, heads[1], lengths[1], head), (2, heads[1], lengths[1], value or head))
        q, k, v = (torch.empty(size, dtype=dtype, requires_grad=True) for size in sizes)
        bias = None if mask is None else torch.empty(mask, dtype=mask_dtype, requires_grad=learned)
        seen = Seen()
        with seen:
            with torch.autocast("cuda", cast or BF16, enabled=cast is not None):
                out = F.scaled_dot_product_attention(q, k, v, bias, **keywords)
            out.sum().backward()  # type: ignore[no-untyped-call]
        for tensor in (q, k, v, *([bias] if learned and bias is not None else [])):
            assert tensor.grad is not None and tensor.grad.shape == tensor.shape
        assert out.shape == (2, heads[0], lengths[0], value or head)
    return seen.kernel()


@pytest.mark.parametrize(
    ("wanted", "how"),
    [
        ("flash", {}),
        ("flash", {"dtype": HALF, "is_causal": True, "scale": 0.1, "dropout_p": 0.1}),
        ("flash", {"dtype": FP32, "cast": HALF}),
        ("flash", {"head": 256}),
        ("flash", {"head": 12, "is_causal": True}),  # padded to 16
        ("flash", {"heads": (4, 2), "enable_gqa": True}),
        ("flash", {"lengths": (8, 5)}),
        ("efficient", {"lengths": (8, 5), "is_causal": True}),
        ("efficient", {"head": 264}),
        ("efficient", {"value": 24}),
        ("efficient", {"dtype": FP32, "head": 20, "dropout_p": 0.5}),
        ("efficient", {"mask": (8, 8)}),
        ("efficient", {"mask": (2, 1, 8, 8), "mask_dtype": BF16, "learned": True}),
        ("efficient", {"mask": (1, 1, 8, 5), "lengths": (8, 5)}),
        ("efficient", {"dtype": FP32, "mask": (5,), "lengths": (8, 5)}),
        ("math", {"dtype": torch.float64}),
        ("math", {"dtype": FP32, "head": 18}),
        ("math", {"head": 12, "mask": (8, 8)}),
        ("math", {"dtype": FP32, "heads": (4, 2), "enable_gqa": True, "dropout_p": 0.1}),
        ("math", {"asked": Attention.MATH}),
        ("efficient", {"asked": Attention.EFFICIENT}),
        ("efficient", {"flash": False}),
        ("math", {"flash": False, "head": 12}),
        ("math", {"flash": False, "heads": (4, 2), "enable_gqa": True}),
    ],
)
def test_the_kernel_is_the_one_cuda_would_run(wanted: str, how: dict[str, Any]) -> None:
    assert attend(**how) == wanted


@pytest.mark.parametrize(
    ("asked", "how", "why"),
    [
        (Attention.FLASH, {"dtype": FP32}, "16 bits only, the tensors are float32"),
        (Attention.FLASH, {"mask": (8, 8)}, "no mask"),
        (Attention.FLASH, {"head": 264}, "at most 256, they are 264, 264 and 264"),
        (Attention.FLASH, {"lengths": (8, 5), "is_causal": True}, "causal attention of 8 queries to 5 keys"),
        (Attention.FLASH, {"flash": False}, "these GPUs have none"),
        (Attention.EFFICIENT, {"head": 12}, "multiples of 8, they are 12"),
        (Attention.EFFICIENT, {"dtype": torch.float64}, "the tensors are float64"),
        (Attention.EFFICIENT, {"heads": (4, 2), "enable_gqa": True}, "as many heads"),
    ],
)
def test_a_kernel_that_cannot_is_refused_with_the_reason(asked: Attention, how: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why) as refusal:
        attend(asked=asked, **how)
    assert refusal.value.code == "attention" and "test_trace_semantics.py" in refusal.value.where


def test_the_users_own_choice_of_kernels_is_obeyed() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert attend() == "efficient"
    with sdpa_kernel(SDPBackend.MATH):
        assert attend() == "math"


def test_the_policy_is_the_one_torch_registers_for_cuda() -> None:
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
        if not name.startswith("aten::cudnn_")  # called by no user
    }
    assert set(autocast.rules()) == registered


def _dtypes(device: str, *arguments: Any, **keywords: Any) -> dict[str, torch.dtype]:
    with gpu_semantics(True), FakeTensorMode(), Seen() as seen:
        x, w = torch.empty(4, 8, dtype=FP32), torch.empty(8, 8, dtype=FP32, requires_grad=True)
        with torch.autocast(device, *arguments, **keywords):
            y = F.linear(x, w)
            F.layer_norm(F.linear(y, w), (8,))
            y.softmax(-1)
            y.exp()
            y.sum()
            torch.addcmul(x, y, y)
            torch.cat((y, y))
            y.norm()
            y.sigmoid()
            assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
    assert seen.names.count("_to_copy") >= 4
    found: dict[str, torch.dtype] = seen.dtypes
    return found


@pytest.mark.parametrize(("arguments", "low"), [(("cuda",), HALF), (("cuda", BF16), BF16), (("cpu",), BF16), (("cpu", HALF), HALF)])
def test_autocast_follows_cuda_s_rules(arguments: tuple[Any, ...], low: torch.dtype) -> None:
    dtypes = _dtypes(*arguments)
    assert {dtypes[name] for name in ("mm", "cat", "sigmoid")} == {low}
    assert {dtypes[name] for name in ("native_layer_norm", "_softmax", "exp", "sum", "addcmul", "linalg_vector_norm")} == {FP32}


def test_parameters_are_cast_once_and_bce_is_banned() -> None:
    with gpu_semantics(True), FakeTensorMode(), torch.amp.autocast("cuda", BF16):
        w = torch.empty(8, 8, requires_grad=True)
        with Seen() as seen:
            F.linear(F.linear(torch.empty(4, 8, dtype=BF16), w), w)
        assert seen.names.count("_to_copy") == 1
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(torch.empty(4), torch.empty(4))
    with gpu_semantics(True), FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with torch.cuda.amp.autocast(dtype=BF16):
            assert torch.mm(torch.empty(2, 2), torch.empty(2, 2)).dtype == BF16
            with torch.autocast("cuda", enabled=False):
                assert torch.mm(torch.empty(2, 2), torch.empty(2, 2)).dtype == FP32


AUTOCAST = """
@torch.autocast("cuda", dtype=torch.bfloat16)
def low(layer, x):
    return layer(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def forward(self, x):
        y = low(self.a, x)
        with torch.autocast("cuda", torch.float16):
            y = torch.utils.checkpoint.checkpoint(self.b, y, use_reentrant=False) if CHECKPOINT else self.b(y)
        return self.scaler.scale(y.float().square().mean())

def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
"""


@pytest.mark.parametrize(("view", "expected"), [(View.CUDA, ["bfloat16", "float16"]), (View.CPU, ["float32", "float32"])])
def test_autocast_of_a_model_file(tmp_path: Path, view: View, expected: list[str]) -> None:
    """Also as a decorator made while the file was loaded.  On a CPU, torch turns it off."""
    path = write_model(tmp_path, AUTOCAST.replace("CHECKPOINT", "False"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CUDA is not available|In CPU autocast")
        graph = trace(path, model_args={}, micro_batch=2, precision="fp32", semantics=Semantics(view))
    products = [graph.tensors[op.outputs[0]].dtype for op in graph.ops if op.name == "addmm"]
    assert products == expected


def test_nothing_is_left_behind() -> None:
    x = torch.randn(4, 4)
    before = (torch.is_autocast_enabled, torch.get_autocast_dtype("cpu"), torch.autocast.__enter__, torch._C._get_mkldnn_enabled())
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))
    with pytest.raises(ZeroDivisionError), gpu_semantics(True), torch.autocast("cuda", HALF):
        _ = 1 // 0
    assert before == (torch.is_autocast_enabled, torch.get_autocast_dtype("cpu"), torch.autocast.__enter__, torch._C._get_mkldnn_enabled())
    assert registered == set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", BF16), Seen() as seen:
        F.layer_norm(x @ x, (4,))  # torch's own rule of the CPU: no cast to fp32
        F.dropout(x, 0.5)
    assert seen.dtypes["native_layer_norm"] == BF16 and "native_dropout" not in seen.names


def test_statistics_of_norms_are_wide_while_a_trace_runs() -> None:
    def mean() -> torch.dtype:
        with FakeTensorMode():
            found: torch.dtype = torch.native_layer_norm(torch.empty(4, 8, dtype=BF16), [8], None, None, 1e-5)[1].dtype
            return found

    before = mean()
    with gpu_semantics(True):
        inside = mean()
    assert (before, inside, mean()) == (BF16, FP32, BF16)


def test_the_cpu_view_replaces_nothing() -> None:
    with gpu_semantics(True, Semantics(View.CPU)), FakeTensorMode(), Seen() as seen:
        x = torch.empty(1, 1, 4, 8, requires_grad=True)
        F.dropout(F.scaled_dot_product_attention(x, x, x), 0.5)
    assert "_scaled_dot_product_flash_attention_for_cpu" in seen.names and "bernoulli_" in seen.names


def test_dropout_inside_c_code_and_modules_is_the_fused_one() -> None:
    with gpu_semantics(True), FakeTensorMode(), Seen() as seen:
        torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)(torch.empty(3, 2, 4))
        torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, dtype=BF16)(torch.empty(3, 2, 8, dtype=BF16))
    assert seen.names.count("native_dropout") == 1 + 3 and "mkldnn_rnn_layer" not in seen.names
    assert "_scaled_dot_product_flash_attention" in seen.names and "bernoulli_" not in seen.names


def test_user_checkpoints_repeat_the_same_kernel() -> None:
    from torch.utils.checkpoint import checkpoint

    with gpu_semantics(True), FakeTensorMode(), torch.autograd.set_multithreading_enabled(False), Seen() as seen:
        x = torch.empty(1, 2, 8, 16, dtype=BF16, requires_grad=True)
        out: Any = checkpoint(lambda t: F.dropout(F.scaled_dot_product_attention(t, t, t, dropout_p=0.1), 0.1), x, use_reentrant=False)
        out.sum().backward()
    assert seen.names.count("_scaled_dot_product_flash_attention") == 2 and seen.names.count("native_dropout") == 2
