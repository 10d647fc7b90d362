"""Stacks of equal layers in a model: where a numbered container (nn.ModuleList, nn.Sequential) repeats the same children.

Layers are equal when all that can be seen of them without running them is: classes, parameters, buffers, hyperparameters, functions,
hooks.  A number that only counts the layers (`layer_idx`) may differ; while few layers stand for many, using it raises `DepthError`.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from mpress.errors import MpressError
from mpress.fold import segments
from mpress.trace.source import current_source

FEWEST = 10  # repetitions; with fewer, recording all of them costs about as much as recording some of them twice


class DepthError(MpressError):
    """Why few repetitions cannot stand for all of them: the whole model is recorded instead.  Never leaves the trace package."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__("depth", message, where)


@dataclass(frozen=True, slots=True)
class Stack:
    """Children start, start+1, ... of the module `container` ("h") are `count` repetitions of `period` children.

    counters: attributes that only number the layers, as (module path below the child, attribute).
    """

    container: str
    start: int
    period: int
    count: int
    counters: tuple[tuple[str, str], ...] = ()


class Position:
    """Stands for the number of a layer that stands for others: whoever computes with it depends on which layer it is."""

    __slots__ = ("_attribute",)
    _attribute: str

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute

    def _used(self, *_: Any, **__: Any) -> Any:
        source = current_source()
        raise DepthError(f"the forward uses '{self._attribute}' (`{source.code}`)", source.place())

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __index__ = __int__ = __float__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _used
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __and__ = __or__ = __xor__ = __str__ = __repr__ = __format__ = _used
    __lshift__ = __rshift__ = __divmod__ = __round__ = __getattr__ = _used


