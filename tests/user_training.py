"""The user's own training loop on the user's own module: what an emitted program must equal."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from mpress.runtime.reference import keyed_dropout
from tiny_models import GPT
from tiny_plans import SIZES

Batches = list[list[dict[str, Tensor]]]


def user_model(seed: int = 3, **changes: object) -> nn.Module:
    """The toy GPT of the plans, really built."""
    spec = importlib.util.spec_from_file_location("user_gpt", GPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(seed)
    return cast(nn.Module, module.build_model(**(SIZES | changes)))


def batches(steps: int, micro_batches: int, seed: int = 7) -> Batches:
    """Random tokens and targets for the toy GPT, two samples a micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    shape, high = (2, cast(int, SIZES["sequence"])), cast(int, SIZES["vocabulary"])

    def draw() -> Tensor:
        return torch.randint(high, shape, generator=generator)

    return [[{"tokens": draw(), "targets": draw()} for _ in range(micro_batches)] for _ in range(steps)]


OPTIMIZERS: Mapping[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, weight_decay=1e-2, fused=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-3, weight_decay=1e-2, momentum=0.9, fused=True),
}
TIED = ("wte.weight", "lm_head.weight")


def train(model: nn.Module, data: Batches, optimizer: str, seed: int) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and gradients of every step, gradients under every name a parameter has."""
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses, gradients = [], []
    for step, micro_batches in enumerate(data):
        loss, named = accumulate(model, micro_batches, seed, step)
        losses.append(loss)
        gradients.append(named)
        stepper.step()
        stepper.zero_grad()
    return losses, gradients


def train_with_copies(
    model: nn.Module, data: Batches, optimizer: str, seed: int
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Train as a pipeline orders the sums: the tied weight has two copies, each gathers its gradients of all micro-batches, then they are
    added.  Returns the gradients of every step, and those of the model itself, tied as it is, at the same weights.
    """
    twin = deepcopy(model)
    twin.get_submodule("lm_head").weight = nn.Parameter(cast(Tensor, twin.get_submodule("lm_head").weight).detach().clone())
    stepper = OPTIMIZERS[optimizer](twin.parameters())
    copied, tied = [], []
    for step, micro_batches in enumerate(data):
        model.load_state_dict(twin.state_dict())
        tied.append(accumulate(model, micro_batches, seed, step)[1])
        model.zero_grad()
        accumulate(twin, micro_batches, seed, step)
        gradients = [cast(Tensor, twin.get_parameter(name).grad) for name in TIED]
        total = gradients[0] + gradients[1]
        for gradient in gradients:
            gradient.copy_(total)
        copied.append({name: cast(Tensor, p.grad).clone() for name, p in twin.named_parameters()})
        stepper.step()
        stepper.zero_grad()
    return copied, tied


def accumulate(model: nn.Module, micro_batches: list[dict[str, Tensor]], seed: int, step: int) -> tuple[float, dict[str, Tensor]]:
    """Forward and backward of the micro-batches of one step; the mean loss and the gradients."""
    losses = []
    for k, batch in enumerate(micro_batches):
        with keyed_dropout(model, seed, step, k):
            loss = model(**batch)
        (loss / len(micro_batches)).backward()
        losses.append(loss.item())
    named = model.named_parameters(remove_duplicate=False)
    return sum(losses) / len(losses), {name: cast(Tensor, p.grad).clone() for name, p in named}
