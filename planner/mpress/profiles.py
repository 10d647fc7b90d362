"""Machine profiles: TOML tables whose every number stands beside its source, read strictly.

A number, true or false is written `{ value = 40, source = "..." }`.  An unknown, missing or wrong key is refused with its path and file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from mpress.errors import InputError


class Table:
    """One table of a profile, with the path of keys that led to it; remembers what was read, so the rest can be refused."""

    def __init__(self, entries: Mapping[str, object], path: str, origin: str) -> None:
        self._entries, self._path, self._origin = entries, path, origin
        self._read: set[str] = set()
        self._children: list[Table] = []

    def where(self, key: str) -> str:
        """ "links.port in dgx.toml", for refusals."""
        return f"{self._key(key)} in {self._origin}"

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))

    def has(self, key: str) -> bool:
        return key in self._entries

    def table(self, key: str) -> Table:
        value = self._value(key, "a table")
        if not isinstance(value, dict):
            raise self.wrong(key, "is not a table")
        child = Table(value, self._key(key), self._origin)
        self._children.append(child)
        return child

    def text(self, key: str) -> str:
        value = self._value(key, "a text")
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, "is not a text")
        return value

    def number(self, key: str, positive: bool = True) -> float:
        """The value of a `{ value, source }` pair; it must be above 0, or at least 0 when `positive` is False."""
        entry = self.table(key)
        entry.text("source")
        value = entry._value("value", "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise entry.wrong("value", "is not a number")
        if value < 0 or (positive and value == 0):
            raise entry.wrong("value", f"is {value}, it must be {'positive' if positive else 'at least 0'}")
        return float(value)

    def truth(self, key: str) -> bool:
        """The value of a `{ value, source }` pair that is true or false."""
        entry = self.table(key)
        entry.text("source")
        value = entry._value("value", "true or false")
        if not isinstance(value, bool):
            raise entry.wrong("value", "is neither true nor false")
        return value

    def integer(self, key: str) -> int:
        value = self._value(key, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "is not a whole number above 0")
        return value

    def rows(self, key: str) -> tuple[tuple[int, ...], ...]:
        """A list of lists of whole numbers, none negative."""
        value = self._value(key, "a list of lists")
        if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
            raise self.wrong(key, "is not a list of lists")
        for row in value:
            if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in row):
                raise self.wrong(key, f"has the row {row}, whole numbers from 0 are expected")
        return tuple(tuple(row) for row in value)

    def finish(self) -> None:
        """Refuse keys nobody asked for: a misspelt key must not pass in silence."""
        for key in self.names():
            if key not in self._read:
                raise self.wrong(key, "is not a key of a machine profile")
        for child in self._children:
            child.finish()

    def wrong(self, key: str, problem: str) -> InputError:
        return InputError("profile", f"'{self._key(key)}' {problem}", self.where(key), "docs/machines.md lists the keys of a profile")

    def _key(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _value(self, key: str, kind: str) -> object:
        self._read.add(key)
        if key not in self._entries:
            raise self.wrong(key, f"is missing ({kind} is expected)")
        return self._entries[key]


def known_machines() -> tuple[str, ...]:
    """Names of the profiles that ship with the planner, sorted."""
    names = (entry.name for entry in files("mpress_profiles").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def read_profile(name_or_path: str) -> Table:
    """The profile of a known machine, or of a path that ends in .toml; raises InputError for anything else."""
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        origin = path.name
        if not path.is_file():
            raise InputError("machine", f"there is no profile {name_or_path}", where="--machine", hint="check the path")
        content = path.read_bytes()
    else:
        if name_or_path not in known_machines():
            hint = f"known machines: {', '.join(known_machines())}; or give the path of a .toml profile"
            raise InputError("machine", f"there is no machine '{name_or_path}'", where="--machine", hint=hint)
        origin = f"{name_or_path}.toml"
        content = files("mpress_profiles").joinpath(origin).read_bytes()
    try:
        return Table(tomllib.loads(content.decode("utf-8")), "", origin)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise InputError("profile", f"{origin} is not TOML: {problem}", where=origin) from problem
