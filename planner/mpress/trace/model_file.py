"""Loads the user's model file behind a fence: its prints go to stderr, it sees no arguments, its `__main__` part never runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mpress.errors import InputError, MpressError
from mpress.trace.construction import Construction, Values
from mpress.trace.failures import host_memory, out_of_memory
from mpress.trace.fence import fence, generators_kept, refuse_hidden_code
from mpress.trace.semantics import gpu_semantics
from mpress.trace.source import error_source

Value = int | float | bool | str
_STUB = """add this to the file:

def build_model(**kw):
    return {model}

def example_inputs(batch=1):
    return (torch.randn(batch, 16),)

def loss(out):              # not needed when the model returns its loss
    return out.square().mean()"""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The user's functions.  `name` is the file's stem; `folder` bounds where errors are looked for; `arguments` are parsed --model-arg.

    assumptions: what was taken for granted in making them, in words.  freezes_idle: a parameter no gradient reaches is frozen, not refused.
    """

    name: str
    file: str
    folder: Path
    factory_name: str
    factory: Callable[..., Any]
    inputs: Callable[..., Any]
    loss: Callable[[Any], Any] | None
    arguments: dict[str, Value]
    assumptions: tuple[str, ...] = ()
    freezes_idle: bool = False
    twin: Callable[[], Any] | None = None


def parse_value(text: str) -> Value:
    """Read a --model-arg value as int, float or bool where it looks like one, else as text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _execute(path: Path) -> ModuleType:
    """Import the file without writing bytecode, under a name that is not __main__."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError("model-file", f"cannot read the model file: {error.strerror}", str(path), "check the path") from None
    module = ModuleType(f"mpress_user_model_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    with fence(path), gpu_semantics(tracing=False):
        try:
            exec(compile(source, str(path), "exec"), module.__dict__)
        except SyntaxError as error:
            place = f"{path.name}:{error.lineno}" if error.lineno else path.name
            hint = "fix the line" if error.lineno else "save the file as plain UTF-8 text"
            raise InputError("model-file", f"syntax error: {error.msg}", place, hint) from None
        except MpressError:
            raise
        except (Exception, SystemExit) as error:
            if out_of_memory(error):
                raise host_memory(error_source(error.__traceback__, path.parent).place(path.name)) from None
            place = error_source(error.__traceback__, path.parent).place(path.name)
            message = f"importing the model file failed: {type(error).__name__}: {error}"
            raise InputError("model-file", message, place, "the file must be importable without arguments or data") from None
    return module


def _missing(module: ModuleType, file: str, function: str) -> InputError:
    found = sorted(
        name
        for name, item in vars(module).items()
        if isinstance(item, type) and issubclass(item, nn.Module) and item.__module__ == module.__name__
    )
    listing = f"; modules defined there: {', '.join(found)}" if found else "; it defines no nn.Module"
    stub = _STUB.format(model=f"{found[-1] if found else 'MyModel'}(**kw)")
    return InputError("model-file", f"the model file has no function '{function}'{listing}", file, stub)


def load(path: str, model_args: Mapping[str, str]) -> ModelFile:
    """Load "model.py" or "model.py:factory".  Raises InputError("model-file") for a file that is missing or lacks a function."""
    text, _, factory_name = path.rpartition(":") if ":" in path and not path.endswith(".py") else (path, "", "build_model")
    place = Path(text).resolve()
    if not place.is_file():
        raise InputError("model-file", f"there is no file '{text}'", text, "give the path of a Python file that defines build_model")
    module = _execute(place)
    functions: dict[str, Callable[..., Any]] = {}
    for name in (factory_name, "example_inputs"):
        function = getattr(module, name, None)
        if not callable(function):
            raise _missing(module, place.name, name)
        functions[name] = function
    loss, twin = getattr(module, "loss", None), getattr(module, "twin", None)
    return ModelFile(
        name=place.stem,
        file=place.name,
        folder=place.parent,
        factory_name=factory_name,
        factory=functions[factory_name],
        inputs=functions["example_inputs"],
        loss=loss if callable(loss) else None,
        arguments={key: parse_value(value) for key, value in sorted(model_args.items())},
        twin=twin if callable(twin) else None,
    )


def shrunken(model: ModelFile) -> ModelFile | None:
    """The same file with the arguments of the user's twin(), None where it defines none: the same model, small enough to run on a CPU.

    twin() returns what build_model and example_inputs are to be called with, such as dict(layers=2, hidden=64); --model-arg that it does
    not name stay.
    """
    if model.twin is None:
        return None
    with fence(model.folder / model.file), generators_kept(seeded=True):
        given = _call(model, "twin", model.twin, {})
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        hint = "return the keyword arguments of build_model: dict(layers=2, hidden=64)"
        raise InputError("model-file", f"twin returned {type(given).__name__}, not a dict of arguments", model.file, hint)
    return replace(model, arguments={**model.arguments, **given})


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Value]) -> dict[str, Value]:
    parameters = inspect.signature(function).parameters
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
        return dict(arguments)
    return {key: value for key, value in arguments.items() if key in parameters}


