"""The documents keep their promises: every code is listed, the architecture page is short and names every room."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def codes() -> set[str]:
    """Codes of all refusals in the sources: the first argument of every ...Error(...) or wrong-table call."""
    found = set()
    for folder in ("planner", "cli"):
        for path in (ROOT / folder).rglob("*.py"):
            if "runtime" in path.parts:
                continue  # the runtime raises errors of its own
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
                first = node.args[0]
                raises = name in ("InputError", "InfeasibleError", "BrokenPlanError", "MpressError", "_Interrupted", "refusal")
                if raises and isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.add(first.value)
    return found


def test_every_code_is_in_the_list_of_refusals_and_no_other() -> None:
    listed = set()
    for line in (ROOT / "docs" / "errors.md").read_text().splitlines():
        if line.startswith("| `"):
            listed |= set(re.findall(r"`([a-z-]+)`", line.split("|")[1]))
    assert codes() - listed == set(), "not in docs/errors.md"
    assert listed - codes() == set(), "in docs/errors.md, but nowhere raised"


def test_architecture_is_short_and_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.splitlines()) < 100
    rooms = {path.stem for path in (ROOT / "planner" / "mpress").iterdir() if not path.name.startswith("__")}
    missing = {room for room in rooms if not re.search(rf"\b{room}\b", text)}
    assert missing - {"cells", "program", "workload"} == set()


def test_files_stay_small_and_ascii() -> None:
    for folder in ("planner", "cli", "profiles", "tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert text.isascii(), f"{path.relative_to(ROOT)} has characters beyond ASCII"
            assert len(text.splitlines()) <= 600, f"{path.relative_to(ROOT)} is longer than 600 lines"
            assert path.stem not in ("utils", "common", "helpers", "misc", "base"), path
