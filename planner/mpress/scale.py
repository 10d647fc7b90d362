"""The law of micro-batch sizes: two recordings of one model fix every number of the Graph as a line a + b*B over the size B.

`fit` compares the recordings field by field.  A quantity (`QUANTITIES`) may differ between them and becomes a line over whole numbers,
also where it stands inside words; everything else - targets, dataflow, names, ids, lengths - must be equal, or there is no law.  A field
added to the Graph later must be equal until it is declared a quantity.  A float may also be c / (a + b*B), as in a mean, where this
gives both floats to the last bit.

Two points lie on any line: a law counts only after `Law.contradiction` found nothing against a recording at a third size.
The range of an integer input is read off the example inputs at each size and follows no law; `Law.at` takes it as given.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

from mpress.graph import Accumulation, Buffer, Graph, Input, Op, Parameter, Storage, Tensor

QUANTITIES: dict[type, tuple[str, ...]] = {
    Graph: ("micro_batch", "assumptions"),
    Tensor: ("shape", "stride", "offset"),
    Storage: ("bytes",),
    Op: ("args", "kwargs", "flops", "bytes_moved"),
    Parameter: ("elements",),
    Buffer: ("elements",),
    Accumulation: ("bytes",),
}
SAMPLED: dict[type, tuple[str, ...]] = {Input: ("low", "high")}
"""What is measured on example data at each size."""

Ranges = tuple[tuple[int, int], ...]  # low..high of every input

_EXACT = 2**53  # whole floats beyond are rounded
_NUMBER = re.compile(r"([0-9]+)")
_PROBED = 1025  # two ways to write a share are the same if they agree to the last bit at all sizes below
_LISTS = {"ops": "operators", "setup": "operators of the setup"}


@dataclass(frozen=True, slots=True)
class NoLaw:
    """Why two recordings have no law, in words."""

    why: str


@dataclass(frozen=True, slots=True)
class Law:
    """The Graph as a function of the micro-batch size, valid from `least` on.  Made by `fit`.  ranges: of the inputs at the sizes seen."""

    least: int
    form: object
    ranges: tuple[tuple[int, Ranges], ...]

    def at(self, batch: int, ranges: Ranges | None = None) -> Graph:
        """The Graph a recording at this size would give.

        `ranges` are low..high of the example inputs at this size, in the order of Graph.inputs; by default the ones recorded at this
        size, or else the widest of the recordings.
        """
        if batch < self.least:
            raise ValueError(f"the law holds from size {self.least} on, not at {batch}: smaller sizes may broadcast or be contiguous")
        graph = cast(Graph, _evaluate(self.form, batch))
        ranges = dict(self.ranges).get(batch) if ranges is None else ranges
        if ranges is None:
            return graph
        given = tuple(replace(item, low=low, high=high) for item, (low, high) in zip(graph.inputs, ranges, strict=True))
        return replace(graph, inputs=given)

    def contradiction(self, recorded: Graph) -> str:
        """Where the law is not what was recorded at another size, in words; "" if it predicts it exactly."""
        try:
            predicted = self.at(recorded.micro_batch)
        except (OverflowError, ZeroDivisionError) as error:
            return f"a number cannot be predicted: {error}"
        return difference(predicted, recorded)


def difference(first: Graph, second: Graph) -> str:
    """Where two graphs differ, in words; "" if they are the same.  Ranges of inputs do not count, and nan is the same as nan."""
    try:
        _fit(None, first, second, False)
    except _Differs as found:
        return found.words()
    return ""


def fit(first: Graph, second: Graph) -> Law | NoLaw:
    """The law both recordings obey, or why there is none.  The recordings are of one model at two sizes."""
    sizes = _Sizes(first.micro_batch, second.micro_batch)
    if sizes.first == sizes.second:
        raise ValueError(f"both recordings are of size {sizes.first}")
    try:
        form = _fit(sizes, first, second, False)
    except _Differs as found:
        return NoLaw(found.words())
    seen = tuple((graph.micro_batch, tuple((item.low, item.high) for item in graph.inputs)) for graph in (first, second))
    return Law(min(sizes.first, sizes.second), form, seen)


@dataclass(frozen=True, slots=True)
class _Sizes:
    first: int
    second: int

    def line(self, first: int, second: int) -> _Line | None:
        """The line through two whole numbers, None where its slope is not whole."""
        slope, rest = divmod(second - first, self.second - self.first)
        return None if rest else _Line(first - slope * self.first, slope)


@dataclass(frozen=True, slots=True)
class _Line:
    """a + b*B"""

    base: int
    slope: int

    def value(self, batch: int) -> int:
        return self.base + self.slope * batch


@dataclass(frozen=True, slots=True)
class _Whole:
    """float(a + b*B)"""

    line: _Line

    def value(self, batch: int) -> float:
        return float(self.line.value(batch))


@dataclass(frozen=True, slots=True)
class _Share:
    """c / (a + b*B)"""

    whole: float
    line: _Line

    def value(self, batch: int) -> float:
        return self.whole / self.line.value(batch)


@dataclass(frozen=True, slots=True)
class _Words:
    """A text with whole numbers in it."""

    items: tuple[str | _Line, ...]

    def value(self, batch: int) -> str:
        return "".join([str(_evaluate(item, batch)) for item in self.items])


@dataclass(frozen=True, slots=True)
class _Items:
    """A tuple with something in it that varies."""

    items: tuple[object, ...]

    def value(self, batch: int) -> object:
        return tuple([_evaluate(item, batch) for item in self.items])


@dataclass(frozen=True, slots=True)
class _Record:
    """A dataclass with a field that varies."""

    kind: Callable[..., object]
    items: tuple[tuple[str, object], ...]

    def value(self, batch: int) -> object:
        return self.kind(**{name: _evaluate(item, batch) for name, item in self.items})


_FORMS = frozenset((_Line, _Whole, _Share, _Words, _Items, _Record))


def _evaluate(form: object, batch: int) -> object:
    """A form at a size; what is no form is the same at every size."""
    return cast(_Line, form).value(batch) if type(form) in _FORMS else form


class _Differs(Exception):
    """The recordings differ; each level the exception passes adds where it is."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.path, self.operator = what, "", ""

    def words(self) -> str:
        place = self.path.lstrip(".")
        return f"{place}: {self.what}" if place and not self.operator else f"{self.operator}{place and f' {place}'}: {self.what}"


