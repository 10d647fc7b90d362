"""The command as a person runs it, on a tiny GPT and the toy machine: files, exit codes, interrupts, and the same bytes every time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = [f"--model-arg={pair}" for pair in ("layers=8", "hidden=64", "heads=4", "sequence=64", "vocabulary=256")]
FLAGS = [
    str(EXAMPLES / "gpt.py"),
    "--gpus",
    "4",
    "--machine",
    str(EXAMPLES / "toy.toml"),
    "--precision",
    "fp32",
    "--micro-batches",
    "8",
    *TINY,
]
NAMES = ("gpt.schedule.json", "gpt_mpress.py")


def command(*flags: str, cwd: Path, seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mpress_cli", *FLAGS, *flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=300,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )


def test_same_bytes_under_another_hash_seed_and_from_another_directory(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first = command("--json", cwd=here, seed="1")
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert sorted(path.name for path in here.iterdir()) == sorted(NAMES) == sorted(document["files"])
    assert 0 <= document["gap"] <= 0.01
    assert all(stage["peak_bytes"] <= stage["usable_bytes"] for stage in document["stages"])
    assert all(sum(stage["causes"].values()) == stage["peak_bytes"] for stage in document["stages"])
    second = command("--out", str(there), cwd=tmp_path, seed="77")
    assert second.returncode == 0, second.stderr
    assert "Peak memory per GPU" in second.stdout and max(len(line) for line in second.stdout.splitlines()) <= 80
    for name in NAMES:
        assert (here / name).read_bytes() == (there / name).read_bytes()


def test_dry_run_writes_nothing_and_dump_fx_prints_the_step(tmp_path: Path) -> None:
    assert command("--dry-run", cwd=tmp_path).returncode == 0
    dumped = command("--dump-fx", cwd=tmp_path)
    assert dumped.returncode == 0 and "call_function[target=torch.ops.aten.addmm.default]" in dumped.stdout
    assert list(tmp_path.iterdir()) == []


def test_no_plan_exits_1_and_leaves_an_earlier_plan_alone(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text("an earlier plan")
    done = command("--json", "--reserve", "0.6", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert (document["status"], document["code"]) == ("error", "no-plan")
    assert document["message"] and document["where"] and document["hint"]
    assert [(tmp_path / name).read_text() for name in NAMES] == ["an earlier plan"] * 2


def test_ctrl_c_ends_with_one_document(tmp_path: Path) -> None:
    """While solving: the best plan so far with its gap, or 130 if there is none yet; never a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mpress_cli", *FLAGS, "--gap", "0", "--json", "--dry-run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("cost"):
        assert line, "ended before it began to solve"
    process.send_signal(signal.SIGINT)
    said, talk = process.communicate(timeout=120)
    document = json.loads(said)
    if process.returncode == 0:
        assert document["status"] == "interrupted" and document["gap"] >= 0
    else:
        assert process.returncode == 130 and document["code"] == "interrupted"
    assert "Traceback" not in talk
