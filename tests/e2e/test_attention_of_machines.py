"""`--attention auto` means what torch chooses on the GPUs of the machine: V100 have no flash kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpress.driver
from mpress.driver import plan_model
from mpress.errors import InputError
from mpress.graph import Graph
from mpress.graph_file import write_graph
from mpress.modes import build_workload
from mpress.options import Attention, Options
from mpress.plan import ScheduleKind
from mpress.recipe import Optimizer, Precision
from tiny_models import GPT, gpt_args

FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
SIZES = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 8, "vocabulary": 16, "dropout": 0.1, "tied": True}


def options(tmp_path: Path, machine: str, attention: Attention = Attention.AUTO, sizes: tuple[int, ...] | None = None) -> Options:
    return Options(
        GPT,
        gpus=1,
        machine=machine,
        micro_batch=1,
        micro_batches=2,
        schedule=ScheduleKind.ONE_F_ONE_B,
        precision=Precision.FP16,
        optimizer=Optimizer.ADAMW,
        gap=0.05,
        reserve=0.05,
        work_limit=0.0,
        model_args=tuple(gpt_args(**SIZES).items()),
        out=tmp_path,
        dry_run=True,
        attention=attention,
        prove=False,
        sizes=sizes,
        global_batch=None if sizes is None else 4,
    )


def planned(wanted: Options, monkeypatch: pytest.MonkeyPatch) -> tuple[Graph, str]:
    """The graph that is planned, and what is said of tracing it."""
    graphs: list[Graph] = []
    notes: list[str] = []

    def build(graph: Graph, *rest: object) -> object:
        graphs.append(graph)
        return build_workload(graph, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(mpress.driver, "build_workload", build)
    monkeypatch.setattr("mpress.size_plans.build_workload", build)
    plan_model(wanted, lambda step, seconds, note: notes.append(note) if step == "trace" and seconds is not None else None)
    return graphs[-1], notes[0]


def kernels(graph: Graph) -> set[str]:
    return {op.name for op in graph.ops if op.name in (FLASH, EFFICIENT)}


@pytest.mark.parametrize("sizes", [None, (1, 2)])
def test_auto_is_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] | None) -> None:
    older, said = planned(options(tmp_path, "dgx1-v100-32gb", sizes=sizes), monkeypatch)
    assert kernels(older) == {EFFICIENT} and "no flash attention" in said
    newer, said = planned(options(tmp_path, "dgx-a100-40gb", sizes=sizes), monkeypatch)
    assert kernels(newer) == {FLASH} and "flash" not in said


def test_flash_is_refused_before_tracing_and_in_a_graph_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as refusal:
        plan_model(options(tmp_path, "dgx1-v100-32gb", Attention.FLASH), lambda *_: None)
    assert refusal.value.code == "attention" and refusal.value.where == "--attention" and "dgx1-v100-32gb" in refusal.value.message
    graph, _ = planned(options(tmp_path, "dgx-a100-40gb"), monkeypatch)
    path = tmp_path / "gpt.graph.json"
    path.write_text(write_graph(graph))
    read = options(tmp_path, "dgx1-v100-32gb")
    with pytest.raises(InputError) as refusal:
        plan_model(Options(**{**{f: getattr(read, f) for f in Options.__dataclass_fields__}, "model": str(path), "model_args": ()}), print)
    assert refusal.value.code == "attention" and ".py:" in refusal.value.where and "--attention efficient" in refusal.value.hint
