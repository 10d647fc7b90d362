"""Tensors made from Python values, as arguments of the operator `mpress.literal.default`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mpress.graph import Argument, Name

TARGET = "mpress.literal.default"
MOST = 4096  # elements that are still written into a program as text


def literal_arguments(tensor: torch.Tensor) -> tuple[Argument, ...]:
    """(shape, flat values, dtype) of a real tensor; a complex number is two values, real and imaginary part."""
    flat = flat_values(tensor)
    return tuple(tensor.shape), flat, Name("dtype", str(tensor.dtype).rpartition(".")[2])


def flat_values(tensor: torch.Tensor) -> tuple[int | float | bool, ...]:
    """The elements in row-major order."""
    with _disable_current_modes(), torch.no_grad():
        plain: Any = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        return tuple(plain.reshape(-1).tolist())


def literal(shape: Sequence[int], values: Sequence[int | float | bool], dtype: torch.dtype) -> torch.Tensor:
    """What the operator computes."""
    if dtype.is_complex:
        return torch.view_as_complex(torch.tensor(values, dtype=dtype.to_real()).reshape(*shape, 2))
    return torch.tensor(values, dtype=dtype).reshape(tuple(shape))
