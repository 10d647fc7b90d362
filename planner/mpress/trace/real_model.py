"""The user's model with real weights: built, cast as a trace casts it, run and observed, put back as it was."""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from mpress.errors import InputError, MpressError
from mpress.trace.fence import fence
from mpress.trace.model_file import ModelFile, build_for_real, example_inputs
from mpress.trace.real_step import Observed, observe, ran_at
from mpress.trace.record import adopt_nested, input_names, scalar_loss
from mpress.trace.source import error_source

SEED = 20  # of the draws of every run that is compared
HINT = "do not branch on the type of tensors, on Python state or on Python's random numbers; --no-prove plans without this check"
_C: Any = torch._C


class NoKernel(Exception):
    """The CPU cannot run an operator in this precision."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step leaves behind.  Gradients and buffers by every name they have."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


class RealModel:
    """A model with its example inputs, ready to run the same step again and again."""

    def __init__(self, model_file: ModelFile, micro_batch: int, dtype: torch.dtype) -> None:
        self._file = model_file
        self.module = build_for_real(model_file)
        self._prepare(dtype)
        self._inputs = _cast(example_inputs(model_file, micro_batch), dtype)
        self._state: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
            (table, name, tensor, tensor.detach().clone())
            for module in self.module.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters, by every name."""
        return {name: own(p) for name, p in self.module.named_parameters(remove_duplicate=False)}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers, by every name."""
        return {name: own(b) for name, b in self.module.named_buffers(remove_duplicate=False)}

    def inputs(self) -> dict[str, torch.Tensor]:
        """Copies of the input tensors, by the names a graph gives them."""
        positional, keyword = self._inputs
        found: dict[str, torch.Tensor] = {}
        names = (*input_names(self.module, len(positional)), *keyword)
        for name, value in zip(names, (*positional, *keyword.values()), strict=True):
            adopt_nested(lambda leaf, tensor: found.setdefault(leaf, own(tensor)), name, value)
        return found

    def observed(self) -> tuple[Observed, Outcome]:
        """Run the step once, watched; the state is as before afterwards.  Views of written tensors are replayed, as for fake tensors."""
        before = _C._is_view_replay_enabled()
        _C._set_view_replay_enabled(True)
        try:
            return self._run(watched=True)
        finally:
            _C._set_view_replay_enabled(before)

    def plain(self) -> Outcome:
        """Run the step once as the user would."""
        return self._run(watched=False)[1]

    def _run(self, watched: bool) -> tuple[Any, Outcome]:
        positional, keyword = deepcopy(self._inputs)
        known = [*self.module.parameters(), *self.module.buffers()]
        for value in (*positional, *keyword.values()):
            adopt_nested(lambda _, tensor: known.append(tensor), "", value)

        def step() -> torch.Tensor:
            return scalar_loss(self._file, self.module(*positional, **keyword))

        python, numpy = random.getstate(), _numpy_state()
        seen: Observed | None = None
        try:
            with fence(self._file.folder / self._file.file):
                if watched:
                    seen = observe(self.module, SEED, known, step)
                    loss = seen.loss
                else:
                    torch.manual_seed(SEED)
                    loss = step()
                    torch.autograd.backward(loss)
        except MpressError:
            raise
        except Exception as error:
            raise self._failed(error) from None
        finally:
            drawn = random.getstate() != python or _numpy_state() != numpy
            random.setstate(python)
        if drawn:
            first = seen.python_draw if seen is not None else None
            message = "the forward draws from Python's or NumPy's random numbers, so the recorded step is one of several"
            raise InputError("proof", message, ran_at(first) if first is not None else self._file.file, f"draw with torch instead; {HINT}")
        gradients = {name: p.grad for name, p in self.module.named_parameters(remove_duplicate=False) if p.grad is not None}
        outcome = Outcome(loss.detach(), gradients, self.buffers())
        self._restore()
        return seen, outcome

    def _failed(self, error: Exception) -> Exception:
        source = error_source(error.__traceback__)
        said = (str(error).strip().splitlines() or [""])[0]
        if "not implemented for 'Half'" in said or "not implemented for 'BFloat16'" in said:
            return NoKernel(said)
        line = f" at `{source.code}`" if source.code else ""
        message = f"the step can be recorded, but not run{line}: {type(error).__name__}: {said}"
        return InputError("proof", message, source.place(self._file.file), "run the model once on CPU with example_inputs")

    def _restore(self) -> None:
        """Put the state back, and forget the gradients."""
        with torch.no_grad():
            for table, name, tensor, value in self._state:
                table[name] = tensor
                tensor.data.copy_(value)
                tensor.grad = None

    def _prepare(self, dtype: torch.dtype) -> None:
        """Cast; and move parameters that are all one value, or an argument taken for another would not be noticed."""
        generator = torch.Generator().manual_seed(SEED)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.is_floating_point() and tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.is_floating_point() and parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                    noise = torch.rand(parameter.shape, generator=generator) * 0.05
                    parameter.add_(noise.to(parameter.dtype))


def _numpy_state() -> bytes:
    """NumPy's global generator, if anybody has loaded NumPy."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return b""
    state = numpy.get_state(legacy=True)
    return bytes(state[1].tobytes()) + repr(state[2:]).encode()


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on memory of its own with the same strides."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return deepcopy(tensor.detach())
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor.detach())


def _cast(inputs: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(_: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    positional, keyword = inputs
    return tuple(adopt_nested(cast, "", value) for value in positional), {k: adopt_nested(cast, "", v) for k, v in keyword.items()}