def _call(model: ModelFile, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        hint = f"check --model-arg against the parameters of {name}{inspect.signature(function)}"
        raise InputError("model-arg", f"{name} does not accept these --model-arg: {error}", model.file, hint) from None
    try:
        return function(**arguments)
    except MpressError:
        raise
    except (Exception, SystemExit) as error:
        place = error_source(error.__traceback__, model.folder).place(model.file)
        if out_of_memory(error):
            raise host_memory(place) from None
        hint = "build_model runs on the 'meta' device: it must not read weight values; check --model-arg"
        raise InputError("model-file", f"{name} failed: {type(error).__name__}: {error}", place, hint) from None


def build(model: ModelFile, construction: Construction | None = None) -> nn.Module:
    """Build the user's model on the meta device (no weight is allocated), in training mode; `construction` notes where values come from."""
    construction = construction or Construction()
    with fence(model.folder / model.file), gpu_semantics(tracing=False), torch.device("meta"), Values(construction), construction:
        module = _call(model, model.factory_name, model.factory, model.arguments)
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise InputError("model-file", f"{model.factory_name} returned {kind}, not an nn.Module", model.file, "return the model itself")
    refuse_hidden_code(module, model.file)
    return module.train()


def build_for_real(model: ModelFile) -> nn.Module:
    """Build the user's model with real weights on the CPU, in training mode."""
    with fence(model.folder / model.file):
        module = _call(model, model.factory_name, model.factory, model.arguments)
    assert isinstance(module, nn.Module), "build() has seen it"
    return module.train()


def _holds_tensors(value: Any) -> bool:
    """An object, no tensor itself, with a tensor among its attributes."""
    if isinstance(value, torch.Tensor):
        return False
    names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__dataclass_fields__", {})]
    return any(isinstance(getattr(value, name, None), torch.Tensor) for name in names)


def example_inputs(model: ModelFile, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the user's example_inputs(batch=...) for real, on CPU; returns positional and keyword arguments of the forward."""
    arguments = {**_accepted(model.inputs, model.arguments), "batch": batch}
    with fence(model.folder / model.file):
        made = _call(model, "example_inputs", model.inputs, arguments)
    for leaf in tree_leaves(made):
        if _holds_tensors(leaf):  # its tensors would be taken for constants of the model
            what = f"example_inputs hands over a {type(leaf).__name__} that holds tensors; only tuples, lists and dicts are looked into"
            hint = "pass its tensors as arguments of their own, or make a dict or a NamedTuple of it"
            raise InputError("model-file", what, model.file, hint)
    if isinstance(made, Mapping):
        return (), dict(made)
    if isinstance(made, tuple | list):
        return tuple(made), {}
    if isinstance(made, torch.Tensor):
        return (made,), {}
    raise InputError("model-file", f"example_inputs returned {type(made).__name__}", model.file, "return a tuple or a dict of tensors")
