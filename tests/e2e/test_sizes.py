"""`--micro-batch` with several sizes, as a person runs it: rows, files of the winner, the same plan as the winner alone, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = [f"--model-arg={pair}" for pair in ("layers=2", "hidden=32", "heads=4", "sequence=32", "vocabulary=128")]
FLAGS = [str(EXAMPLES / "gpt.py"), "--gpus", "2", "--machine", str(EXAMPLES / "toy.toml"), "--precision", "fp32", "--gap", "0.03", *TINY]


def command(*flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mpress_cli", *FLAGS, *flags],
        capture_output=True, text=True, check=False, cwd=cwd, timeout=300, env={**os.environ, "PYTHONHASHSEED": "5"},
    )  # fmt: skip


def document(*flags: str, cwd: Path, exit_code: int = 0) -> dict[str, Any]:
    done = command("--json", *flags, cwd=cwd)
    assert done.returncode == exit_code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_list_keeps_the_fastest_size_and_writes_its_files_only(tmp_path: Path) -> None:
    several, alone = tmp_path / "several", tmp_path / "alone"
    several.mkdir()
    alone.mkdir()
    found = document("--micro-batch", "1,2,3,4", "--global-batch", "16", cwd=several)
    rows = {row["micro_batch"]: row for row in found["sizes"]}
    assert sorted(rows) == [1, 2, 3, 4] and rows[3]["status"] == "skipped" and rows[3]["words"] == "does not divide 16 samples"
    (winner,) = (row for row in rows.values() if row["status"] == "chosen")
    size = winner["micro_batch"]
    assert found["schedule"]["micro_batch"] == size and found["schedule"]["micro_batches"] == 16 // size == winner["micro_batches"]
    assert winner["step_seconds"] == found["step_seconds"] and winner["samples_per_second"] == found["samples_per_second"]
    assert found["gap"] <= 0.03
    assert all(row["samples_per_second"] <= winner["samples_per_second"] for row in rows.values() if row["samples_per_second"])
    assert sorted(path.name for path in several.iterdir()) == ["gpt.schedule.json", "gpt_mpress.py"]
    assert "INPUTS" in (several / "gpt_mpress.py").read_text()
    single = document("--micro-batch", str(size), "--global-batch", "16", cwd=alone)
    assert single["sizes"] == [] and single["step_seconds"] >= found["bound_seconds"] * (1 - 1e-9)
    assert abs(single["step_seconds"] / found["step_seconds"] - 1) <= 0.03
    assert single["schedule"] == found["schedule"] and single["shapes"] == found["shapes"]


def test_auto_tries_powers_of_two_and_shows_them(tmp_path: Path) -> None:
    done = command("--micro-batch", "auto", "--micro-batches", "8", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("Micro-batch sizes for 8 samples in a step") :].splitlines()
    assert [line.split()[:2] for line in table[2:6]] == [["1", "8"], ["2", "4"], ["4", "2"], ["8", "1"]]
    assert sum("chosen" in line for line in table) == 1 and max(map(len, done.stdout.splitlines())) <= 80
    assert "size 1" in done.stderr and list(tmp_path.iterdir()) == []


def test_where_no_size_fits_the_refusal_names_them(tmp_path: Path) -> None:
    refusal = document("--micro-batch", "1,2", "--reserve", "0.99", cwd=tmp_path, exit_code=1)
    assert refusal["code"] == "no-plan" and refusal["message"].startswith("no micro-batch of 1, 2 can be planned; of 1: ")


def test_refusals(tmp_path: Path) -> None:
    for flags, code, words in (
        (("--micro-batch", "1,,2"), "micro-batch", "is no number"),
        (("--micro-batch", "3", "--global-batch", "16"), "option", "no multiple"),
        (("--micro-batch", "3,5", "--global-batch", "16"), "option", "divides the 16 samples"),
        (("--micro-batches", "4", "--global-batch", "16"), "option", "both say"),
        (("--micro-batch", "1,2", "--dump-fx"), "option", "--dump-fx has one micro-batch size"),
        (("--global-batch", "0"), "option", "--global-batch is 0"),
    ):
        refusal = document(*flags, cwd=tmp_path, exit_code=2)
        assert (refusal["code"], words in refusal["message"]) == (code, True), refusal


def test_a_graph_file_has_one_size(tmp_path: Path) -> None:
    graph = tmp_path / "g.json"
    traced = subprocess.run(
        [sys.executable, "-m", "mpress_cli", "trace", FLAGS[0], "-o", str(graph), "--micro-batch", "2", "--precision", "fp32", *TINY],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert traced.returncode == 0, traced.stderr
    base = [sys.executable, "-m", "mpress_cli", str(graph), "--gpus", "2", "--machine", FLAGS[4], "--json", "--dry-run"]
    done = subprocess.run([*base, "--micro-batch", "1,2"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and "a graph file has one micro-batch size" in json.loads(done.stdout)["message"]
    done = subprocess.run([*base, "--global-batch", "12"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["schedule"]["micro_batches"] == 6, done.stderr