_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = tuple(sorted(name for name in _INTERNAL if name.endswith("_hooks")))
_SAME_BY_IDENTITY = (type, Enum, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.Tensor, torch.Generator)
_PLAIN = (type(None), bool, str, bytes, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Signatures:
    """What can be seen of modules, as tokens: equal tokens, equal modules."""

    def __init__(self, model: nn.Module) -> None:
        self._tokens: dict[Any, int] = {}
        self._objects: dict[int, int] = {}
        self._keep: list[Any] = []  # objects whose id is in a token stay alive
        self.modules = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        self._uses = Counter(id(t) for m in model.modules() for table in (m._parameters, m._buffers) for t in table.values())

    def of(self, child: nn.Module) -> tuple[int, tuple[int, ...], tuple[tuple[str, str], ...]]:
        """A token of everything but plain integer attributes; these integers; where they are (part of the token)."""
        inside = list(child.named_modules())
        local = {id(module): index for index, (_, module) in enumerate(inside)}
        tensors: dict[int, int] = {}
        used = Counter(id(t) for _, m in inside for table in (m._parameters, m._buffers) for t in table.values())
        numbers: list[int] = []
        places: list[tuple[str, str]] = []
        facts: list[Any] = []
        for path, module in inside:
            facts.append((path, type(module)))
            facts.append(tuple([(name, local.get(id(m))) for name, m in module._modules.items()]))
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    facts.append((name, self._tensor(tensor, used, tensors)))
            if module._non_persistent_buffers_set:
                facts.append(tuple(sorted(module._non_persistent_buffers_set)))
            values = module.__dict__
            for name in _HOOKS:
                if values.get(name):
                    facts.append((name, tuple([self._value(hook, local) for hook in values[name].values()])))
            for name, value in values.items():
                if name in _INTERNAL:
                    continue
                if type(value) is int:
                    numbers.append(value)
                    places.append((path, name))
                else:
                    facts.append((name, self._value(value, local)))
        return self._token((tuple(facts), tuple(places))), tuple(numbers), tuple(places)

    def _token(self, value: Any) -> int:
        return self._tokens.setdefault(value, len(self._tokens))

    def _tensor(self, tensor: torch.Tensor | None, used: Counter[int], seen: dict[int, int]) -> Any:
        if tensor is None:
            return None
        if self._uses[id(tensor)] != used[id(tensor)]:
            return ("shared", id(tensor))
        hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
        first = seen.setdefault(id(tensor), len(seen))
        shape, stride = tuple(tensor.shape), tensor.stride()
        return (type(tensor), shape, stride, tensor.dtype, tensor.requires_grad, first, id(tensor) if hooks else 0)

    def _value(self, value: Any, local: dict[int, int]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return (kind, value)
        if kind in (int, float):
            return (kind, repr(value))
        if kind in (tuple, list, torch.Size):
            return (kind, tuple([self._value(item, local) for item in value]))
        if kind in (set, frozenset):
            return (kind, frozenset([self._value(item, local) for item in value]))
        if kind is dict:
            return (kind, tuple([(self._value(key, local), self._value(item, local)) for key, item in value.items()]))
        if isinstance(value, nn.Module):
            return ("module", local.get(id(value), -id(value)))
        if kind is types.MethodType:
            return (kind, value.__func__, self._value(value.__self__, local))
        if kind is functools.partial:
            return (kind, self._value((value.func, value.args, value.keywords), local))
        if isinstance(value, _SAME_BY_IDENTITY) or not hasattr(value, "__dict__"):
            return (kind, id(value))
        known = self._objects.get(id(value))
        if known is None:
            self._objects[id(value)] = -1 - id(value)  # an object that contains itself
            self._keep.append(value)
            known = self._objects[id(value)] = self._token((kind, self._value(vars(value), local)))
        return (kind, known)


def find_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """All stacks of at least FEWEST repetitions, none inside another, in the order of the model's modules."""
    signatures = _Signatures(model)
    found: list[Stack] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        children = list(module._modules.items())
        numbered = len(children) >= FEWEST and all(name == str(index) for index, (name, _) in enumerate(children))
        if not numbered or signatures.modules[id(module)] > 1 or any(c is None or signatures.modules[id(c)] > 1 for _, c in children):
            continue
        here = _runs(path, [signatures.of(child) for _, child in children if child is not None])
        found += here
        for stack in here:
            for index in range(stack.start, stack.start + stack.period * stack.count):
                inside |= {id(part) for part in module._modules[str(index)].modules()}
    return tuple(found)


def _runs(path: str, children: Sequence[tuple[int, tuple[int, ...], tuple[tuple[str, str], ...]]]) -> list[Stack]:
    """The runs of equal children in one container."""
    alike: dict[int, list[int]] = {}
    for index, (token, _, _) in enumerate(children):
        alike.setdefault(token, []).append(index)
    counters: dict[int, set[int]] = {}
    for token, members in alike.items():
        columns = range(len(children[members[0]][1]))
        counters[token] = {
            column for column in columns if len(members) > 1 and len({children[index][1][column] - index for index in members}) == 1
        }
    keys = [(token, tuple([n for column, n in enumerate(numbers) if column not in counters[token]])) for token, numbers, _ in children]
    kinds = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    stacks, start = [], 0
    for segment in segments([kinds[key] for key in keys]):
        period = len(segment.period)
        if segment.count >= FEWEST:
            places = dict.fromkeys(
                children[index][2][column] for index in range(start, start + period) for column in sorted(counters[children[index][0]])
            )
            stacks.append(Stack(path, start, period, segment.count, tuple(places)))
        start += period * segment.count
    return stacks


@contextmanager
def truncated(model: nn.Module, stacks: Sequence[Stack], kept: int) -> Iterator[None]:
    """Keep the first `kept` repetitions of every stack; the containers and all attributes are as before when the block ends."""
    containers = {stack.container: model.get_submodule(stack.container) for stack in stacks}
    before = {path: dict(container._modules) for path, container in containers.items()}
    try:
        for path, container in containers.items():
            drop = {
                index
                for stack in stacks
                if stack.container == path
                for index in range(stack.start + kept * stack.period, stack.start + stack.count * stack.period)
            }
            rest = [child for index, child in enumerate(before[path].values()) if index not in drop]
            container._modules.clear()
            container._modules.update((str(index), child) for index, child in enumerate(rest))
        with unchanged(model):
            for stack in stacks:
                for index in range(stack.start, stack.start + kept * stack.period):
                    child = before[stack.container][str(index)]
                    for below, attribute in stack.counters:
                        place = child.get_submodule(below) if child is not None else None
                        if place is not None and attribute in place.__dict__:
                            place.__dict__[attribute] = Position(attribute)
            yield
    finally:
        for path, container in containers.items():
            container._modules.clear()
            container._modules.update(before[path])


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo what the block does to attributes of modules: a forward may count its calls or keep what it made."""
    before = [(module, dict(module.__dict__), _copies(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, content in contents:
                held = attributes[name]
                held.clear()
                held.extend(content) if isinstance(held, list) else held.update(content)


def _copies(attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value.copy()) for name, value in attributes.items() if isinstance(value, dict | list | set) and name != "_modules"]
