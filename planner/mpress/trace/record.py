"""Records one training step of the user's model (forward, loss, backward) on fake tensors: no weight is allocated, nothing is computed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as module_hooks
from torch.utils._pytree import tree_map

from mpress.errors import InputError, MpressError
from mpress.graph import Graph, Kind
from mpress.in_place import merge_in_place
from mpress.options import Depth
from mpress.trace import fake_kernels  # noqa: F401  # registers them
from mpress.trace.as_eager import as_eager, no_hidden_draws
from mpress.trace.construction import Construction
from mpress.trace.depth import record_few
from mpress.trace.failures import explained
from mpress.trace.fence import fence, preserved, untouched
from mpress.trace.hugging_face import is_configuration, open_configuration
from mpress.trace.lower import Given, Named, lower
from mpress.trace.model_file import ModelFile, build, example_inputs, load
from mpress.trace.recorder import Recorder
from mpress.trace.semantics import Semantics, gpu_semantics
from mpress.trace.setup import first_values, with_setup
from mpress.trace.source import entry, forget_sources
from mpress.trace.visits import Watcher

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def trace(
    path: str,
    *,
    model_args: Mapping[str, str],
    micro_batch: int,
    precision: str,
    semantics: Semantics = Semantics(),  # noqa: B008  # frozen
    sequence: int = 0,
    depth: Depth = Depth.FAST,
    on_note: Callable[[str], None] = lambda words: None,
) -> Graph:
    """Trace "model.py" (or "model.py:factory") at `micro_batch` samples with parameters and inputs in fp32, bf16 or fp16.

    Also a transformers "config.json", in sequences of `sequence` tokens (0: the default length).
    `depth` changes how long it takes and nothing else; `on_note` hears how the layers were recorded.
    Raises InputError for a file that cannot be loaded and a model that cannot be planned.
    """
    with preserved(Path(path).resolve().parent):
        model_file = open_model(path, model_args, sequence)
        return trace_file(model_file, micro_batch=micro_batch, precision=precision, semantics=semantics, depth=depth, on_note=on_note)


def open_model(path: str, model_args: Mapping[str, str], sequence: int = 0) -> ModelFile:
    """Load a model file or a transformers configuration anew, to trace it once or at several sizes."""
    forget_sources()
    if is_configuration(path):
        return open_configuration(path, model_args, sequence)
    if sequence:
        hint = "pass the length to build_model and example_inputs by --model-arg"
        raise InputError("seq-len", "--seq-len is for transformers configurations", path, hint)
    return load(path, model_args)


def trace_file(
    model_file: ModelFile,
    *,
    micro_batch: int,
    precision: str,
    semantics: Semantics,
    depth: Depth = Depth.FAST,
    on_note: Callable[[str], None] = lambda words: None,
) -> Graph:
    """As `trace`, of a model file that is loaded already; the model is built anew each time."""
    dtype = PRECISIONS.get(precision)
    if dtype is None:
        raise InputError("precision", f"'{precision}' is not a precision", "--precision", f"use one of {', '.join(sorted(PRECISIONS))}")
    if micro_batch < 1:
        raise InputError("micro-batch", f"a micro-batch of {micro_batch} samples is empty", "--micro-batch", "use 1 or more")
    with _collector_off():
        construction = Construction()
        model = build(model_file, construction)
        made = first_values(model, construction)
        positional, keyword = example_inputs(model_file, micro_batch)
        with untouched(model):
            few = record_few(
                model, lambda watcher: _record(model_file, model, positional, keyword, micro_batch, dtype, semantics, watcher), depth
            )
        on_note(few.note)
        graph = few.graph
        if graph is None:
            if few.tried:
                model = build(model_file)  # as the user makes it: what a failed attempt may have left behind is gone
            with untouched(model):
                graph = _record(model_file, model, positional, keyword, micro_batch, dtype, semantics)
        graph = with_setup(merge_in_place(graph), made)
    return replace(graph, assumptions=(*model_file.assumptions, *graph.assumptions))


def _record(
    model_file: ModelFile,
    model: nn.Module,
    positional: tuple[Any, ...],
    keyword: dict[str, Any],
    micro_batch: int,
    dtype: torch.dtype,
    semantics: Semantics,
    watcher: Watcher | None = None,
) -> Graph:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    paths = {module: name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    recorder = Recorder(paths, type(model).__name__, fake_mode)
    parameters, buffers, trained = _adopt_state(model, fake_mode, recorder, dtype)
    given: list[Given] = []

    def adopt(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        target = dtype if value.is_floating_point() else value.dtype
        fake = _fake(fake_mode, torch.empty_strided(value.shape, value.stride(), dtype=target, device="meta"))
        given.append(Given(name, recorder.adopt(fake, Kind.INPUT, name, value), *value_range(value)))
        return fake

    names = input_names(model, len(positional))
    fake_positional = tuple(adopt_nested(adopt, name, value) for name, value in zip(names, positional, strict=True))
    fake_keyword = {name: adopt_nested(adopt, name, value) for name, value in keyword.items()}
    arrived: list[tuple[str, int]] = []
    for name, tensor in trained:
        tensor.register_hook(_on_gradient(recorder, arrived, name))
    loss = _step(model_file, model, recorder, fake_mode, fake_positional, fake_keyword, semantics, watcher)
    reached = {name for name, _ in arrived}
    idle = [parameter.names[0] for parameter in parameters if parameter.trainable and parameter.names[0] not in reached]
    if idle and not model_file.freezes_idle:
        hint = "freeze it with requires_grad_(False), or remove it from the model"
        raise InputError("no-gradient", f"parameter '{idle[0]}' gets no gradient from the loss", idle[0], hint)
    parameters = tuple(replace(parameter, trainable=parameter.trainable and parameter.names[0] in reached) for parameter in parameters)
    graph = lower(model_file.name, micro_batch, recorder, parameters, buffers, tuple(given), loss, tuple(arrived))
    return replace(graph, assumptions=(*graph.assumptions, _idle_words(idle))) if idle else graph


def _idle_words(idle: list[str]) -> str:
    more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
    return f"{idle[0]}{more}: no gradient reaches them, so they are kept as they are, without optimizer state"


def value_range(value: torch.Tensor) -> tuple[int, int]:
    """The least and greatest value of an integer input, (0, 0) of any other."""
    whole = not value.is_floating_point() and not value.is_complex() and value.numel() > 0
    return (int(value.min()), int(value.max())) if whole else (0, 0)


def _fake(mode: FakeTensorMode, meta: torch.Tensor) -> torch.Tensor:
    return FakeTensor(mode, meta, torch.device("cpu"))


def _adopt_state(
    model: nn.Module, mode: FakeTensorMode, recorder: Recorder, dtype: torch.dtype
) -> tuple[tuple[Named, ...], tuple[Named, ...], list[tuple[str, Any]]]:
    """Replace parameters and buffers by fake ones of the wanted precision; tied ones (one object, several names) stay tied.

    Returns the parameters, the buffers, and the fake tensor of each trained parameter by its name.
    """
    memo: dict[int, torch.Tensor] = {}
    names: dict[int, list[str]] = {}
    originals: list[torch.Tensor] = []
    for prefix, module in model.named_modules(remove_duplicate=True):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in memo:
                    target = dtype if tensor.is_floating_point() else tensor.dtype
                    is_parameter = isinstance(tensor, nn.Parameter)
                    # an emitted program holds buffers densely, also those the constructor expands
                    stride = tensor.stride() if is_parameter else torch.empty(tensor.shape, device="meta").stride()
                    fake = _fake(mode, torch.empty_strided(tensor.shape, stride, dtype=target, device="meta"))
                    memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    names[id(tensor)] = []
                    originals.append(tensor)
                names[id(tensor)].append(f"{prefix}.{name}" if prefix else name)
                table[name] = memo[id(tensor)]
    found: dict[bool, list[Named]] = {True: [], False: []}
    trained: list[tuple[str, Any]] = []
    for original in originals:
        is_parameter = isinstance(original, nn.Parameter)
        known = tuple(names[id(original)])
        value = recorder.adopt(memo[id(original)], Kind.PARAMETER if is_parameter else Kind.BUFFER, known[0])
        found[is_parameter].append(Named(known, value, is_parameter and original.requires_grad, original.numel()))
        if is_parameter and original.requires_grad:
            _carry_hooks(original, memo[id(original)], known[0])
            trained.append((known[0], memo[id(original)]))
    return tuple(found[True]), tuple(found[False]), trained


def _carry_hooks(original: Any, fake: Any, name: str) -> None:
    """Hooks the user put on a parameter while building the model."""
    for hook in (original._backward_hooks or {}).values():
        fake.register_hook(hook)
    if original._post_accumulate_grad_hooks:
        message = f"parameter '{name}' has a hook that runs after its gradient is accumulated"
        raise InputError("trace", message, name, "step the optimizer outside of the backward; the emitted program runs it once a step")


def adopt_nested(adopt: Any, name: str, value: Any) -> Any:
    """Apply adopt(name, tensor) to the tensors of one argument; those inside lists and dicts are called "name.0", "name.1"."""
    if isinstance(value, torch.Tensor):
        return adopt(name, value)
    count = iter(range(1_000_000))
    return tree_map(lambda leaf: adopt(f"{name}.{next(count)}", leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def input_names(model: nn.Module, count: int) -> list[str]:
    """Names of the positional parameters of the model's forward, "input0" where it has none."""
    code = getattr(type(model).forward, "__code__", None)
    declared = list(code.co_varnames[1 : code.co_argcount]) if code is not None else []
    return (declared + [f"input{i}" for i in range(len(declared), count)])[:count]


