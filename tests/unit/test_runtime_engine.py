"""The engine's refusals: orders that can never finish, files that do not belong together, inputs that do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mpress.runtime.launch import main
from mpress.runtime.parameters import Knobs
from mpress.runtime.schedule_file import RunError, read_schedule
from mpress.runtime.session import Settings, run_virtual
from tiny_plans import Emitted, emit
from user_training import batches, user_model


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emitted]:
    torch.set_num_threads(1)
    yield emit(tmp_path_factory.mktemp("small"), "all", 3, micro_batches=3, layers=2)


def document(emitted: Emitted) -> dict[str, Any]:
    found = json.loads((emitted.module_path.parent / "gpt.schedule.json").read_text())
    assert isinstance(found, dict)
    return found


def refusal(emitted: Emitted, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(emitted.program, "gpt.schedule.json", flags)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


def write(folder: Path, changed: dict[str, Any]) -> str:
    path = folder / "changed.json"
    path.write_text(json.dumps(changed))
    return str(path)


def test_a_run_prints_losses_and_memory(emitted: Emitted, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(emitted.program, "gpt.schedule.json", ["--virtual", "--account", "--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert [line.split("  ")[0] for line in lines[:2]] == ["step 0", "step 1"]
    assert [line.split()[0] for line in lines[3:]] == ["0", "1", "2"]


def test_more_memory_than_predicted_fails(emitted: Emitted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = document(emitted)
    changed["stages"][1]["peak_bytes"] -= 1
    with pytest.raises(SystemExit) as ended:
        main(emitted.program, "gpt.schedule.json", ["--virtual", "--account", "--schedule", write(tmp_path, changed)])
    assert ended.value.code == 1
    assert "1 of 3 ranks used more memory than predicted" in capsys.readouterr().err


def test_torchrun_is_asked_for(emitted: Emitted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert "torchrun --nproc-per-node 3 gpt_mpress.py" in refusal(emitted, capsys)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "2 processes for 3 stages" in refusal(emitted, capsys)


def test_files_of_another_plan(emitted: Emitted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = document(emitted)
    changed["model"]["graph_sha256"] = "0" * 64
    assert "written for another module" in refusal(emitted, capsys, "--virtual", "--schedule", write(tmp_path, changed))
    changed["format"] = "mpress.schedule/9"
    assert "not of format" in refusal(emitted, capsys, "--virtual", "--schedule", write(tmp_path, changed))
    assert "No such file" in refusal(emitted, capsys, "--virtual", "--schedule", str(tmp_path / "none.json"))
    damaged = document(emitted)
    damaged["tensors"][0]["bytes"] += 1
    assert "do not add up" in refusal(emitted, capsys, "--virtual", "--schedule", write(tmp_path, damaged))


def test_state_dicts_that_do_not_fit(emitted: Emitted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, path = dict(user_model(layers=2).state_dict()), tmp_path / "model.pt"
    flags = ("--virtual", "--state-dict", str(path))
    torch.save({name: tensor for name, tensor in state.items() if name != "h.1.ln_1.bias"}, path)
    assert "lacks h.1.ln_1.bias" in refusal(emitted, capsys, *flags)
    torch.save(state | {"h.2.ln_1.bias": torch.zeros(64)}, path)
    assert "has the unknown h.2.ln_1.bias" in refusal(emitted, capsys, *flags)
    torch.save(state | {"ln_f.bias": torch.zeros(63)}, path)
    assert "ln_f.bias has the shape (63,)" in refusal(emitted, capsys, *flags)
    path.write_text("no weights")
    assert "--state-dict takes a file written by torch.save" in refusal(emitted, capsys, *flags)


def test_data_that_does_not_fit(emitted: Emitted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.pt"
    flags = ("--virtual", "--data", str(path))
    torch.save(batches(1, 2), path)
    assert "no micro-batch 2 of step 0" in refusal(emitted, capsys, *flags)
    short = batches(1, 3)
    short[0][0]["tokens"] = short[0][0]["tokens"][:1]
    torch.save(short, path)
    assert "'tokens' in micro-batch 0 of step 0 is (1, 32) int64, the plan was made for (2, 32) int64" in refusal(emitted, capsys, *flags)


def test_a_circular_wait_is_named(emitted: Emitted, tmp_path: Path) -> None:
    changed = document(emitted)
    changed["actions"]["0"] = ["0RECV_B0 0F0 0B0 0SEND_F0 0TIED 0STEP"]
    schedule = read_schedule(Path(write(tmp_path, changed)))
    with pytest.raises(RunError, match="the plan deadlocks: stage 0 waits in 0B0, stage 1 waits in 1F0, stage 2 waits in 2F0"):
        run_virtual(emitted.program, schedule, Settings(1, 0, Knobs("")))


def test_a_tie_with_one_name_in_the_file_is_enough(emitted: Emitted, tmp_path: Path) -> None:
    state = dict(user_model(layers=2).state_dict())
    whole = run_virtual(emitted.program, emitted.schedule, Settings(1, 0, Knobs(""), state))
    del state["lm_head.weight"]
    assert run_virtual(emitted.program, emitted.schedule, Settings(1, 0, Knobs(""), state)).losses == whole.losses


def test_trained_weights_can_be_saved_and_continued(emitted: Emitted, tmp_path: Path) -> None:
    path, losses = tmp_path / "trained.pt", tmp_path / "losses.pt"
    for flags in (("--save-state-dict", str(path)), ("--state-dict", str(path), "--save-losses", str(losses))):
        with pytest.raises(SystemExit) as ended:
            main(emitted.program, "gpt.schedule.json", ["--virtual", *flags])
        assert ended.value.code == 0
    assert set(torch.load(path)) == set(user_model(layers=2).state_dict())
    assert len(torch.load(losses)) == 1
