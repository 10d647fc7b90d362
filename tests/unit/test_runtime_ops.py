"""Numerics of the helpers emitted code calls, and of parameters and their optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpress.runtime.attention import sdpa_efficient, sdpa_efficient_bwd, sdpa_flash, sdpa_flash_bwd
from mpress.runtime.context import Context
from mpress.runtime.ops import draw_seed, dropout, dropout_bwd, keep_mask, keyed
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


def qkv(heads: int = 4, queries: int = 16, keys: int = 16, requires_grad: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as a transformer makes them: the sequence comes before the heads in memory."""
    made = [torch.randn(2, n, h, 8).transpose(1, 2) for n, h in ((queries, 4), (keys, heads), (keys, heads))]
    return tuple(t.requires_grad_(requires_grad) for t in made)  # type: ignore[return-value]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("heads", [4, 2])
def test_flash_attention_is_that_of_torch(causal: bool, scale: float | None, heads: int) -> None:
    q, k, v = qkv(heads)
    wanted = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    g = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, (q, k, v), g)
    with torch.no_grad():
        out, lse, seed, offset = sdpa_flash(q, k, v, causal=causal, scale=scale)
        mine = sdpa_flash_bwd(g, q, k, v, out, lse, seed, offset, causal=causal, scale=scale)
    assert torch.equal(out, wanted) and out.stride() == q.stride() and lse.shape == (2, 4, 16) and seed.shape == (2,)
    for found, gradient, tensor in zip(mine, gradients, (q, k, v), strict=True):
        assert torch.equal(found, gradient) and found.stride() == tensor.stride()


@pytest.mark.parametrize("keys", [16, 24])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_efficient_attention_is_that_of_torch(keys: int, learned: bool, probability: float) -> None:
    """Against the math form, with a bias, with the mask of the key where attention weights are dropped."""
    q, k, v = qkv(queries=16, keys=keys)
    bias = torch.randn(2, 1, 16, keys).requires_grad_(learned)
    c = context().at("a")
    keep = keep_mask((2, 4, 16, keys), probability, keyed(c, "k#0")) if probability else None
    wanted = aten._scaled_dot_product_attention_math(q, k, v, bias, probability, False, keep)[0]
    if keep is not None:  # the math form, written out
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + bias, -1) * keep / (1 - probability)
        torch.testing.assert_close(wanted, weights @ v)
    g = torch.randn_like(wanted)
    leaves = (q, k, v, bias) if learned else (q, k, v)
    gradients = torch.autograd.grad(wanted, leaves, g)
    with torch.no_grad():
        expanded = bias.expand(2, 4, 16, keys)
        generator = keyed(c, "k#0") if probability else None
        out, lse, seed, offset = sdpa_efficient(q, k, v, expanded, dropout=probability, generator=generator)
        again = sdpa_efficient(q, k, v, expanded, dropout=probability, generator=keyed(c, "k#0") if probability else None)[0]
        mine = sdpa_efficient_bwd(g, q, k, v, expanded, out, lse, seed, offset, dropout=probability, wanted=(True, True, True, learned))
    torch.testing.assert_close(out, wanted)
    assert torch.equal(out, again) and (mine[3] is None) == (not learned)
    for place, gradient in enumerate(gradients):
        found = mine[place]
        assert found is not None
        torch.testing.assert_close(found.sum(1, keepdim=True) if place == 3 else found, gradient)


def laid_out(tensors: tuple[torch.Tensor | None, ...]) -> list[tuple[object, ...] | None]:
    return [None if t is None else (t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.0, 0.25])
@pytest.mark.parametrize("queries", [5, 40])
@pytest.mark.parametrize("learned", [None, False, True])
def test_attention_on_a_cpu_is_laid_out_as_on_a_gpu(dtype: torch.dtype, probability: float, queries: int, learned: bool | None) -> None:
    """Sizes, strides and memory of every result are those a trace sees, which are the GPU's: of the meta kernels."""
    generator = torch.Generator().manual_seed(1) if probability else None
    q, k, v = (t.to(dtype) for t in qkv(queries=queries, keys=12, requires_grad=False))
    bias = None if learned is None else torch.randn(2, 4, queries, 12, dtype=dtype)
    wanted = (True, True, True, bool(learned))
    made = sdpa_efficient(q, k, v, bias, dropout=probability, generator=generator)
    back = sdpa_efficient_bwd(torch.randn_like(made[0]), q, k, v, bias, *made, dropout=probability, wanted=wanted)
    m = [None if t is None else t.to("meta") for t in (q, k, v, bias)]
    meta = aten._scaled_dot_product_efficient_attention(*m, True, probability)
    assert laid_out(made) == laid_out(meta)
    assert laid_out(back) == laid_out(
        aten._scaled_dot_product_efficient_attention_backward(meta[0], *m, *meta, probability, list(wanted))
    )  # fmt: skip
    assert laid_out(sdpa_efficient(q, k, v, bias, sums=False)[1:2]) == laid_out(
        aten._scaled_dot_product_efficient_attention(*m, False, 0.0)[1:2]
    )
    if learned is None:
        made = sdpa_flash(q, k, v, dropout=probability, generator=generator)
        back = sdpa_flash_bwd(torch.randn_like(made[0]), q, k, v, *made, dropout=probability)
        meta = aten._scaled_dot_product_flash_attention(*m[:3], probability, False, False)
        assert laid_out(made) == laid_out((meta[0], meta[1], meta[6], meta[7]))
        assert laid_out(back) == laid_out(
            aten._scaled_dot_product_flash_attention_backward(
                meta[0], *m[:3], *meta[:2], None, None, queries, 12, probability, False, *meta[6:8]
            )
        )  # fmt: skip


def test_attention_that_drops_leaves_the_global_generator_alone() -> None:
    q, k, v = qkv(requires_grad=False)
    before = torch.get_rng_state()
    sdpa_flash(q, k, v, dropout=0.5, generator=keyed(context().at("a"), "k#0"))
    assert torch.equal(before, torch.get_rng_state())


def test_the_users_module_draws_the_same_masks() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(nn.functional.dropout(x, 0.5), 0.5)

    model = nn.Sequential(nn.Dropout(0.5), Twice())
    x = torch.ones(8, 8)
    with keyed_dropout(model, 1, 2, 3):
        out = model(x)
    masks = [keep_mask(x.shape, 0.5, torch.Generator().manual_seed(draw_seed(1, 2, 3, key))) for key in ("0#0", "1#0", "1#1")]
    assert torch.equal(out, x * masks[0] * 2 * masks[1] * 2 * masks[2] * 2)
    assert not torch.equal(model(x), model(x))  # nothing is left behind


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