def _on_gradient(recorder: Recorder, arrived: list[tuple[str, int]], name: str) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        arrived.append((name, recorder.find(gradient)))

    return hook


def _step(
    model_file: ModelFile,
    model: nn.Module,
    recorder: Recorder,
    mode: FakeTensorMode,
    positional: tuple[Any, ...],
    keyword: dict[str, Any],
    semantics: Semantics,
    watcher: Watcher | None,
) -> int:
    """Forward, loss and backward under the recorder; returns the value of the loss."""
    try:
        with (
            fence(model_file.folder / model_file.file),
            gpu_semantics(True, semantics),
            as_eager(),
            no_hidden_draws(model_file.file),
            _module_hooks(recorder),
            _quiet_fakes(),
            _portable_kernels(),
            torch.autograd.set_multithreading_enabled(False),
            torch.enable_grad(),
            mode,
            recorder,
            recorder.listening(),
            saved_tensors_hooks(recorder.pack, recorder.unpack),
        ):
            if watcher is not None:
                watcher.begins(recorder)
            result = model(*positional, **keyword)
            loss = scalar_loss(model_file, result)
            del result  # as in `loss = criterion(model(x)); loss.backward()`: only the loss is held on to
            number = recorder.find(loss)
            if watcher is not None:
                watcher.forward_ends(recorder)
            with torch.no_grad(), recorder.paused():
                seed = torch.ones_like(loss)
            recorder.start_backward(seed)
            torch.autograd.backward(loss, seed)
            recorder.finish()
            return number
    except MpressError:
        raise
    except (Exception, SystemExit) as error:
        raise explained(error, model_file.file) from None


