"""Bytes saved and FLOPs of the kernels, against the formulas of docs/kernels.md, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpress.errors import InputError
from mpress.graph import Graph, Kind, Op
from mpress.trace.costs_of_ops import flops_of
from mpress.trace.record import trace
from tiny_models import GPT, write_model

B, T, WIDTH, HEADS = 2, 40, 24, 3
HEAD = WIDTH // HEADS
aten = torch.ops.aten

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear({width}, {width})
        self.m = {member}

    def forward(self, x):
        y = self.a(x)
        {body}

def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, {length}, {width}),)
"""


def recorded(folder: Path, body: str, member: str = "None", precision: str = "fp32", length: int = T) -> Graph:
    path = write_model(folder, NET.format(width=WIDTH, member=member, body=body, length=length))
    return trace(path, model_args={}, micro_batch=B, precision=precision)


def saved_by(graph: Graph, name: str) -> list[int]:
    """Saved bytes of each output of the operator, in order."""
    op = next(op for op in graph.ops if op.name == name)
    storages = [graph.storages[graph.tensors[t].storage] for t in op.outputs if t >= 0]
    return [int(storage.bytes) for storage in storages if storage.saved]


ATTEND = (
    "h = y.view(x.shape[0], x.shape[1], 3, 8).transpose(1, 2); return F.scaled_dot_product_attention(h, h, h{more}).float().square().mean()"
)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flash_attention(tmp_path: Path, dropout: float) -> None:
    graph = recorded(tmp_path, ATTEND.format(more=f", dropout_p={dropout}, is_causal=True"), precision="bf16")
    assert saved_by(graph, "_scaled_dot_product_flash_attention") == [B * HEADS * T * HEAD * 2, 4 * B * HEADS * T, 16, 8]
    op = next(op for op in graph.ops if op.name == "_scaled_dot_product_flash_attention")
    assert bool(op.random_key) == (dropout > 0)
    back = next(op for op in graph.ops if op.name == "_scaled_dot_product_flash_attention_backward")
    assert (float(op.flops), float(back.flops)) == (4 * B * HEADS * T * T * HEAD, 10 * B * HEADS * T * T * HEAD) and not back.random_key


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("length", [40, 37])
def test_efficient_attention_with_a_mask(tmp_path: Path, precision: str, size: int, length: int) -> None:
    mask = f", torch.ones({length}, {length}, dtype=torch.bool).tril()"
    graph = recorded(tmp_path, ATTEND.format(more=mask), precision=precision, length=length)
    padded = (length + 31) // 32 * 32
    assert saved_by(graph, "_scaled_dot_product_efficient_attention") == [B * HEADS * length * HEAD * size, 4 * B * HEADS * padded, 8, 8]
    op = next(op for op in graph.ops if op.name == "_scaled_dot_product_efficient_attention")
    bias = graph.storages[graph.tensors[op.args[3].tensor].storage]  # type: ignore[union-attr]
    assert bias.saved and bias.bytes == length * ((length + 7) // 8 * 8) * size
    assert float(op.flops) == 2 * 2 * B * HEADS * length**2 * HEAD


def test_dropout_and_noise(tmp_path: Path) -> None:
    elements = B * T * WIDTH
    assert saved_by(recorded(tmp_path, "return F.dropout(y, 0.2).mean()", precision="bf16"), "native_dropout") == [elements]
    graph = recorded(tmp_path, "return F.dropout2d(y.unsqueeze(-1), 0.2).square().mean()")
    assert sum(s.bytes for s in graph.storages if s.saved and s.bytes == B * T * 4) == B * T * 4  # one number a channel and sample
    assert [op.random_key for op in graph.ops if op.random_key] == ["#0"]


def test_norms(tmp_path: Path) -> None:
    assert (
        saved_by(recorded(tmp_path, "return self.m(y).square().mean()", "nn.LayerNorm(24)", "bf16"), "native_layer_norm")[1:]
        == [4 * B * T] * 2
    )
    assert saved_by(recorded(tmp_path, "return self.m(y).square().mean()", "nn.BatchNorm1d(40)"), "native_batch_norm")[1:] == [4 * T] * 2
    assert (
        saved_by(recorded(tmp_path, "return self.m(y).square().mean()", "nn.GroupNorm(5, 40)"), "native_group_norm")[1:] == [4 * B * 5] * 2
    )


def test_cross_entropy_and_pools(tmp_path: Path) -> None:
    body = "return F.cross_entropy(y.flatten(0, 1), torch.arange(x.shape[0] * x.shape[1], device=x.device) % 24)"
    graph = recorded(tmp_path, body, precision="bf16")
    assert saved_by(graph, "_log_softmax") == [B * T * WIDTH * 2] and saved_by(graph, "nll_loss_forward") == [2]
    graph = recorded(tmp_path, "return F.max_pool1d(y, 2).square().mean()")
    assert saved_by(graph, "max_pool2d_with_indices")[1:] == [B * T * WIDTH // 2 * 8]


def test_a_layer_of_gpt_by_hand() -> None:
    """As in Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, section 4.1: s b h (34 + ...) bytes of a
    layer in 16 bits, here with flash attention (no s x s matrices: log-sum-exp instead) and what torch saves besides.
    """
    samples, sequence, hidden, heads = 2, 16, 32, 4
    sizes = {"hidden": hidden, "heads": heads, "sequence": sequence, "vocabulary": 64, "dropout": 0.1, "tied": False}

    def saved(layers: int) -> int:
        arguments = {key: str(value) for key, value in (sizes | {"layers": layers}).items()}
        graph = trace(GPT, model_args=arguments, micro_batch=samples, precision="bf16")
        return sum(int(s.bytes) for s in graph.storages if s.saved and s.kind is Kind.COMPUTED)

    sbh = sequence * samples * hidden
    rows = sequence * samples
    by_hand = (
        2 * sbh + 2 * 4 * rows + 2 * sbh  # input of the first norm, its mean and deviation, its output (input of Q, K, V)
        + 6 * sbh + 2 * sbh + 4 * heads * rows + 24  # Q, K, V; output of attention; log-sum-exp; state of the draw
        + 1 * sbh  # mask of the dropout behind the projection
        + 2 * sbh + 2 * 4 * rows + 2 * sbh  # the same of the second norm
        + 8 * sbh + 8 * sbh  # input of GELU, input of the second linear layer
        + 1 * sbh  # mask
    )  # fmt: skip
    assert by_hand == 34 * sbh + 16 * rows + 4 * heads * rows + 24
    assert saved(3) - saved(2) == saved(2) - saved(1) == by_hand


def flops(graph: Graph, *names: str) -> list[float]:
    ops: list[Op] = [op for op in graph.ops if op.name in names]
    return [float(op.flops) for op in ops]


def test_flops_of_products(tmp_path: Path) -> None:
    conv = recorded(tmp_path, "return self.m(y).square().mean()", "nn.Conv1d(40, 6, 3, padding=1, bias=False)")
    once = 2 * B * WIDTH * 6 * 40 * 3
    assert flops(conv, "convolution") == [once] and flops(conv, "convolution_backward") == [2 * once]
    transposed = recorded(tmp_path, "return self.m(y).square().mean()", "nn.ConvTranspose1d(40, 6, 4, stride=4, bias=False)")
    once = 2 * B * WIDTH * 40 * 6 * 4  # every input element is multiplied by the whole filter
    assert flops(transposed, "convolution") == [once] and flops(transposed, "convolution_backward") == [2 * once]
    batched = recorded(tmp_path, "return torch.baddbmm(torch.ones(1, device=x.device), y, y.mT).mean()")
    assert flops(batched, "baddbmm") == [2 * B * T * T * WIDTH] and flops(batched, "bmm") == [2 * B * T * T * WIDTH] * 2
    lstm = recorded(tmp_path, "return self.m(y)[0].square().mean()", "nn.LSTM(24, 5)")
    steps = [2 * T * 5 * 20] * B  # without batch_first the first dimension is time: products of each step
    assert sorted(flops(lstm, "addmm"))[-2:] == [2 * B * T * WIDTH * 20, 2 * B * T * WIDTH * WIDTH]
    assert sorted(flops(lstm, "addmm"))[:2] == steps
    vector = recorded(tmp_path, "return (y.flatten(0, 1) @ self.m.weight[0]).mean()", "nn.Linear(24, 2, bias=False)")
    assert flops(vector, "mv")[0] == 2 * B * T * WIDTH


def test_flops_of_grouped_products_and_unknown_ones() -> None:
    rows, groups, inner, columns = 32, 4, 16, 8
    x, w = torch.empty(rows, inner, dtype=torch.bfloat16), torch.empty(groups, inner, columns, dtype=torch.bfloat16)
    assert flops_of(aten._grouped_mm.default, (x, w), {}, None) == 2 * rows * inner * columns
    each = torch.empty(groups, rows, inner)
    assert flops_of(aten._grouped_mm.default, (each, w), {}, None) == 2 * groups * rows * inner * columns
    ragged = torch.empty(inner, rows), torch.empty(rows, columns)
    assert flops_of(aten._grouped_mm.default, ragged, {}, None) == 2 * rows * inner * columns
    q, k = torch.empty(2, 8, 16, 4), torch.empty(2, 2, 16, 4)
    assert flops_of(aten._scaled_dot_product_flash_attention.default, (q, k, k), {}, None) == 2 * 2 * 2 * 8 * 16 * 16 * 4
    assert flops_of(
        aten._trilinear.default, (torch.empty(5, 3), torch.empty(7, 3, 4), torch.empty(5, 4), [1, 3], [0], [1, 2], [2, 3]), {}, None
    ) == (3 * 5 * 7 * 3 * 4)
    assert flops_of(aten.exp.default, (x,), {}, x) == 0
    with pytest.raises(InputError, match="_int_mm") as refusal:
        flops_of(aten._int_mm.default, (x, w), {}, x)
    assert refusal.value.code == "flops"
