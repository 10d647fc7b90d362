"""What people commit, whole: a change of a line here is a change of everybody's files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tiny_plans import emit


@pytest.mark.parametrize("kind", ["keep", "all"])
def test_emitted_module_and_schedule(tmp_path: Path, golden: Callable[[str, str], None], kind: str) -> None:
    emitted = emit(tmp_path, kind, stages=4)
    golden(f"gpt_{kind}.module.txt", emitted.module_path.read_text())
    golden(f"gpt_{kind}.schedule.json", (tmp_path / "gpt.schedule.json").read_text())
