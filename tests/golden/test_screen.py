"""The whole screen and the whole JSON document of a plan, from a report made by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

from rich.console import Console

from made_report import report
from mpress_cli.document import json_document
from mpress_cli.render import screen

TIMINGS = {"trace_seconds": 1.0, "solve_seconds": 2.5, "emit_seconds": 0.5}
FILES = ("out/gpt_mpress.py", "out/gpt.schedule.json")


def test_screen(golden: Callable[[str, str], None]) -> None:
    stream = io.StringIO()
    Console(file=stream, width=80, no_color=True, highlight=False).print(screen(report(), FILES, TIMINGS))
    golden("screen.txt", "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines()))


def test_document(golden: Callable[[str, str], None]) -> None:
    golden("document.json", json.dumps(json_document(report(), FILES, TIMINGS), indent=2) + "\n")
