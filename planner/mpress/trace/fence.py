"""The fence around the user's code: what it prints goes to stderr, and the process is afterwards what it was before.

`fence` surrounds one call of the user's code.  `preserved` surrounds a whole trace: what a model file sets when it is imported (a default
dtype, the environment) holds until its step is recorded, and not longer.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpress.errors import InputError
from mpress.trace.source import current_source


@contextmanager
def fence(path: Path) -> Iterator[None]:
    """Run user code: stdout is stderr, sys.argv is [file], its folder can be imported from, nothing is written beside the user's files.

    torch's generator starts from 0 and is left as it was.  Those of Python and numpy go on: a step that draws from them must be noticed.
    """
    saved_argv, saved_path, saved_bytecode = sys.argv, list(sys.path), sys.dont_write_bytecode
    sys.argv, sys.dont_write_bytecode = [str(path)], True
    sys.path.insert(0, str(path.parent))
    try:
        with redirect_stdout(sys.stderr), _raw_stdout_to_stderr(), _no_compiler(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        sys.argv, sys.path[:], sys.dont_write_bytecode = saved_argv, saved_path, saved_bytecode


@contextmanager
def _raw_stdout_to_stderr() -> Iterator[None]:
    """What C code writes to file descriptor 1 goes to 2."""
    try:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        kept = os.dup(1)
    except (OSError, ValueError):  # the process has no stdout
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def generators_kept(seeded: bool) -> Iterator[None]:
    """Python's and numpy's generators are afterwards as before; seeded: they start from 0 inside, so made-up data is always the same."""
    numpy: Any = sys.modules.get("numpy")
    state, drawn = random.getstate(), None if numpy is None else numpy.random.get_state()
    if seeded:
        random.seed(0)
        if numpy is not None:
            numpy.random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(drawn)


@contextmanager
def _no_compiler() -> Iterator[None]:
    """torch.compile is refused where it is called: what it makes cannot be watched."""
    before = torch.compile
    torch.compile = _refuse_compiler
    try:
        yield
    finally:
        torch.compile = before


def _refuse_compiler(*_arguments: Any, **_named: Any) -> Any:
    source = current_source()
    line = f": `{source.code}`" if source.code else ""
    raise InputError(
        "trace",
        f"torch.compile hides the operators of what it compiles{line}",
        source.place(),
        "leave it out: the emitted program is eager",
    )


def refuse_hidden_code(model: nn.Module, file: str) -> None:
    """Refuse modules whose operators cannot be watched."""
    for name, module in model.named_modules():
        compiled = type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        if compiled or isinstance(module, torch.jit.ScriptModule):
            how = "torch.compile" if compiled else "torch.jit.script"
            where = f"{file}: {name}" if name else file
            hint = "build the module without it: the emitted program is eager"
            raise InputError(
                "trace", f"module '{name or type(module).__name__}' went through {how}, which hides its operators", where, hint
            )


@contextmanager
def preserved(folder: Path) -> Iterator[None]:
    """Flags of torch, environment, logging, warnings and modules of the user's folder are afterwards what they were before."""
    environment, directory, loaded, known = dict(os.environ), Path.cwd(), set(sys.modules), dict(sys.modules)
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    restore = _torch_flags()
    try:
        with warnings.catch_warnings(), generators_kept(seeded=False):
            yield
    finally:
        restore()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)
        for name in set(sys.modules) - loaded:
            if _is_of(sys.modules[name], folder):
                del sys.modules[name]
        for name, module in known.items():
            if sys.modules.get(name) is not module and _is_of(module, folder):
                sys.modules[name] = module


def _is_of(module: Any, folder: Path) -> bool:
    """Whether a module was loaded from the user's folder; installed libraries stay, wherever they lie."""
    file = getattr(module, "__file__", None)
    return file is not None and folder in Path(file).parents and "site-packages" not in Path(file).parts


def _torch_flags() -> Any:
    """What puts the flags of torch back to what they are now."""
    dtype, threads, gradients = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    deterministic, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    precision, benchmark, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    anomaly, cached = torch.is_anomaly_enabled(), torch.is_autocast_cache_enabled()
    casts = {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")}

    def restore() -> None:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, cudnn
        torch.autograd.set_detect_anomaly(anomaly)
        torch.set_autocast_cache_enabled(cached)
        for device, (enabled, cast) in casts.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, cast)

    return restore


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The attributes of a module and of all inside it, with its tables of parameters, buffers and children, are afterwards as before."""
    before = [
        (module, dict(module.__dict__), {key: dict(value) for key, value in module.__dict__.items() if isinstance(value, dict)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, tables in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for key, table in tables.items():
                attributes[key].clear()
                attributes[key].update(table)