def scalar_loss(model_file: ModelFile, result: Any) -> torch.Tensor:
    """The loss: the model's result if it is one number, else the user's loss(result)."""
    if not (isinstance(result, torch.Tensor) and result.numel() == 1) and model_file.loss is not None:
        result = model_file.loss(result)
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        what = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        hint = "return the loss from forward, or define loss(out) in the model file"
        raise InputError("loss", f"the model returns {what}, not a loss (one number)", model_file.file, hint)
    if not result.requires_grad:
        raise InputError("no-gradient", "the loss depends on no trainable parameter", model_file.file, "leave some parameters trainable")
    return result


@contextmanager
def _module_hooks(recorder: Recorder) -> Iterator[None]:
    handles = [
        module_hooks.register_module_forward_pre_hook(recorder.enter),
        module_hooks.register_module_forward_hook(recorder.leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Fake tensors log a traceback before they raise; the refusal says it in one sentence."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _portable_kernels() -> Iterator[None]:
    """Without mkldnn, whose recurrent layers are one call that exists on a CPU only and saves what no trace can see."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Recording makes many long-lived objects; collecting garbage among them would take half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _keep_imports()
            gc.enable()


@cache
def _keep_imports() -> None:
    """Once a process: what importing torch and the first recording made stays, the collector need not look through it again and again."""
    gc.freeze()


entry(_step.__code__)
