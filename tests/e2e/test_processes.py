"""Emitted programs on real processes: the same numbers as in one process, and stripes that lie in other processes' memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import models_of_all_kinds
from forked import run_forked
from mpress.runtime import session
from mpress.runtime.parameters import Knobs
from mpress.runtime.pools import SHARED_MEMORY, shared_pools
from mpress.runtime.schedule_file import ScheduleFile
from mpress.runtime.session import Outcome, Settings, run_remote, run_virtual
from tiny_plans import emit, emit_model
from user_training import batches, user_model

SEED, STEPS, MICRO_BATCHES = 5, 2, 6


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("kind", "stages"), [("recompute", 4), ("host", 4), ("d2d", 4), ("all", 8)])
def test_processes_equal_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stages: int) -> None:
    emitted = emit(tmp_path, kind, stages, MICRO_BATCHES)
    weights = dict(user_model().state_dict())
    wanted = Settings(STEPS, SEED, Knobs(""), weights, batches(STEPS, MICRO_BATCHES), account=True, keep_gradients=True)
    alone = run_virtual(emitted.program, emitted.schedule, wanted)

    def work(rank: int) -> tuple[Outcome, int]:
        lent: list[object] = []

        def remembering(schedule: ScheduleFile, rank: int, device: torch.device) -> tuple[dict[int, Tensor], object]:
            mapped, keep = shared_pools(schedule, rank, device)
            lent.append(keep)
            return mapped, keep

        monkeypatch.setattr(session, "shared_pools", remembering)
        outcome = run_remote(emitted.program, emitted.schedule, wanted, rank, torch.device("cpu"))
        outcome.weights = {}
        pool = lent[0]
        return outcome, int(pool.count_nonzero()) if isinstance(pool, Tensor) else 0

    before = set(SHARED_MEMORY.glob("mpress-*"))
    answers = run_forked(tmp_path, stages, work)
    assert set(SHARED_MEMORY.glob("mpress-*")) <= before  # nothing is left behind

    outcomes = [outcome for outcome, _ in answers]
    assert outcomes[-1].losses == alone.losses
    for step in range(STEPS):
        together = {name: gradient for outcome in outcomes for name, gradient in outcome.gradients[step].items()}
        assert set(together) == set(alone.gradients[step])
        for name, gradient in alone.gradients[step].items():
            assert torch.equal(together[name], gradient), f"{name} in step {step}"
    for rank, outcome in enumerate(outcomes):
        predicted = emitted.schedule.stages[rank].peak_bytes
        assert 0.98 * predicted <= outcome.peak[rank] <= predicted
        assert outcome.late == 0
    moved = {key: size for outcome in outcomes for key, size in outcome.moved.items()}
    assert moved == alone.moved
    for rank, (_, nonzero) in enumerate(answers):  # the lender copied nothing itself: its owner wrote these bytes from another process
        arrived = sum(size for (owner, pool, way), size in moved.items() if pool == rank and way == "out" and owner != rank)
        assert (nonzero > 0) == (arrived > 0), f"pool of rank {rank}"
        assert nonzero <= emitted.schedule.pools[rank]
    assert any(nonzero for _, nonzero in answers) == (kind in ("d2d", "all"))


@pytest.mark.parametrize("name", ["unet", "encoder_decoder_shared_embedding", "no_gradient_part", "convolutions_batch_norm"])
def test_several_tensors_or_none_over_a_cut(tmp_path: Path, name: str) -> None:
    """Skips, an encoder's output, a cut without gradients, and buffers: three processes equal one."""
    emitted = emit_model(tmp_path, models_of_all_kinds.write(name, tmp_path), {}, "all", 3, 4)
    assert any(len(stage.forward) != 1 or len(stage.gradients) != 1 for stage in emitted.schedule.stages[:-1]) or emitted.graph.buffers
    wanted = Settings(STEPS, SEED, Knobs(""), account=True, keep_gradients=True)
    alone = run_virtual(emitted.program, emitted.schedule, wanted)

    def work(rank: int) -> Outcome:
        return run_remote(emitted.program, emitted.schedule, wanted, rank, torch.device("cpu"))

    outcomes = run_forked(tmp_path, 3, work)
    assert outcomes[-1].losses == pytest.approx(alone.losses, rel=1e-6)
    for step in range(STEPS):
        together = {name: gradient for outcome in outcomes for name, gradient in outcome.gradients[step].items()}
        assert set(together) == set(alone.gradients[step])
        for key, gradient in alone.gradients[step].items():
            torch.testing.assert_close(
                together[key], gradient, rtol=2e-5, atol=1e-7
            )  # three copies of a tied one are added in another order
    for outcome in outcomes:
        for key, value in outcome.weights.items():
            torch.testing.assert_close(value, alone.weights[key], rtol=1e-4, atol=1e-6)
    assert all(outcome.peak[rank] <= emitted.schedule.stages[rank].peak_bytes for rank, outcome in enumerate(outcomes))


def test_swapped_memory_leaves_its_owner(tmp_path: Path) -> None:
    """The same cells on the same stages: swapping lowers the measured peak of the owner by what the plans say, and raises the lender's."""
    peaks = []
    for kind in ("keep", "d2d"):
        folder = tmp_path / kind
        folder.mkdir()
        emitted = emit(folder, kind, 4, MICRO_BATCHES)
        outcome = run_virtual(emitted.program, emitted.schedule, Settings(1, SEED, Knobs(""), account=True))
        peaks.append(outcome.peak)
        pools = emitted.schedule.pools
    kept, swapped = peaks
    assert swapped[0] < 0.7 * kept[0]
    assert swapped[1] < 0.7 * kept[1]
    assert swapped[2] - kept[2] == pools[2] > 0
    assert swapped[3] - kept[3] == pools[3] > 0


def test_torchrun(tmp_path: Path) -> None:
    """The command in the header of the file, start to end, against the same program in one process."""
    emitted = emit(tmp_path, "all", 4, MICRO_BATCHES, layers=4)
    model = user_model(layers=4)
    torch.save(dict(model.state_dict()), tmp_path / "model.pt")
    torch.save(batches(1, MICRO_BATCHES), tmp_path / "data.pt")
    flags = ["--steps", "1", "--state-dict", "model.pt", "--data", "data.pt", "--account"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = []
    for head, name in ((run, "apart"), ([sys.executable], "together")):
        extra = ["--virtual"] if name == "together" else []
        command = [*head, emitted.module_path.name, *flags, *extra, "--save-gradients", f"{name}.pt"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert "step 0  loss 4.8" in outputs[0]
    assert outputs[0].count(" %") == 4
    apart, together = torch.load(tmp_path / "apart.pt"), torch.load(tmp_path / "together.pt")
    assert all(torch.equal(apart[0][name], gradient) for name, gradient in together[0].items())
