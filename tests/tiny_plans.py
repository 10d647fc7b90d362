"""Plans made by hand, emitted and loaded: what the end-to-end tests run.  `emit` for the toy GPT, `emit_model` for any model file."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mpress.buffer_rules import check_buffers
from mpress.cells import Chain
from mpress.emit.module import emit_module
from mpress.emit.schedule_file import Certificate, emit_schedule
from mpress.fold import check_chain, fold
from mpress.graph import Graph
from mpress.machine import load_machine
from mpress.modes import build_workload
from mpress.plan import HOST, Plan, ScheduleKind, Share, StagePlan
from mpress.recipe import Optimizer, Precision, Recipe
from mpress.runtime.checks import Program
from mpress.runtime.schedule_file import ScheduleFile, read_schedule
from mpress.simulate import Replay, simulate
from mpress.trace.record import trace
from mpress.units import Bytes
from mpress.workload import CellCost, Workload
from tiny_models import GPT, gpt_args

SIZES: dict[str, object] = {"layers": 6, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128, "dropout": 0.1, "tied": True}
KINDS = ("keep", "recompute", "host", "d2d", "all")


@dataclass(frozen=True)
class Emitted:
    """An emitted program and all it was made from."""

    program: Program
    schedule: ScheduleFile
    graph: Graph
    chain: Chain
    workload: Workload
    plan: Plan
    replay: Replay
    module_path: Path


def emit(
    folder: Path,
    kind: str,
    stages: int,
    micro_batches: int = 6,
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
    optimizer: Optimizer = Optimizer.ADAMW,
    precision: Precision = Precision.FP32,
    **changes: object,
) -> Emitted:
    """Trace the toy GPT, plan it by hand as `kind` says, simulate and emit it."""
    sizes = SIZES | changes
    return emit_model(folder, GPT, gpt_args(**sizes), kind, stages, micro_batches, schedule, optimizer, precision)


def emit_model(
    folder: Path,
    path: str,
    model_args: dict[str, str],
    kind: str,
    stages: int,
    micro_batches: int,
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
    optimizer: Optimizer = Optimizer.ADAMW,
    precision: Precision = Precision.FP32,
) -> Emitted:
    """The same for a model file."""
    graph = trace(path, model_args=model_args, micro_batch=2, precision=precision.value)
    check_buffers(graph)
    chain = fold(graph)
    check_chain(graph, chain)
    stages = min(stages, len(chain.cells))
    machine = load_machine("dgx-a100-40gb", gpus=stages, reserve=0.05)
    recipe = Recipe(precision, optimizer)
    workload, programs = build_workload(graph, chain, machine, recipe)
    plan = Plan(schedule, micro_batches, tuple(_stage(workload, kind, stages, s) for s in range(stages)))
    replay = simulate(workload, machine, plan)
    module_path = folder / "gpt_mpress.py"
    module_path.write_text(
        emit_module(
            graph,
            chain,
            workload,
            programs,
            plan,
            replay,
            machine=machine.name,
            recipe=recipe.words(),
            dtype=recipe.dtype,
            schedule_name="gpt.schedule.json",
            module_name="gpt_mpress.py",
            version="test",
        )
    )
    schedule_path = folder / "gpt.schedule.json"
    schedule_path.write_text(
        emit_schedule(
            graph,
            chain,
            workload,
            programs,
            plan,
            replay,
            Certificate("none", "made by hand", 0.0, 1.0),
            machine=machine.name,
            precision=precision.value,
            optimizer=optimizer.value,
            version="test",
        )
    )
    return Emitted(load_program(module_path), read_schedule(schedule_path), graph, chain, workload, plan, replay, module_path)


def load_program(path: Path) -> Program:
    """Import an emitted module from its file."""
    spec = importlib.util.spec_from_file_location("emitted", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Program, module)


def _stage(workload: Workload, kind: str, stages: int, s: int) -> StagePlan:
    first, last = (len(workload.cells) * s // stages, len(workload.cells) * (s + 1) // stages)
    costs = [workload.types[workload.cells[i]] for i in range(first, last)]
    busy = s < stages // 2  # later stages have room and lend it
    modes = tuple(mode_of(cost, kind if busy or kind == "recompute" else "keep", i) for i, cost in enumerate(costs))
    away = sum(cost.modes[m].swapped_bytes for cost, m in zip(costs, modes, strict=True))
    pools = {"host": (HOST,), "d2d": (stages - 2, stages - 1), "all": (HOST, stages - 2, stages - 1)}.get(kind, ())
    shares = tuple(Share(pool, Bytes(away * (i + 1) // len(pools) - away * i // len(pools))) for i, pool in enumerate(pools) if away)
    return StagePlan(s, first, last, modes, shares, drain_lag=1 + s % 2, prefetch_lead=1 + (s + 1) % 2)


def mode_of(cost: CellCost, kind: str, place: int) -> int:
    """Keep, recompute most, swap most, or (all) each of them in turn."""
    indices = range(len(cost.modes))
    if kind == "all":
        kind = ("d2d", "recompute", "both", "keep")[place % 4]
    if kind == "recompute":
        return min((m for m in indices if not cost.modes[m].swap), key=lambda m: (cost.modes[m].resident_bytes, m))
    if kind in ("host", "d2d"):
        return max((m for m in indices if not cost.modes[m].recompute), key=lambda m: (cost.modes[m].swapped_bytes, -m))
    if kind == "both":
        mixed = [m for m in indices if cost.modes[m].recompute and cost.modes[m].swap]
        return mixed[0] if mixed else 0
    return 0
