"""Streams and exits: data goes to stdout, talk and progress to stderr, a refusal is one panel (or one JSON document) and a number."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from mpress.errors import MpressError

OK, INTERRUPTED = 0, 130  # the exit codes of refusals are theirs: see mpress.errors
SCHEMA_VERSION = 1
NARROW = 80  # columns when nobody says how wide the terminal is

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class Streams:
    """The two consoles of one run; `machine_readable` is `--json`."""

    def __init__(self, machine_readable: bool) -> None:
        self.machine_readable = machine_readable
        self._out = _console(sys.stdout.isatty(), stderr=False)
        self._talk = _console(sys.stderr.isatty(), stderr=True)

    def show(self, *renderables: RenderableType) -> None:
        """Print data for a person."""
        for renderable in renderables:
            self._out.print(renderable)

    def document(self, document: Mapping[str, Json]) -> None:
        """Print the one JSON document of a run."""
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        sys.stdout.flush()

    def text(self, text: str) -> None:
        """Print text as it is."""
        sys.stdout.write(text if text.endswith("\n") else text + "\n")

    def progress(self, name: str, seconds: float | None, note: str) -> None:
        """One line a phase on stderr: `seconds` is None while it still runs (shown on a terminal only)."""
        if seconds is not None:
            self._talk.print(Text.assemble((f"{name:<8}", "bold"), f"{seconds:7.1f} s  ", (note, "dim")), overflow="ellipsis", no_wrap=True)
        elif sys.stderr.isatty():
            self._talk.print(
                Text.assemble((f"{name:<8}", "bold"), "     ...  ", (note, "dim")), overflow="ellipsis", no_wrap=True, end="\r"
            )

    def refuse(self, error: MpressError) -> int:
        """Say what, where, why and what to do; returns the exit code."""
        if self.machine_readable:
            self.document(
                {
                    "schema_version": SCHEMA_VERSION,
                    "status": "error",
                    "code": error.code,
                    "message": error.message,
                    "where": error.where,
                    "hint": error.hint,
                }
            )
        else:
            self._talk.print(error_panel(error))
        return error.exit_code

    def trace_back(self) -> None:
        """The raw traceback of the error being handled (`--traceback`), on stderr."""
        self._talk.print_exception(show_locals=False)


def error_panel(error: MpressError) -> Panel:
    """A refusal on one screen: message, where, hint; the code in the title, so it can be looked up in docs/errors.md."""
    lines: list[RenderableType] = [Text(error.message)]
    if error.where:
        lines.append(Text.assemble(("where: ", "bold"), error.where))
    if error.hint:
        lines += [Text(), Text.assemble(("hint: ", "bold green"), error.hint)]
    return Panel(Group(*lines), title=Text(f"error: {error.code}"), title_align="left", border_style="red", padding=(0, 1))


def _console(terminal: bool, *, stderr: bool) -> Console:
    wide = None if terminal or "COLUMNS" in os.environ else NARROW
    return Console(stderr=stderr, width=wide, highlight=False, emoji=False, markup=False)
