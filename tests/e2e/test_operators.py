"""Every ordinary operator: traced, emitted on two stages, run; its gradients against plain autograd's, its memory against the plan's.

Each case is the body of a block `f(self, x)` between two linear layers; `self.w` are parameters it may use.  The block's input is
(2, 4, 8): samples, sequence or channels, features.  Whatever it returns is squared and summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpress.cells import Chain
from mpress.fold import fold
from mpress.graph import Graph
from mpress.machine import load_machine
from mpress.modes import build_workload
from mpress.plan import HOST, Plan, ScheduleKind, Share, StagePlan
from mpress.program import CellProgram
from mpress.recipe import Optimizer, Precision, Recipe
from mpress.runtime.parameters import Knobs
from mpress.runtime.reference import keyed_dropout
from mpress.runtime.session import Settings, run_virtual
from mpress.simulate import simulate
from mpress.trace.record import trace
from mpress.units import Bytes
from mpress.workload import Workload
from tiny_plans import mode_of
from written_plans import user_module, write_plan

MICRO_BATCHES = 2
MACHINE, RECIPE = load_machine("dgx-a100-40gb", gpus=2, reserve=0.05), Recipe(Precision.FP32, Optimizer.ADAMW)
# name: (members of the block, the block)
CASES: dict[str, tuple[str, str]] = {
    "conv1d": ("m=nn.Conv1d(4, 6, 3, padding=1, groups=2)", "self.m(x)"),
    "conv2d strided and dilated": ("m=nn.Conv2d(1, 3, 2, stride=2, dilation=2, padding=2)", "self.m(x.unsqueeze(1))"),
    "conv_transpose2d": ("m=nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1)", "self.m(x.view(2, 4, 2, 4))"),
    "depthwise conv": ("m=nn.Conv1d(4, 8, 3, groups=4, bias=False)", "self.m(x)"),
    "layer_norm without weights": ("", "F.layer_norm(x, (8,))"),
    "group_norm": ("m=nn.GroupNorm(2, 4)", "self.m(x)"),
    "instance_norm": ("", "F.instance_norm(x)"),
    "rms_norm": ("m=nn.RMSNorm(8)", "self.m(x)"),
    "batch statistics": ("", "F.batch_norm(x, None, None, training=True)"),
    "weight norm by hand": ("v=nn.Parameter(torch.randn(8, 8))", "x @ (self.v / self.v.norm(dim=1, keepdim=True))"),
    "max_pool2d": ("", "F.max_pool2d(x.view(2, 4, 2, 4), 2)"),
    "avg_pool1d": ("", "F.avg_pool1d(x, 2)"),
    "adaptive pools": ("", "F.adaptive_avg_pool2d(x.view(2, 4, 2, 4), 1).flatten() + F.adaptive_max_pool1d(x, 1).flatten()"),
    "upsample nearest": ("", "F.interpolate(x.view(2, 4, 2, 4), scale_factor=2)"),
    "upsample bilinear": ("", "F.interpolate(x.view(2, 4, 2, 4), scale_factor=2, mode='bilinear', align_corners=False)"),
    "pixel_shuffle": ("", "F.pixel_shuffle(x.view(2, 4, 2, 4), 2)"),
    "pad": ("", "F.pad(x, (1, 2), value=3.0) + F.pad(x, (2, 1), mode='reflect')"),
    "cat": ("", "torch.cat((x, x.sin(), x * 2), dim=-1)"),
    "stack": ("", "torch.stack([x, x.cos()], dim=1).mean(dim=(1, 2))"),
    "chunk and split": ("", "torch.cat([p * i for i, p in enumerate((*x.chunk(2, -1), *x.split([3, 5], -1)))], -1)"),
    "unbind": ("", "sum(p * (i + 1) for i, p in enumerate(x.unbind(1)))"),
    "slices with steps": ("", "x[:, ::2] * x[:, 1::2, ...].flip(-1)"),
    "index with None": ("", "x[:, N(4), N(4)] + x[:, None, 0, :4]"),
    "gather": ("", "x.gather(2, N(4).view(1, 4, 1).expand(2, 4, 3))"),
    "scatter_add": ("", "torch.zeros(2, 4, 3, device=x.device).scatter_add(2, N(8).remainder(3).expand(2, 4, 8), x)"),
    "index_add": ("", "torch.zeros(2, 2, 8, device=x.device).index_add(1, N(4) % 2, x)"),
    "index_select": ("", "x.index_select(1, torch.arange(3, -1, -1, device=x.device))"),
    "index_put in place": ("", "y = x * 1; y[:, N(2)] = 0.5; return y"),
    "masked_fill": ("", "x.masked_fill(x > 0, -1.5).exp() + x.masked_fill(x < 0, float('-inf')).sigmoid()"),
    "where": ("", "torch.where(x > 0, x, 0.1 * x)"),
    "softmax and log_softmax": ("", "x.softmax(-1) * x.log_softmax(1)"),
    "masked softmax": ("", "x.masked_fill(torch.ones(4, 8, dtype=torch.bool, device=x.device).triu(2), float('-inf')).softmax(-1)"),
    "logsumexp": ("", "x.logsumexp(-1)"),
    "einsum": ("v=nn.Parameter(torch.randn(3, 8, 5))", "torch.einsum('bth,khd->btkd', x, self.v)"),
    "bmm": ("", "torch.bmm(x, x.transpose(1, 2))"),
    "baddbmm": ("v=nn.Parameter(torch.randn(4, 4))", "torch.baddbmm(self.v, x, x.mT, beta=0.5, alpha=2.0)"),
    "addmm scaled": ("v=nn.Parameter(torch.randn(8, 3))", "torch.addmm(N(3).float(), x.view(8, 8), self.v, beta=2, alpha=0.5)"),
    "matrix times vector": ("v=nn.Parameter(torch.randn(8))", "x @ self.v + torch.dot(self.v, self.v)"),
    "bilinear": ("m=nn.Bilinear(8, 8, 3)", "self.m(x, x)"),
    "lstm": ("m=nn.LSTM(8, 5, num_layers=2, batch_first=True, bidirectional=True)", "self.m(x)[0]"),
    "gru": ("m=nn.GRU(8, 5, batch_first=True)", "self.m(x)[0]"),
    "lstm cell": ("m=nn.LSTMCell(8, 5)", "self.m(x[:, 0])[1]"),
    "rnn": ("m=nn.RNN(8, 5, nonlinearity='relu')", "self.m(x)[1]"),
    "embedding": ("m=nn.Embedding(9, 8, padding_idx=0)", "x * self.m(N(4))"),
    "embedding_bag": ("m=nn.EmbeddingBag(9, 8, mode='mean')", "x[:, 0] * self.m(N(6).view(2, 3))"),
    "one_hot": ("", "x * F.one_hot(N(4), 8)"),
    "cumsum": ("", "x.cumsum(1) + x.cumprod(-1)"),
    "topk": ("", "x.topk(3, dim=-1)[0].sum(-1)"),
    "sort": ("", "x.sort(dim=1, descending=True)[0] * N(8)"),
    "max and argmax": ("", "x.max(dim=-1).values * x.amax(1, keepdim=True).sum() + x.min()"),
    "reductions": ("", "x.var(-1) + x.std(-1, unbiased=False) + x.mean() + x.prod(-1) + x.norm(dim=-1)"),
    "activations": ("m=nn.PReLU()", "F.silu(x) + F.mish(x) + F.elu(x) + F.gelu(x, approximate='tanh') + self.m(x) + F.hardswish(x)"),
    "softplus and glu": ("", "F.softplus(x)[..., :4] + F.glu(x, dim=-1)"),
    "powers": ("", "x.abs().pow(1.5) + x**2 + (x.square() + 1).rsqrt() + 2.0**x"),
    "clamps": ("", "x.clamp(-0.5, 0.5) + x.clamp(min=0) + torch.maximum(x, -x) + F.relu6(x)"),
    "lerp and addcmul": ("", "torch.lerp(x, x.sin(), 0.3) + torch.addcmul(x, x, x, value=0.5) + torch.addcdiv(x, x, x.exp(), value=-1)"),
    "division rounded": ("", "x.div(0.3, rounding_mode='floor') * x + torch.remainder(x, 0.7) * x + torch.div(x, 2, rounding_mode=None)"),
    "complex numbers": ("", "(torch.view_as_complex(x.view(2, 4, 4, 2)) * torch.polar(N(4) * 0.5, N(4).float())).abs()"),
    "complex rotation": ("", "torch.view_as_real(torch.view_as_complex(x.reshape(2, 4, 4, 2)).conj() * (1 + 2j)).flatten(2)"),
    "fft": ("", "torch.fft.rfft(x, dim=-1).abs()"),
    "in place": ("", "y = x.sin(); y += x; y[:, 0] *= 3; return y.mul_(2).tanh_()"),
    "roll and tril": ("", "x.roll(1, dims=1).tril() + x.triu(1).flip(0)"),
    "repeat": ("", "x.repeat(1, 2, 1) + x.repeat_interleave(2, dim=1)"),
    "meshgrid and outer": ("", "torch.outer(x[0, 0], x[1, 0]) + torch.diag(x[0, 1]) + torch.kron(x[0, :2, :2], x[0, :4, :4])"),
    "unfold": ("", "F.unfold(x.view(2, 4, 2, 4), 2).mean(1) + x.unfold(1, 2, 1).sum()"),
    "distances": ("", "torch.cdist(x, x.flip(1)).sum(-1) + F.cosine_similarity(x, x.flip(1), dim=-1) + F.pairwise_distance(x, x.flip(1))"),
    "linear algebra": ("", "torch.linalg.solve(x @ x.mT + torch.eye(4, device=x.device), x) + torch.linalg.norm(x)"),
    "grid_sample": ("", "F.grid_sample(x.view(2, 4, 2, 4), x.view(2, 4, 4, 2).tanh(), align_corners=False)"),
    "cross entropy": ("", "F.cross_entropy(x, N(8).remainder(4).expand(2, 8), label_smoothing=0.1)"),
    "other losses": ("", "F.smooth_l1_loss(x, x.flip(0)) + F.kl_div(x, x.softmax(-1), reduction='batchmean')"),
    "binary cross entropy": ("", "F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()) + F.huber_loss(x, x.sin())"),
    "casts": ("", "x.double().sin().float() + x.bfloat16().float() + (x > 0).float()"),
    "detached": ("", "x * x.detach() + x"),
    "full_like and arange": ("", "x * torch.full_like(x, 2) + N(8).to(x.dtype) + torch.linspace(0, 1, 8, device=x.device)"),
    "attention, math": ("", "attend(x, x, x)"),
    "attention, one head": ("", "attend(x[:, None], x[:, None], x[:, None], is_causal=True)"),
    "attention, bool mask": ("", "attend(x[:, None], x[:, None], x[:, None], N(4) <= N(4)[:, None])"),
    "attention, learned bias": ("v=nn.Parameter(torch.randn(2, 4, 4))", "y = heads(x); return attend(y, y, y, self.v)"),
    "attention, other lengths": ("", "y = heads(x); return attend(y[:, :, :2], y, y, scale=0.3)"),
    "attention that drops": ("", "y = heads(x); return attend(y, y, y, dropout_p=0.3)"),
    "grouped attention": ("", "y = x.view(2, 4, 4, 2).transpose(1, 2); return attend(y, y[:, :2], y[:, 2:], enable_gqa=True)"),
    "multi-head attention": ("m=nn.MultiheadAttention(8, 2, 0.2, batch_first=True)", "self.m(x, x, x, need_weights=False)[0]"),
    "multi-head attention, weights": ("m=nn.MultiheadAttention(8, 2, 0.2, batch_first=True)", "sum(t.sum() for t in self.m(x, x, x))"),
    "transformer encoder layer": ("m=nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)", "self.m(x)"),
    "dropout in place": ("", "F.dropout(x * 1, 0.3, inplace=True)"),
    "dropout of channels": ("m=nn.Dropout2d(0.4)", "self.m(x.view(2, 4, 2, 4))"),
    "alpha dropout": ("m=nn.AlphaDropout(0.3)", "self.m(x)"),
    "rrelu": ("m=nn.RReLU()", "self.m(x)"),
    "noise": ("", "x * torch.rand_like(x) + torch.randn_like(x) + torch.randint(3, (8,)) + torch.randn(8)"),
    "bernoulli": ("", "x * torch.bernoulli(x.detach().sigmoid()) + torch.empty_like(x).normal_() * x + torch.randperm(8, device=x.device)"),
    "gumbel_softmax": ("", "F.gumbel_softmax(x, hard=True)"),
    "lstm that drops": ("m=nn.LSTM(8, 5, num_layers=2, dropout=0.4)", "self.m(x)[0]"),
}  # fmt: skip
KINDS = ("keep", "recompute", "host", "both")
# the CPU's kernels compute in more memory than the result takes, and leave it in the result's storage; a GPU's do not
ROOMY_ON_A_CPU = ("embedding_bag", "unfold")
pytestmark = pytest.mark.filterwarnings("ignore:Dropout mask should only be used for testing purposes")

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

def N(count):
    return torch.arange(count, device="cpu")

def heads(x):
    return x.view(2, 4, 2, 4).transpose(1, 2)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
{members}

    def forward(self, x):
        {body}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.block, self.b = nn.Linear(8, 8), Block(), nn.Linear(1, 3)

    def forward(self, x):
        y = self.block(self.a(x))
        return self.b(y.square().flatten().sum().view(1, 1) * 0.01).square().mean()

def build_model():
    return Net()

def example_inputs(batch=1):
    return {{"x": torch.randn(2, 4, 8)}}
"""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """A case traced and costed once; weights, micro-batches, and what plain autograd makes of them."""

    graph: Graph
    chain: Chain
    workload: Workload
    programs: tuple[tuple[CellProgram, ...], ...]
    weights: dict[str, Tensor]
    batches: list[dict[str, Tensor]]
    loss: float
    gradients: dict[str, Tensor]


