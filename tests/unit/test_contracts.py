"""Negative controls: each import contract breaks on cue when a copy of the sources breaks the rule, and holds when it does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# contract -> (file, line that breaks it); a file that does not exist is a new module
CONTROLS = {
    "the command sits on the planner": ("planner/mpress/driver.py", "import mpress_cli.console"),
    "data flows one way": ("planner/mpress/graph.py", "import mpress.driver"),
    "inside solve": ("planner/mpress/solve/backend.py", "import mpress.solve.search"),
    "emitted code needs only the runtime": ("planner/mpress/runtime/__init__.py", "import mpress.errors"),
    "the checker knows no solver": ("planner/mpress/simulate.py", "import mpress.problem"),
    "one door to the solver": ("planner/mpress/problem.py", "import ortools"),
    "torch only where programs are read or run": ("planner/mpress/fold.py", "import torch"),
    "one door to transformers": ("planner/mpress/trace/record.py", "import transformers"),
    "only the command talks to a terminal": ("planner/mpress/emit/report.py", "import rich"),
}
DRAWERS = {"a new module nobody placed": "planner/mpress/utils.py", "a new module of the solver": "planner/mpress/solve/misc.py"}


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(root / folder) for folder in ("planner", "cli"))
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    return subprocess.run(
        [sys.executable, "-c", code, "--config", str(root / "pyproject.toml"), "--no-cache"],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"},
        timeout=120,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources and the contracts, free to be broken."""
    for folder in ("planner", "cli"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in CONTROLS:
        assert f"{name} KEPT" in done.stdout


@pytest.mark.parametrize("contract", CONTROLS)
def test_each_contract_breaks_on_cue(copy: Path, contract: str) -> None:
    file, line = CONTROLS[contract]
    path = copy / file
    path.write_text(path.read_text() + f"\n{line}\n")
    done = lint(copy)
    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("drawer", DRAWERS)
def test_a_module_must_be_placed_by_hand(copy: Path, drawer: str) -> None:
    (copy / DRAWERS[drawer]).write_text('"""A drawer."""\n')
    assert lint(copy).returncode != 0
