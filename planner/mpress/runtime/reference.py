"""Makes the user's own module draw the dropout masks an emitted program draws, so that the two can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpress.runtime.ops import draw_seed, keep_mask


@contextmanager
def keyed_dropout(model: nn.Module, seed: int, step: int, micro_batch: int) -> Iterator[None]:
    """Inside, `torch.dropout` (which nn.Dropout calls) draws by module path and number of the draw within one forward."""
    stack: list[str] = [""]
    draws: dict[str, int] = {}

    def draw(input: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0.0:
            return input
        key = f"{stack[-1]}#{draws.get(stack[-1], 0)}"
        draws[stack[-1]] = draws.get(stack[-1], 0) + 1
        mask = keep_mask(input.shape, p, input.device, draw_seed(seed, step, micro_batch, key))
        return input.mul(mask).mul(0.0 if p == 1.0 else 1.0 / (1.0 - p))

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            stack.append(name)

        return hook

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack.pop()

    with ExitStack() as cleanup:
        for name, module in model.named_modules():
            cleanup.callback(module.register_forward_pre_hook(enter(name)).remove)
            cleanup.callback(module.register_forward_hook(leave, always_call=True).remove)
        for owner in (torch, torch._VF):
            original = owner.dropout
            owner.dropout = draw  # type: ignore[attr-defined]
            cleanup.callback(setattr, owner, "dropout", original)
        yield
