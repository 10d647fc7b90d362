"""What CUDA would run, on CPU tensors: dropout is one fused operator that saves a byte mask, attention never falls back to T x T matrices.

The functions are replaced as attributes, not by a torch-function mode, because modes do not reach code that runs inside a backward pass.
Replacements behave like the originals while no trace is running, so names a model file imported keep working afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from mpress.errors import InputError
from mpress.options import Attention, View
from mpress.trace.source import current_source


@dataclass(frozen=True, slots=True)
class Semantics:
    """What a trace shows: the view, and the attention kernel of the CUDA view."""

    view: View = View.CUDA
    attention: Attention = Attention.AUTO


_tracing = False
_dropout: Callable[..., Any] = torch.dropout
_attention: Callable[..., Any] = functional.scaled_dot_product_attention


def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`torch.dropout` as the CUDA build runs it."""
    if _tracing and train and 0 < p < 1 and input.numel() > 0:
        return torch.native_dropout(input, p, True)[0]
    result: torch.Tensor = _dropout(input, p, train)
    return result


def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`scaled_dot_product_attention`, refusing the dropout that only the CUDA kernels can fuse."""
    probability = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if _tracing and probability > 0:
        raise InputError(
            "attention-dropout",
            f"scaled_dot_product_attention drops attention weights (dropout_p={probability}), which cannot be planned yet",
            current_source().place(),
            "pass dropout_p=0.0 and put nn.Dropout after the attention's output projection",
        )
    result: torch.Tensor = _attention(*args, **kwargs)
    return result


@contextmanager
def gpu_semantics(tracing: bool, semantics: Semantics = Semantics()) -> Iterator[None]:
    """Install the replacements; with tracing=False they only wait to be imported by name (while a model file loads)."""
    global _tracing
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch._VF, "dropout", dropout),
        (torch, "dropout", dropout),
        (functional, "scaled_dot_product_attention", attention),
    ]
    before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in places]
    was = _tracing
    try:
        for owner, name, replacement in places:
            setattr(owner, name, replacement)
        _tracing = (tracing and semantics.view is View.CUDA) or was
        yield
    finally:
        _tracing = was
        for owner, name, original in before:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
