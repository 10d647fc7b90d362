"""From a recording of few repetitions of each stack to the recording of all of them, equal to it in every id, name and number.

Nothing is guessed: two repetitions in the middle are compared field by field, every number in them is either the same or a neighbour's
(`Axis.line`), and only what this comparison explains is repeated.  Anything else raises DepthError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, TypeVar

from mpress.graph import Accumulation, Buffer, Contribution, Graph, Op, Parameter, Phase, Ref, Storage, Tensor, reads
from mpress.trace.repeats import Axis, Line, Region
from mpress.trace.stacks import DepthError, Stack
from mpress.trace.visits import Given, Made, Visit

T = TypeVar("T")
Make = Callable[[int], Any]  # from c to the value in the c-th repetition from the earlier twin on
_KINDS: dict[type, dict[str, str]] = {
    Op: {
        "id": "op", "args": "argument", "kwargs": "argument", "outputs": "tensors", "module": "path", "forward_op": "op",
        "mutates": "tensors", "random_key": "key", "repeats": "op",
    },
    Tensor: {"id": "tensor", "storage": "storage", "name": "path"},
    Storage: {"id": "storage", "born": "op", "dies": "op"},
    Parameter: {"names": "paths", "tensor": "tensor"},
    Buffer: {"names": "paths", "tensor": "tensor", "initial": "tensor"},
    Contribution: {"parameter": "path", "tensor": "tensor"},
    Accumulation: {"after": "op", "frees": "storages", "drops": "drops"},
    Visit: {"path": "path", "first": "op", "end": "op", "inputs": "argument", "outputs": "argument"},
    Made: {"op": "op"},
    Given: {"name": "path"},
}  # fmt: skip
_EACH = {"tensors": "tensor", "storages": "storage", "paths": "path", "drops": "accumulations", "argument": "argument"}


class Varying:
    """A value that is another one in each repetition."""

    __slots__ = ("make",)

    def __init__(self, make: Make) -> None:
        self.make = make


def unroll(
    small: Graph, visits: Sequence[Visit], stacks: Sequence[Stack], ends: int, more: Sequence[int]
) -> tuple[Graph, tuple[Visit, ...]]:
    """The Graph, and the visits of layers, with more[i] repetitions more of stacks[i] (-1: one less).

    `small` has `ends` + 2 + `ends` repetitions of each.  Graph.checkpoints is left as it is.
    """
    unrolled = _Unroll(small, tuple(visits), stacks, ends, more)
    return unrolled.graph(), unrolled.visits()


class _Paths:
    """Module paths and names: those in a container of stacks have a number that moves."""

    def __init__(self, stacks: Sequence[Stack], ends: int, more: Sequence[int]) -> None:
        self.firsts: list[int] = []  # of each stack, the number of its first child in the small recording
        regions: dict[str, list[Region]] = {}
        for index, stack in enumerate(stacks):
            shorter = sum((s.count - 2 * ends - 2) * s.period for s in stacks[:index] if s.container == stack.container)
            self.firsts.append(stack.start - shorter)
            here = regions.setdefault(stack.container, [])
            here.append(Region(self.firsts[-1] + ends * stack.period, stack.period, index))
        self.axes = {container: Axis(f"names in '{container}'", found, more) for container, found in regions.items()}
        ordered = sorted((re.escape(container) for container in regions), key=len, reverse=True)
        self._pattern = re.compile(rf"({'|'.join(ordered)})\.(\d+)(?=\.|$)")
        if "" in regions:  # the model itself is the container
            self._pattern = re.compile(r"()(\d+)(?=\.|$)")

    def split(self, path: str) -> tuple[str, int, str] | None:
        """ "h.3.attn" -> ("h", 3, ".attn"), None if the path is in no container of stacks."""
        found = self._pattern.match(path)
        return (found[1], int(found[2]), path[found.end() :]) if found else None

    def outside(self, path: str) -> str:
        """The path in the long recording of something outside the repeated layers."""
        found = self.split(path)
        return path if found is None else _joined(found[0], self.axes[found[0]].outside(found[1]), found[2])

    def line(self, one: str, two: str) -> str | Varying:
        """The path, or a function from c to it, where the twins say `one` and `two`."""
        first, second = self.split(one), self.split(two)
        if first is None or second is None or (first[0], first[2]) != (second[0], second[2]):
            if one != two:
                raise DepthError(f"two repetitions differ: '{one}' and '{two}'")
            return self.outside(one)
        container, _, rest = first
        line = self.axes[container].line(first[1], second[1])
        if not line.step:
            return _joined(container, line.at, rest)
        prefix = f"{container}." if container else ""
        return Varying(lambda c: f"{prefix}{line.at + c * line.step}{rest}")


def _joined(container: str, index: int, rest: str) -> str:
    return f"{container}.{index}{rest}" if container else f"{index}{rest}"


class _Unroll:
    def __init__(self, small: Graph, visits: tuple[Visit, ...], stacks: Sequence[Stack], ends: int, more: Sequence[int]) -> None:
        self._small, self._visits, self._ends, self._more = small, visits, ends, more
        self._paths = _Paths(stacks, ends, more)
        ops = [found for index, stack in enumerate(stacks) for found in self._op_regions(index, stack)]
        holders = {
            kind: [self._holder_region(index, stack, kind) for index, stack in enumerate(stacks)] for kind in ("parameters", "buffers")
        }
        tensors = self._tensor_regions(ops, holders)
        storages = self._storage_regions(tensors)
        self._axes = {
            "op": Axis("operators", ops, more),
            "tensor": Axis("tensors", tensors, more),
            "storage": Axis("storages", storages, more),
            "parameters": Axis("parameters", (r for r, _ in holders["parameters"]), more),
            "buffers": Axis("buffers", (r for r, _ in holders["buffers"]), more),
            "contributions": Axis("gradients", self._contribution_regions(ops), more),
            "accumulations": Axis("sums of gradients", self._followers(ops, [a.after for a in small.accumulations], "sums"), more),
            "visits": Axis("calls", [self._visit_region(index, stack) for index, stack in enumerate(stacks)], more),
        }
        self._draws = self._draw_axes(ops)
        self._refs: dict[int, Ref] = {}

    # -- where the repetitions are -----------------------------------------------------------------------------------------------

    def _op_regions(self, index: int, stack: Stack) -> list[Region]:
        """The forward operators from one repetition's first to the next one's first, and the backward operators that belong to them."""
        first = self._paths.firsts[index]
        ends = self._ends
        starts = [-1] * (2 * ends + 2)
        for op in self._small.ops:
            found = self._paths.split(op.module) if op.phase is Phase.FORWARD else None
            if found is not None and found[0] == stack.container and 0 <= found[1] - first < len(starts) * stack.period:
                repetition = (found[1] - first) // stack.period
                if starts[repetition] < 0:
                    starts[repetition] = op.id
        if -1 in starts or sorted(starts) != starts:
            raise DepthError(f"the layers of '{stack.container}' do not run one after the other")
        regions = [self._region(starts[ends], starts[ends + 1], index, falling=False)]
        backward = [-1, -1]
        for op in self._small.ops:
            link = max(op.forward_op, op.repeats) if op.phase is Phase.BACKWARD else -1
            for twin in (0, 1):
                if backward[twin] < 0 and starts[ends + twin] <= link < starts[ends + twin + 1]:
                    backward[twin] = op.id
        if backward != [-1, -1]:
            regions.append(self._region(backward[1], backward[0], index, falling=True))
        return regions

    def _region(self, first: int, second: int, stack: int, *, falling: bool) -> Region:
        region = Region(first, second - first, stack, falling)
        if first < 0 or region.length <= 0 or region.end > len(self._small.ops):
            raise DepthError("the backward does not go through the layers one after the other")
        return region

    def _holder_region(self, index: int, stack: Stack, kind: str) -> tuple[Region, Region]:
        """Parameters or buffers whose first name is in a twin, and their tensors."""
        first = self._paths.firsts[index] + self._ends * stack.period
        halves: list[list[int]] = [[], []]
        holders: tuple[Parameter | Buffer, ...] = getattr(self._small, kind)
        for number, holder in enumerate(holders):
            found = self._paths.split(holder.names[0])
            if found is not None and found[0] == stack.container and 0 <= found[1] - first < 2 * stack.period:
                halves[(found[1] - first) // stack.period].append(number)
        tensors = [[holders[number].tensor for number in half] for half in halves]
        return self._dense(halves, index, kind), self._dense(tensors, index, f"tensors of {kind}")

    def _dense(self, halves: list[list[int]], stack: int, name: str, *, falling: bool = False) -> Region:
        """The region of two runs of consecutive numbers."""
        both = halves[0] + halves[1]
        if len(halves[0]) != len(halves[1]) or any(b - a != 1 for a, b in pairwise(both)):
            raise DepthError(f"the {name} of two repetitions do not follow each other")
        return Region(both[0] if both else 0, len(halves[0]), stack, falling)

    def _tensor_regions(self, ops: list[Region], holders: dict[str, list[tuple[Region, Region]]]) -> list[Region]:
        """Tensors have numbers in the order of their first use: holders, inputs, loss and seed, then operator by operator."""
        small = self._small
        known = max([small.loss, small.seed, *(h.tensor for h in small.holders), *(i.tensor for i in small.inputs)]) + 1
        seen = [known]
        for op in small.ops:
            known = max(known, 1 + max([*reads(op), *op.outputs, *op.mutates], default=-1))
            seen.append(known)
        return [found for pairs in holders.values() for _, found in pairs if found.length] + _mapped(ops, seen, "tensors")

    def _storage_regions(self, tensors: list[Region]) -> list[Region]:
        """Storages have numbers in the order of their first tensor."""
        seen = [0]
        for tensor in self._small.tensors:
            seen.append(max(seen[-1], tensor.storage + 1))
        return _mapped(tensors, seen, "storages")

    def _contribution_regions(self, ops: list[Region]) -> list[Region]:
        """Gradients of parameters are in the order of the operators that make them."""
        maker = {output: op.id for op in self._small.ops for output in op.outputs}
        return self._followers(ops, [maker.get(contribution.tensor, -1) for contribution in self._small.contributions], "gradients")

    def _followers(self, ops: list[Region], owners: Sequence[int], name: str) -> list[Region]:
        """Regions of what is ordered by the operator it belongs to."""
        regions = []
        for region in ops:
            middle = region.first + region.length
            halves = [[i for i, owner in enumerate(owners) if a <= owner < b] for a, b in ((region.first, middle), (middle, region.end))]
            regions.append(self._dense(halves, region.stack, name, falling=region.falling))
        return regions

    def _visit_region(self, index: int, stack: Stack) -> Region:
        """The calls of the twins."""
        first = self._paths.firsts[index] + self._ends * stack.period
        halves: list[list[int]] = [[], []]
        for number, visit in enumerate(self._visits):
            found = self._paths.split(visit.path)
            if found is not None and found[0] == stack.container and 0 <= found[1] - first < 2 * stack.period:
                halves[(found[1] - first) // stack.period].append(number)
        return self._dense(halves, index, "calls")

    def _draw_axes(self, ops: list[Region]) -> dict[str, Axis]:
        """Random draws of modules around the stacks are numbered through all repetitions."""
        found: dict[str, dict[Region, list[list[int]]]] = {}
        for region in ops:
            if region.falling:
                continue
            for half in (0, 1):
                start = region.first + half * region.length
                for op in self._small.ops[start : start + region.length]:
                    path, _, number = op.random_key.rpartition("#")
                    if number and self._paths.split(path) is None:
                        found.setdefault(path, {}).setdefault(region, [[], []])[half].append(int(number))
        return {
            path: Axis(
                "random draws", [self._dense(halves, region.stack, "random draws") for region, halves in regions.items()], self._more
            )
            for path, regions in found.items()
        }

    # -- the long recording ------------------------------------------------------------------------------------------------------

    def graph(self) -> Graph:
        """Every sequence of the small recording, made longer."""
        small, tensor = self._small, self._axes["tensor"]
        return replace(
            small,
            ops=self._longer("op", small.ops),
            tensors=self._longer("tensor", small.tensors),
            storages=self._longer("storage", small.storages),
            parameters=self._longer("parameters", small.parameters),
            buffers=self._longer("buffers", small.buffers),
            contributions=self._longer("contributions", small.contributions),
            accumulations=self._longer("accumulations", small.accumulations),
            inputs=tuple(replace(item, tensor=tensor.outside(item.tensor)) for item in small.inputs),
            loss=tensor.outside(small.loss),
            seed=tensor.outside(small.seed),
        )

    def visits(self) -> tuple[Visit, ...]:
        """The calls of layers."""
        return self._longer("visits", self._visits)

    def _longer(self, axis_name: str, items: tuple[T, ...]) -> tuple[T, ...]:
        axis = self._axes[axis_name]
        made: list[T] = []
        for number, region in axis.walk(len(items)):
            if region is None:
                made.append(self._moved(items[number]))
            else:
                pairs = zip(items[number : number + region.length], items[number + region.step :][: region.length], strict=True)
                self._repeat([self._template(one, two) for one, two in pairs], axis.rounds(region), made)
        return tuple(made)

    def _moved(self, item: T) -> T:
        """An item outside of the repeated regions."""
        kinds = _KINDS[type(item)]
        return type(item)(*[self._outside(kinds.get(f.name, ""), getattr(item, f.name)) for f in fields(item)])  # type: ignore[arg-type]

    def _outside(self, kind: str, value: Any) -> Any:
        if kind in _EACH and isinstance(value, tuple):
            return tuple([self._outside(_EACH[kind], item) for item in value])
        if kind == "argument":
            if isinstance(value, Ref):
                return self._ref(self._axes["tensor"].outside(value.tensor))
            return self._moved(value) if isinstance(value, Made | Given) else value
        if kind == "path":
            return self._paths.outside(value)
        if kind == "key" and value:
            path, _, number = value.rpartition("#")
            if path in self._draws:
                return f"{path}#{self._draws[path].outside(int(number))}"
            return f"{self._paths.outside(path)}#{number}"
        return self._axes[kind].outside(value) if kind in self._axes else value

    def _template(self, one: T, two: T) -> tuple[type[T], list[Any], list[tuple[int, Make]]]:
        """An item of one twin beside the same of the other: its class, its fields, and those fields that vary."""
        kinds = _KINDS[type(one)]
        values: list[Any] = []
        varying: list[tuple[int, Make]] = []
        for index, field in enumerate(fields(one)):  # type: ignore[arg-type]
            value = self._line(kinds.get(field.name, ""), getattr(one, field.name), getattr(two, field.name))
            values.append(None if isinstance(value, Varying) else value)
            if isinstance(value, Varying):
                varying.append((index, value.make))
        return type(one), values, varying

    def _line(self, kind: str, one: Any, two: Any) -> Any:
        """A value, or a function from c to it."""
        if kind == "argument" and isinstance(one, Ref) and isinstance(two, Ref):
            line = self._axes["tensor"].line(one.tensor, two.tensor)
            ref, at, step = self._ref, line.at, line.step
            return Varying(lambda c: ref(at + c * step)) if step else ref(at)
        if kind == "argument" and isinstance(one, Made | Given) and type(one) is type(two):
            known, parts, varying = self._template(one, two)
            return Varying(_built(known, parts, varying)) if varying else known(*parts)
        if kind in _EACH and isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
            return _together([self._line(_EACH[kind], a, b) for a, b in zip(one, two, strict=True)])
        if kind == "path":
            return self._paths.line(one, two)
        if kind == "key" and one and two:
            return self._key(one.rpartition("#"), two.rpartition("#"))
        if kind in self._axes:
            return _number(self._axes[kind].line(one, two))
        if type(one) is not type(two) or (one != two if isinstance(one, type) else one is not two and repr(one) != repr(two)):
            raise DepthError(f"two repetitions differ: {one!r} and {two!r}"[:200])
        return one

    def _key(self, one: tuple[str, str, str], two: tuple[str, str, str]) -> Any:
        if one[0] in self._draws and one[0] == two[0]:
            path, line = one[0], self._draws[one[0]].line(int(one[2]), int(two[2]))
            return Varying(lambda c: f"{path}#{line.at + c * line.step}")
        if one[2] != two[2]:
            raise DepthError(f"two repetitions draw random numbers differently in '{one[0]}'")
        made, number = self._paths.line(one[0], two[0]), one[2]
        if isinstance(made, str):
            return f"{made}#{number}"
        make = made.make
        return Varying(lambda c: f"{make(c)}#{number}")

    def _ref(self, tensor: int) -> Ref:
        known = self._refs.get(tensor)
        if known is None:
            known = self._refs[tensor] = Ref(tensor)
        return known

    @staticmethod
    def _repeat(templates: list[tuple[type[T], list[Any], list[tuple[int, Make]]]], rounds: Iterable[int], made: list[T]) -> None:
        for c in rounds:
            for kind, values, varying in templates:
                for index, make in varying:
                    values[index] = make(c)
                made.append(kind(*values))


def _mapped(regions: Iterable[Region], seen: Sequence[int], name: str) -> list[Region]:
    """Regions of what is first used in other regions; seen[i]: how many are known before i."""
    found = []
    for region in regions:
        a, b, c = (seen[region.first + half * region.length] for half in range(3))
        if b - a != c - b:
            raise DepthError(f"two repetitions make different numbers of {name}")
        found.append(Region(a, b - a, region.stack, region.falling))
    return found


def _number(line: Line) -> Any:
    at, step = line.at, line.step
    return Varying(lambda c: at + c * step) if step else at


def _built(kind: type, values: list[Any], varying: list[tuple[int, Make]]) -> Make:
    """A function from c to an object with these fields."""

    def make(c: int) -> Any:
        for index, part in varying:
            values[index] = part(c)
        return kind(*values)

    return make


def _together(parts: list[Any]) -> Any:
    """A tuple of values and functions of c as one value or function."""
    varying = [(index, part.make) for index, part in enumerate(parts) if isinstance(part, Varying)]
    if not varying:
        return tuple(parts)
    if len(parts) == 1:
        only = varying[0][1]
        return Varying(lambda c: (only(c),))
    values = list(parts)

    def make(c: int) -> Any:
        for index, part in varying:
            values[index] = part(c)
        return tuple(values)

    return Varying(make)
