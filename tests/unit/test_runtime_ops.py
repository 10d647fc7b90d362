"""Numerics of the helpers emitted code calls, and of parameters and their optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpress.runtime.context import Context
from mpress.runtime.ops import draw_seed, dropout, dropout_bwd, keep_mask, sdpa, sdpa_bwd
from mpress.runtime.parameters import Declared, Knobs, Parameters, layers
from mpress.runtime.reference import keyed_dropout
from mpress.runtime.transport import Transport

CPU = torch.device("cpu")
aten = torch.ops.aten


def context(step: int = 0, micro_batch: int = 0) -> Context:
    return Context(Transport({}, CPU), {}, CPU, {}, seed=1, step=step, micro_batch=micro_batch)


def test_draws_are_stable() -> None:
    assert draw_seed(0, 1, 2, "h.0.drop#0") == 3221112752739708869
    assert len({draw_seed(s, t, k, key) for s in range(2) for t in range(2) for k in range(2) for key in ("a#0", "a#1")}) == 16


def test_a_mask_depends_on_its_key_only() -> None:
    x = torch.ones(64, 64)
    first = dropout(context(2, 3).at("one"), "drop#0", x, 0.25)[1]
    assert torch.equal(first, dropout(context(2, 3).at("another"), "drop#0", x, 0.25)[1])
    for other in (dropout(context(2, 4).at("one"), "drop#0", x, 0.25)[1], dropout(context(2, 3).at("one"), "drop#1", x, 0.25)[1]):
        assert not torch.equal(first, other)
    assert first.float().mean().item() == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_rounds_as_aten_does(probability: float) -> None:
    x, g = torch.randn(33, 17), torch.randn(33, 17)
    out, mask = dropout(context().at("a"), "k#0", x, probability)
    scale = 1.0 / (1.0 - probability)
    assert torch.equal(out, x * mask * scale)
    assert torch.equal(dropout_bwd(g, mask, scale), aten.native_dropout_backward(g, mask, scale))


def test_attention_is_that_of_torch() -> None:
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    wanted = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    g = torch.randn_like(wanted)
    torch.autograd.backward(wanted, g)
    with torch.no_grad():
        out, lse = sdpa(q, k, v, causal=True)
        gradients = sdpa_bwd(g, q, k, v, out, lse, causal=True)
    assert torch.equal(out, wanted)
    for mine, tensor in zip(gradients, (q, k, v), strict=True):
        assert tensor.grad is not None
        assert torch.equal(mine, tensor.grad)


def test_the_users_module_draws_the_same_masks() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(nn.functional.dropout(x, 0.5), 0.5)

    model = nn.Sequential(nn.Dropout(0.5), Twice())
    x = torch.ones(8, 8)
    before = torch.dropout
    with keyed_dropout(model, 1, 2, 3):
        out = model(x)
    masks = [keep_mask(x.shape, 0.5, CPU, draw_seed(1, 2, 3, key)) for key in ("0#0", "1#0", "1#1")]
    assert torch.equal(out, x * masks[0] * 2 * masks[1] * 2 * masks[2] * 2)
    assert torch.dropout is before


def declared(*names: str, dtype: torch.dtype = torch.float32, trainable: bool = True) -> Declared:
    return Declared(names, names[0], (4, 3), dtype, trainable)


def test_names_below_a_module_and_absolute_ones() -> None:
    p = Parameters([declared("h.0.w"), declared("shared.w", "alias.w")], CPU, Knobs("sgd"))
    assert p.at("h.0")["w"] is p["h.0.w"]
    assert p.at("h.0")["shared.w"] is p["alias.w"]
    assert p.at("h.0").key("drop#0") == "h.0.drop#0"
    p.at("h.0").grad["w"] += torch.ones(4, 3)
    p.grad["h.0.w"] += torch.ones(4, 3)
    assert torch.equal(p.gradients()["h.0.w"], torch.full((4, 3), 2.0))
    with pytest.raises(TypeError, match=r"gradient of h\.0\.w is a fixed buffer"):
        p.at("h.0").grad["w"] = torch.ones(4, 3)
    assert layers("h.{}.", range(2), {"w": (4, 3)}) == {"h.0.w": (4, 3), "h.1.w": (4, 3)}


def ones(one: Declared, weight: torch.Tensor) -> None:
    weight.fill_(1.0)


def test_sixteen_bit_weights_follow_a_master() -> None:
    p = Parameters(
        [declared("w", dtype=torch.bfloat16), declared("f", dtype=torch.bfloat16, trainable=False)], CPU, Knobs("sgd", 1e-4, 0.0)
    )
    with torch.no_grad():
        p.fill(ones)
        for _ in range(100):  # each step is below half a unit in the last place of the 16-bit weight
            p.grad["w"] += torch.ones(4, 3, dtype=torch.bfloat16)
            p.step()
    assert torch.equal(p["w"], torch.full((4, 3), 0.99).to(torch.bfloat16))
    assert torch.equal(p["f"], torch.ones(4, 3, dtype=torch.bfloat16))
    assert not p.gradients()["w"].any()
    assert "f" not in p.gradients()


@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd-momentum"])
def test_optimizers_are_those_of_torch(name: str) -> None:
    p = Parameters([declared("w")], CPU, Knobs(name))
    user = nn.Parameter(torch.randn(4, 3))

    def copy(one: Declared, weight: torch.Tensor) -> None:
        weight.copy_(user)

    with torch.no_grad():
        p.fill(copy)
    momentum = 0.9 if name == "sgd-momentum" else 0.0
    optimizer: torch.optim.Optimizer = torch.optim.SGD([user], 1e-3, momentum, weight_decay=1e-2, fused=True)
    if name == "adamw":
        optimizer = torch.optim.AdamW([user], fused=True)
    for _ in range(3):
        user.grad = torch.randn(4, 3)
        with torch.no_grad():
            p.grad["w"] += user.grad
            p.step()
        optimizer.step()
        assert torch.equal(p["w"], user)
