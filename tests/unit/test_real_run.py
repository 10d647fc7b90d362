"""The ground truth itself, held against values worked out by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from real_run import real_run


class Two(nn.Module):
    """y = x w^T (4 x 8); z = tanh y; loss = sum z."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(24.0).reshape(8, 3) / 24)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.w)).sum()


def test_a_step_worked_out_by_hand() -> None:
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    run = real_run(Two, (x,))
    assert (run.parameters, run.trainable, run.buffer_elements) == (24, 24, 0)
    assert run.sequence(backward=False) == ("aten.t.default", "aten.mm.default", "aten.tanh.default", "aten.sum.default")
    # the seed expanded (a view), tanh_backward, (g^T x)^T for mm's right side, and t of that for w
    assert run.sequence(backward=True) == (
        "aten.expand.default", "aten.tanh_backward.default", "aten.t.default", "aten.mm.default", "aten.t.default", "aten.t.default",
    )  # fmt: skip
    # saved: the input (of mm), the result of tanh
    assert run.saved_list == (((4, 3), "float32"), ((4, 8), "float32"))
    assert [item.kind for item in run.saved] == ["input", "computed"]
    assert run.saved_bytes == 4 * 8 * 4 and run.held_bytes == run.saved_bytes
    # the peak: tanh's result, loss, seed, gradient of y; or loss, seed, gradient of y, gradient of w (24)
    assert run.peak_bytes == 4 + 4 + 128 + 128
    assert run.ops[run.peak_op].target in ("aten.tanh.default", "aten.tanh_backward.default")
    expected = (1 - torch.tanh(x @ Two().w.T) ** 2).T @ x
    torch.testing.assert_close(run.gradients["w"], expected)
    assert torch.equal(run.loss, torch.tanh(x @ Two().w.T).sum())


def test_measuring_keeps_nothing_alive() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1000))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(10):
                x = x + 1.0  # needs no gradient, each is freed by the next
            return (x * self.w).sum()

    run = real_run(Chain, (torch.zeros(1000),))
    assert [op.live for op in run.ops[:10]] == [4000] + [8000] * 9
    assert run.saved_bytes == 4000  # the last x, for the gradient of w
    # x, loss, seed, gradient of w (AccumulateGrad keeps it: mul made it dense)
    assert run.ops[-1].live == 4 + 4 + 4000


def test_saved_views_share_a_storage_and_what_is_dropped_is_not_saved() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            (x @ self.w).exp()  # a branch nobody uses
            a, b = (x @ self.w).chunk(2, dim=1)
            return (a * b).sum()

    run = real_run(Net, (torch.ones(2, 6),))
    kinds = [(item.shape, item.kind) for item in run.saved]
    assert sorted(kinds) == [((2, 3), "computed"), ((2, 3), "computed"), ((2, 6), "input")]
    computed = [place for place, item in zip(run.alias_partition, run.saved, strict=True) if item.kind == "computed"]
    assert computed[0] == computed[1] and run.saved_bytes == 2 * 6 * 4


def test_a_tied_weight_is_one_parameter_and_its_sum_is_marked() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            y: Tensor = self.head(self.table(tokens))
            return y.square().mean()

    run = real_run(Tied, (torch.tensor([0, 1, 4]),))
    assert run.parameters == 20 and set(run.gradients) == {"table.weight"}
    assert [op.target for op in run.ops if op.summing] == ["aten.add.Tensor"]
    assert "aten.add.Tensor" not in run.sequence(backward=True)


def test_buffers_draws_and_checkpoints() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.drop = nn.Dropout(0.5)
            self.inner = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, self.drop(self.norm(x)), use_reentrant=False)
            return y.sum()

    def build() -> nn.Module:
        torch.manual_seed(3)
        return Net()

    x = torch.randn(8, 4)
    run, again, other = real_run(build, (x,)), real_run(build, (x,)), real_run(build, (x,), seed=8)
    assert torch.equal(run.loss, again.loss) and not torch.equal(run.loss, other.loss)
    assert run.buffers["norm.num_batches_tracked"] == 1
    torch.testing.assert_close(run.buffers["norm.running_mean"], 0.1 * x.mean(0))
    # of the region its input is saved, never the 8 x 64 inside; tanh runs twice
    assert run.saved_bytes < 8 * 64 * 4
    assert [op.target for op in run.ops].count("aten.tanh.default") == 2
    assert run.sequence(backward=True).count("aten.tanh.default") == 1
