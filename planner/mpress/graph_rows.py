"""JSON that nobody vouches for, read strictly: every value by its key, with the type it must have; what nobody asked for is refused.

Nothing is executed, and nothing grows beyond the text: no duplicate keys, no numbers out of range, no characters that would end up as
control sequences on somebody's terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from mpress.errors import InputError
from mpress.graph_check import wrong

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Entries = dict[str, object]
Item = TypeVar("Item")

MOST_SIZE = 2**50  # bytes, elements, ids: a thousand times what any server holds
MOST_DIGITS = 20
MOST_LETTERS = 1000  # of a name
_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}


class Row:
    """One object of the file, at its key path.  Values are taken out one by one; `finish` refuses the rest."""

    __slots__ = ("_entries", "_origin", "path")

    def __init__(self, value: object, path: str, origin: str) -> None:
        if type(value) is not dict:
            raise wrong(path, f"is {kind_of(value)}, not an object", origin)
        self._entries: Entries = value
        self.path, self._origin = path, origin

    def wrong(self, key: str, problem: str, hint: str = "") -> InputError:
        """The refusal of the value at `key`."""
        path = f"{self.path}.{key}" if self.path and key else self.path or key
        return wrong(path, problem, self._origin, hint) if hint else wrong(path, problem, self._origin)

    def has(self, key: str) -> bool:
        return key in self._entries

    def take(self, key: str) -> object:
        """The value at a key, whatever it is."""
        if key not in self._entries:
            raise self.wrong(key, "is missing")
        return self._entries.pop(key)

    def finish(self) -> None:
        """Refuse keys nobody asked for: a misspelt key must not pass in silence."""
        for key in self._entries:
            raise self.wrong("", f"has the key {quoted(key)}, which is no key of this format")

    def whole(self, key: str, least: int = 0, most: int = MOST_SIZE, default: int | None = None) -> int:
        """A whole number in least..most."""
        if default is not None and key not in self._entries:
            return default
        value = self.take(key)
        if type(value) is not int:
            raise self.wrong(key, f"is {kind_of(value)}, not a whole number")
        if not least <= value <= most:
            raise self.wrong(key, f"is {value}, not in {least} to {most}")
        return value

    def identity(self, key: str, default: int | None = None) -> int:
        """An id, or -1 for none."""
        return self.whole(key, -1, default=default)

    def number(self, key: str, most: float, default: float) -> float:
        """A number from 0 to `most`, with or without a fraction."""
        if key not in self._entries:
            return default
        value = self.take(key)
        if type(value) is not float and type(value) is not int:
            raise self.wrong(key, f"is {kind_of(value)}, not a number")
        if not 0 <= value <= most:
            raise self.wrong(key, f"is {value:g}, not in 0 to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        if key not in self._entries:
            return default
        value = self.take(key)
        if type(value) is not bool:
            raise self.wrong(key, f"is {kind_of(value)}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A name or a sentence: printable, not empty, of one line."""
        if default is not None and key not in self._entries:
            return default
        return self.printable(self.take(key), key)

    def printable(self, value: object, key: str) -> str:
        if type(value) is not str:
            raise self.wrong(key, f"is {kind_of(value)}, not a text")
        if not value or len(value) > MOST_LETTERS:
            raise self.wrong(key, f"has {len(value)} characters, not 1 to {MOST_LETTERS}")
        if not value.isprintable():
            raise self.wrong(key, f"has the character {quoted(next(c for c in value if not c.isprintable()))}, which cannot be shown")
        return value

    def file_name(self, key: str) -> str:
        """A name that is no path."""
        return self.bare(self.take(key), key)

    def bare(self, value: object, key: str) -> str:
        name = self.printable(value, key)
        if "/" in name or "\\" in name or name.startswith("."):
            raise self.wrong(key, f"is {quoted(name)}: a name is wanted, not a path")
        return name

    def items(self, key: str, optional: bool = False) -> list[object]:
        """A list, whatever is in it."""
        if optional and key not in self._entries:
            return []
        value = self.take(key)
        if type(value) is not list:
            raise self.wrong(key, f"is {kind_of(value)}, not a list")
        return value

    def rows(self, key: str, optional: bool = False) -> Iterator[Row]:
        """The objects of a list; each is finished when the next is asked for."""
        for place, value in enumerate(self.items(key, optional)):
            row = Row(value, f"{self.path}.{key}[{place}]" if self.path else f"{key}[{place}]", self._origin)
            yield row
            row.finish()

    def wholes(self, key: str, least: int = 0, optional: bool = False) -> tuple[int, ...]:
        """A list of whole numbers."""
        values = self.items(key, optional)
        for place, value in enumerate(values):
            if type(value) is not int:
                raise self.wrong(f"{key}[{place}]", f"is {kind_of(value)}, not a whole number")
            if not least <= value <= MOST_SIZE:
                raise self.wrong(f"{key}[{place}]", f"is {value}, not in {least} to {MOST_SIZE}")
        return tuple(values)  # type: ignore[arg-type]  # all are int by now

    def texts(self, key: str, optional: bool = False) -> tuple[str, ...]:
        """A list of names or sentences."""
        return tuple([self.printable(value, f"{key}[{place}]") for place, value in enumerate(self.items(key, optional))])

    def choice(self, key: str, among: Mapping[str, Item], default: Item | None = None) -> Item:
        """One of a few words."""
        if default is not None and key not in self._entries:
            return default
        value = self.take(key)
        if type(value) is not str or value not in among:
            raise self.wrong(key, f"is {quoted(value)}, not one of {', '.join(sorted(among))}")
        return among[value]


def kind_of(value: object) -> str:
    """What a JSON value is, in words."""
    return _TYPES.get(type(value), "something else")


def quoted(value: object) -> str:
    """A value in a message: short, ASCII, on one line."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Wrong(Exception):
    """What the parser's hooks found."""


def parse(text: str, origin: str) -> object:
    """JSON text as Python values; refuses what JSON readers disagree about."""
    try:
        return json.loads(text, object_pairs_hook=_entries, parse_int=_int, parse_float=_float, parse_constant=_constant)
    except json.JSONDecodeError as error:
        hint = "compare with the example in docs/graph-format.md"
        raise InputError("graph-file", f"{origin} is not JSON: {error.msg}", f"{origin}:{error.lineno}", hint) from None
    except _Wrong as problem:
        raise wrong("", str(problem), origin) from None
    except RecursionError:
        raise wrong("", "has lists in lists without end", origin) from None


def _entries(pairs: list[tuple[str, object]]) -> Entries:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Wrong(f"has the key {quoted(next(key for key in keys if keys.count(key) > 1))} twice in one object")
    return entries


def _int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise _Wrong(f"has a number of {len(digits)} digits")
    return int(digits)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Wrong(f"has the number {quoted(text)}, which is out of range")
    return value


def _constant(word: str) -> float:
    raise _Wrong(f"has {word}, which is no JSON")
