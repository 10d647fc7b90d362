"""Billion-parameter plans on the machine the tests run on: what the README promises, by counts and bytes, hardly ever by seconds."""

from __future__ import annotations

import ast
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mpress.graph_file import load_graph

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
GIB = 2**30


def plan(*flags: str, code: int = 0, model: Path = GPT) -> dict[str, Any]:
    return command(str(model), "--gpus", "8", *flags, code=code)


def command(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "mpress_cli", *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def test_fifteen_billion_parameters_on_eight_40_gib_gpus(tmp_path: Path) -> None:
    document = plan("--machine", "dgx-a100-40gb", "--out", str(tmp_path))
    assert 0 <= document["gap"] <= 0.01
    stages = document["stages"]
    assert any(stage["unplanned_peak_bytes"] > stage["capacity_bytes"] for stage in stages)
    assert all(stage["peak_bytes"] <= stage["usable_bytes"] for stage in stages)
    used = [name for name, row in document["actions"].items() if name != "keep" and row["bytes"] > 0]
    assert len(used) >= 2
    text = (tmp_path / "gpt_mpress.py").read_text()
    ast.parse(text)
    assert text.count("\n") <= 1500
    graph = tmp_path / "gpt.graph.json"
    assert command("trace", str(GPT), "-o", str(graph))["model"]["parameters"] == document["model"]["parameters"] > 15.3e9
    assert graph.stat().st_size < 3 * 2**20
    assert plan("--out", str(tmp_path), "--dry-run", model=graph)["stages"] == stages
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 2 * GIB


def test_a_graph_file_of_75_layers_is_read_at_once(tmp_path: Path) -> None:
    """Processor time, so that a busy machine does not matter; it takes a sixth of this."""
    graph = tmp_path / "gpt.graph.json"
    command("trace", str(GPT), "-o", str(graph))
    started = time.process_time()
    read = load_graph(graph)
    assert time.process_time() - started < 3
    assert len(read.ops) > 5000


def test_what_cannot_fit_is_refused_with_the_arithmetic() -> None:
    """125 layers: 25.39 B parameters x 16 B = 378 GiB and a second copy of the tied table of 50304 x 4096, on 8 x 38 GiB."""
    document = plan("--machine", "dgx-a100-40gb", "--model-arg", "layers=125", "--dry-run", code=1)
    assert document["code"] == "no-plan"
    parameters = 125 * (12 * 4096**2 + 13 * 4096) + (50304 + 2048) * 4096 + 2 * 4096
    state = (parameters + 50304 * 4096) * 16
    assert state > 8 * 38 * GIB
    assert f"{state / GIB:.2f} GiB" in document["message"]


def test_what_fits_needs_no_action() -> None:
    document = plan("--machine", "dgx1-v100-32gb", "--precision", "fp16", "--model-arg", "layers=26", "--dry-run")
    assert document["gap"] <= 0.01
    assert all(row["bytes"] == 0 for name, row in document["actions"].items() if name != "keep")