def _fit(sizes: _Sizes | None, first: Any, second: Any, varies: bool) -> object:
    """The form of two values; `varies`: their numbers are quantities.  Without sizes everything must be equal.  Raises _Differs."""
    kind = type(first)
    if kind is not type(second):
        raise _Differs(f"{_show(first)} becomes {_show(second)}")
    if kind is tuple:
        return _fit_items(sizes, first, second, varies)
    if is_dataclass(kind):
        return _fit_record(sizes, kind, first, second)
    if kind is float:
        return first if repr(first) == repr(second) else _fit_float(sizes, first, second, varies)  # repr: nan equals nan, -0.0 is not 0.0
    if first == second:
        return first
    if sizes is not None and varies and kind is str:
        return _fit_words(sizes, first, second)
    if sizes is None or kind is not int or not varies:
        raise _Differs(f"{_show(first)} becomes {_show(second)}")
    line = sizes.line(first, second)
    if line is None:
        raise _Differs(f"{first} at size {sizes.first} and {second} at size {sizes.second} are on no line of whole numbers")
    return line


def _fit_items(sizes: _Sizes | None, first: tuple[Any, ...], second: tuple[Any, ...], varies: bool) -> object:
    items = []
    changed = False
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        try:
            item = _fit(sizes, a, b, varies)
        except _Differs as found:
            if not found.operator:
                found.path = f"[{number}]{found.path}"
            raise
        changed |= item is not a
        items.append(item)
    if len(first) != len(second):
        raise _Differs(f"{len(first)} become {len(second)}")
    return _Items(tuple(items)) if changed else first


def _fit_record(sizes: _Sizes | None, kind: Any, first: Any, second: Any) -> object:
    quantities, sampled = QUANTITIES.get(kind, ()), SAMPLED.get(kind, ())
    items = []
    changed = False
    for name in _names(kind):
        a, b = getattr(first, name), getattr(second, name)
        if name in sampled:
            item = min(a, b) if name == "low" else max(a, b)
        else:
            try:
                item = _fit(sizes, a, b, name in quantities)
            except _Differs as found:
                found.path = f".{_LISTS.get(name, name)}{found.path}" if not found.operator else found.path
                if kind is Op and not found.operator:
                    found.operator = f"{first.target} in {first.module or 'the model'}{_at(first)}"
                raise
        changed |= item is not a
        items.append((name, item))
    return _Record(kind, tuple(items)) if changed else first


def _fit_float(sizes: _Sizes | None, first: float, second: float, varies: bool) -> object:
    """A whole number, 1 over a whole number, or a constant over the size: if it gives both floats exactly, and no other does."""
    if sizes is not None and varies and 0 < abs(first) < _EXACT and 0 < abs(second) < _EXACT:
        if first.is_integer() and second.is_integer():
            line = sizes.line(int(first), int(second))
            if line is not None:
                return _Whole(line)
        line = sizes.line(round(1 / first), round(1 / second)) if abs(first) <= 1 and abs(second) <= 1 else None
        shares = [_Share(first * sizes.first, _Line(0, 1))] + (
            [_Share(1.0, line)] if line and line.slope and line.slope * line.base >= 0 else []
        )
        found = [share for share in shares if share.value(sizes.first) == first and share.value(sizes.second) == second]
        if found and all(share.value(size) == found[0].value(size) for share in found for size in range(1, _PROBED)):
            return found[0]
    words = f"at size {sizes.first} and {second!r} at size {sizes.second} follow no known law" if sizes else f"becomes {second!r}"
    raise _Differs(f"{first!r} {words}")


def _fit_words(sizes: _Sizes, first: str, second: str) -> object:
    """Words that differ in whole numbers only."""
    words = [_NUMBER.split(text) for text in (first, second)]
    if len(words[0]) != len(words[1]):
        raise _Differs(f"{_show(first)} becomes {_show(second)}")
    items = []
    for a, b in zip(*words, strict=True):
        line = sizes.line(int(a), int(b)) if a != b and _whole(a) and _whole(b) else None
        if a != b and line is None:
            raise _Differs(f"{_show(first)} becomes {_show(second)}")
        items.append(line or a)
    return _Words(tuple(items))


def _whole(text: str) -> bool:
    return text.isdecimal() and str(int(text)) == text


_FIELDS: dict[type, tuple[str, ...]] = {}


def _names(kind: type) -> tuple[str, ...]:
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(field.name for field in fields(cast(Any, kind)))
    return _FIELDS[kind]


def _at(op: Op) -> str:
    place = op.source.place()
    return f" ({place})" if place else ""


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
