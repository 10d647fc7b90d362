"""Makes the user's own module draw what an emitted program draws, so that the two can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mpress.runtime.ops import draw_seed, keep_mask

aten: Any = torch.ops.aten
_C: Any = torch._C
_COMPOSITE = _C.DispatchKey.CompositeImplicitAutograd  # torch's own kernel; `decompose` would take a Python decomposition
_library: Any = torch.library.Library
# overloads without a generator -> those with one
_KEYED = {
    "aten.rand_like.default": "generator", "aten.randn_like.default": "generator", "aten.rand.default": "generator",
    "aten.randn.default": "generator", "aten.randperm.default": "generator", "aten.randint.default": "generator",
    "aten.randint.low": "low_generator", "aten.randint_like.default": "generator", "aten.randint_like.low_dtype": "low_generator_dtype",
    "aten.randint_like.Tensor": "Tensor_generator",
}  # fmt: skip


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every drawing operator with the generator of its key: the module's path and the number of the draw in one forward.

    A user's checkpoint runs draws again in the backward; it restores the state of the global generator, so that state tells which draw
    is repeated: every draw of the forward uses the global generator up a little and remembers the state it found.
    """

    def __init__(self, seed: int, step: int, micro_batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack = [""]
        self._where = (seed, step, micro_batch)
        self._counts: dict[str, int] = {}
        self._repeated: dict[bytes, str] = {}

    def generator(self) -> Generator:
        """The generator of the next draw."""
        state = torch.get_rng_state().numpy().tobytes()
        with _disable_current_modes():
            torch.rand(())
        if _C._current_graph_task_id() >= 0 and state in self._repeated:
            key = self._repeated[state]
        else:
            module = self.stack[-1]
            number = self._counts.get(module, 0)
            self._counts[module] = number + 1
            key = self._repeated[state] = f"{module}#{number}"
        return Generator().manual_seed(draw_seed(*self._where, key))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        own = kwargs.get("generator") is not None  # already keyed, or the user's own
        if own or torch.Tag.nondeterministic_seeded not in func.tags or "attention" in str(func):
            return func(*args, **kwargs)
        if func is aten.native_dropout.default:
            if args[2] is False:
                return func(*args, **kwargs)
            mask = keep_mask(args[0].shape, args[1], self.generator())
            return torch.mul(args[0], mask).mul_(0.0 if args[1] == 1.0 else 1.0 / (1.0 - args[1])), mask
        overload = _KEYED.get(str(func))
        keyed = func if overload is None else getattr(func._overloadpacket, overload)
        return keyed(*args, **{**kwargs, "generator": self.generator()})


@contextmanager
def keyed_dropout(model: nn.Module, seed: int, step: int, micro_batch: int) -> Iterator[None]:
    """Inside, every random draw of the module is keyed by module path and number of the draw within one forward.

    Dropout is torch.native_dropout, as on a GPU; attention that drops is its math form with the mask of a fused kernel.  A module with
    user checkpoints must run its backward inside, too.
    """
    draws = _Draws(seed, step, micro_batch)

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            draws.stack.append(name)

        return hook

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        draws.stack.pop()

    def dropout(input: Tensor, p: float, train: bool) -> Any:
        if train and 0 < p < 1 and input.numel() > 0:
            return torch.native_dropout(input, p, True)[0]
        return aten.dropout.default._op_dk(_COMPOSITE, input, p, train)

    def attention(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, p: float = 0.0, causal: bool = False, **how: Any
    ) -> Any:
        if p == 0.0:
            return aten.scaled_dot_product_attention.default._op_dk(_COMPOSITE, query, key, value, mask, p, causal, **how)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype))
        with _disable_current_modes():  # called outside of a dispatch: what draws the mask must not itself count as draws of the module
            keep = keep_mask((*query.shape[:-1], key.shape[-2]), p, draws.generator())
        return aten._scaled_dot_product_attention_math(query, key, value, mask, p, causal, keep, **how)[0]

    library = _library("aten", "IMPL")
    with ExitStack() as cleanup, torch.random.fork_rng(devices=[]):
        cleanup.callback(library._destroy)
        library.impl("dropout", dropout, "AutogradCPU")
        library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
        for name, module in model.named_modules():
            cleanup.callback(module.register_forward_pre_hook(enter(name)).remove)
            cleanup.callback(module.register_forward_hook(leave, always_call=True).remove)
        cleanup.enter_context(draws)
        yield
