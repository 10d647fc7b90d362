"""Plans written to a folder and read back, and the user's module beside them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mpress.cells import Chain
from mpress.emit.module import emit_module
from mpress.emit.schedule_file import Certificate, emit_schedule
from mpress.graph import Graph
from mpress.machine import Machine
from mpress.plan import Plan
from mpress.program import CellProgram
from mpress.recipe import Recipe
from mpress.runtime.checks import Program
from mpress.runtime.schedule_file import ScheduleFile, read_schedule
from mpress.simulate import Replay
from mpress.workload import Workload


@dataclass(frozen=True)
class Written:
    """An emitted program and its schedule, loaded."""

    program: Program
    schedule: ScheduleFile
    text: str


def write_plan(
    folder: Path,
    stem: str,
    graph: Graph,
    chain: Chain,
    workload: Workload,
    programs: Sequence[Sequence[CellProgram]],
    plan: Plan,
    replay: Replay,
    machine: Machine,
    recipe: Recipe,
) -> Written:
    """Emit `<stem>_mpress.py` and `<stem>.schedule.json`."""
    module, schedule = folder / f"{stem}_mpress.py", folder / f"{stem}.schedule.json"
    text = emit_module(
        graph,
        chain,
        workload,
        programs,
        plan,
        replay,
        machine=machine.name,
        recipe=recipe.words(),
        dtype=recipe.dtype,
        schedule_name=schedule.name,
        module_name=module.name,
        version="test",
    )
    module.write_text(text)
    schedule.write_text(
        emit_schedule(
            graph,
            chain,
            workload,
            programs,
            plan,
            replay,
            Certificate("none", "made by hand", 0.0, 1.0),
            machine=machine.name,
            precision=recipe.precision.value,
            optimizer=recipe.optimizer.value,
            version="test",
        )
    )
    return Written(cast(Program, user_module(module)), read_schedule(schedule), text)


def user_module(path: Path) -> Any:
    """Import a file under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