@cache
def case(name: str) -> Case:
    """Trace a block, and train the user's module on it."""
    members, body = CASES[name]
    assignments = "\n".join(f"        self.{line}" for line in members.split("; ")) if members else "        pass"
    text = MODEL.format(members=assignments, body=body if "return " in body else f"return {body}")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.py"
        path.write_text(text)
        graph = trace(str(path), model_args={}, micro_batch=2, precision="fp32")
        user = user_module(path)
    chain = fold(graph)
    workload, programs = build_workload(graph, chain, MACHINE, RECIPE)
    torch.manual_seed(5)
    model: nn.Module = user.build_model()
    batches = [dict(user.example_inputs()) for _ in range(MICRO_BATCHES)]
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    total = 0.0
    for k, batch in enumerate(batches):
        with keyed_dropout(model, 0, 0, k):
            out: Tensor = model(**batch)
        (out / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
        total += float(out.detach()) / MICRO_BATCHES
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(dict(model.named_parameters()))
    return Case(graph, chain, workload, programs, weights, batches, total, gradients)


def planned(workload: Workload, kind: str) -> Plan:
    """Two stages, the cut in the middle of the chain, every cell of both treated as `kind` says."""
    count = len(workload.cells)
    half = max(1, count // 2)
    stages = []
    for index, (first, last) in enumerate(((0, half), (half, count))):
        costs = [workload.types[workload.cells[i]] for i in range(first, last)]
        modes = tuple(mode_of(cost, kind, place) for place, cost in enumerate(costs))
        away = Bytes(sum(cost.modes[m].swapped_bytes for cost, m in zip(costs, modes, strict=True)))
        shares = (Share(HOST, away),) if away else ()
        stages.append(StagePlan(index, first, last, modes, shares, 1, 1))
    return Plan(ScheduleKind.ONE_F_ONE_B, MICRO_BATCHES, tuple(stages))


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in CASES for kind in KINDS if (name, kind) != ("embedding_bag", "host")],  # stripes have the GPU's size
)
def test_gradients_equal_autograd(tmp_path: Path, name: str, kind: str) -> None:
    """Everything kept; recomputed as far as possible; swapped to the host as far as possible; some of each."""
    given = case(name)
    plan = planned(given.workload, kind)
    replay = simulate(given.workload, MACHINE, plan)
    written = write_plan(tmp_path, "net", given.graph, given.chain, given.workload, given.programs, plan, replay, MACHINE, RECIPE)
    settings = Settings(1, 0, Knobs("adamw"), state_dict=given.weights, data=[given.batches], account=True, keep_gradients=True)
    outcome = run_virtual(written.program, written.schedule, settings)
    assert outcome.losses[0] == pytest.approx(given.loss, rel=1e-5)
    found: dict[str, Any] = outcome.gradients[0]
    for key, gradient in given.gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=2e-5, atol=2e-6)
    for index, stage in enumerate(written.schedule.stages if name not in ROOMY_ON_A_CPU else ()):
        assert outcome.peak[index] <= stage.peak_bytes, f"stage {index} holds more than predicted"


def test_most_blocks_have_something_to_recompute_and_to_swap() -> None:
    """The plans above differ: the block of most cases has modes that recompute, and modes that swap."""
    plans = {kind: [planned(case(name).workload, kind) for name in CASES] for kind in KINDS}
    for kind in KINDS[1:]:
        different = sum(plan != kept for plan, kept in zip(plans[kind], plans["keep"], strict=True))
        assert different > len(CASES) / 2, f"{kind}: {different}"
