"""The annotated PyTorch module: the whole plan as a program a person can read.  Obeys the Plan's tags and knows no costs.

header          the plan in a few lines, and how to read the file
make_<buffer>   functions that give buffers their first values
<cell>_mode<m>  a forward and a backward function per cell type and mode in use, from its CellProgram
StageN          which cells run on which GPU, in loops over equal layers
INPUTS, STAGES  what the runtime needs to feed it; `main` of mpress.runtime runs it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mpress.cells import Chain
from mpress.emit.buffers import buffer_rows, stage_buffers, unused_buffers
from mpress.emit.cell_code import cell_functions, type_stems
from mpress.emit.fingerprint import fingerprint
from mpress.emit.names import RUNTIME
from mpress.emit.stage_code import layer, shape_table, stage_class, stage_title, swap_words
from mpress.graph import Graph
from mpress.plan import Plan
from mpress.program import CellProgram
from mpress.simulate import Replay
from mpress.units import gib
from mpress.workload import Workload

_IMPORTS = "from mpress.runtime import"  # completed once it is known what is used


def emit_module(
    graph: Graph,
    chain: Chain,
    workload: Workload,
    programs: Sequence[Sequence[CellProgram]],
    plan: Plan,
    replay: Replay,
    *,
    machine: str,
    recipe: str,
    dtype: str,
    schedule_name: str,
    module_name: str,
    version: str,
) -> str:
    """Source text of the module.  recipe: bytes per parameter in words; dtype: torch's name of the precision.

    Raises InputError("no-form") for an operator that has no form in emitted code.
    """
    text = _header(graph, chain, workload, plan, replay, machine, recipe, schedule_name, module_name, version)
    text += [
        "import sys",
        "",
        "import torch",
        _IMPORTS,
        "",
        "aten = torch.ops.aten",
        f'GRAPH_SHA256 = "{fingerprint(graph)}"',
        f'DTYPE = "{dtype}"',
        f"DTYPES = {_table(_other_dtypes(graph, dtype))}  # parameters of another dtype",
        f"FROZEN = {_names([p.names[0] for p in graph.parameters if not p.trainable])}",
        f"ALIASES = {_ties(graph)}  # all names of each tied parameter and shared buffer",
        "INPUTS = {  # name: shape of a micro-batch, dtype, range of made-up integers: low <= x < high",
    ]
    for given in graph.inputs:
        tensor = graph.tensors[given.tensor]
        text.append(f'    "{given.name}": ({tensor.shape!r}, "{tensor.dtype}", {given.low}, {given.high + 1}),')
    stems = type_stems(chain)
    held = buffer_rows(graph, chain, stems)
    text += ["}", "", "", *held.code, *unused_buffers(graph, chain, held), "", ""]
    for kind, mode in _modes_in_use(workload, plan):
        cell = chain.cells[chain.representatives[kind]]
        used_by = _used_by(chain, plan, kind, mode)
        text += cell_functions(graph, cell, programs[kind][mode], f"{stems[kind]}_mode{mode}", used_by)
    tables: dict[int, str] = {}
    for kind, representative in enumerate(chain.representatives):
        cell = chain.cells[representative]
        shapes = shape_table(graph, cell) if layer(cell) >= 0 else {}
        if shapes:
            tables[kind] = f"{stems[kind].upper()}_SHAPES"
            text += [f"{tables[kind]} = {{", *(f'    "{name}": {shape!r},' for name, shape in shapes.items()), "}"]
    for index in range(len(plan.stages)):
        buffers = stage_buffers(graph, chain, plan.stages[index], held)
        text += stage_class(graph, chain, plan, index, int(replay.stages[index].peak_bytes), stems, tables, buffers)
    stages = ", ".join(f"Stage{i}" for i in range(len(plan.stages)))
    text += ["", "", f"STAGES = ({stages}{',' if len(plan.stages) == 1 else ''})", "", 'if __name__ == "__main__":']
    text += [f'    main(sys.modules[__name__], "{schedule_name}")']
    whole = "\n".join(line.rstrip() for line in text) + "\n"
    used = [name for name in RUNTIME if re.search(rf"\b{name}\(", whole)]
    return whole.replace(_IMPORTS, f"from mpress.runtime import {', '.join(used)}", 1)


def _names(names: Sequence[str]) -> str:
    """A tuple of strings as Python text."""
    quoted = [f'"{name}"' for name in names]
    return f"({quoted[0]},)" if len(quoted) == 1 else f"({', '.join(quoted)})"


def _ties(graph: Graph) -> str:
    ties = [_names(p.names) for p in graph.holders if len(p.names) > 1]
    return f"({', '.join(ties)},)" if ties else "()"


def _table(rows: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": "{value}"' for name, value in rows.items()) + "}"


def _other_dtypes(graph: Graph, dtype: str) -> dict[str, str]:
    found = {name: graph.tensors[p.tensor].dtype for p in graph.parameters for name in p.names}
    return {name: kind for name, kind in found.items() if kind != dtype}


def _modes_in_use(workload: Workload, plan: Plan) -> list[tuple[int, int]]:
    found = {(workload.cells[s.first + i], mode) for s in plan.stages for i, mode in enumerate(s.modes)}
    return sorted(found)


def _used_by(chain: Chain, plan: Plan, kind: int, mode: int) -> str:
    """ "h.0.attn .. h.4.attn on GPU 0, h.10.attn on GPU 1"."""
    words = []
    for stage in plan.stages:
        mine = [
            chain.cells[stage.first + i].name for i, m in enumerate(stage.modes) if m == mode and chain.cells[stage.first + i].type == kind
        ]
        if mine:
            words.append((mine[0] if len(mine) == 1 else f"{mine[0]} .. {mine[-1]} ({len(mine)})") + f" on GPU {stage.device}")
    return words[0] if len(words) == 1 else f"{words[0]} and {len(words) - 1} more stages"


def _header(
    graph: Graph,
    chain: Chain,
    workload: Workload,
    plan: Plan,
    replay: Replay,
    machine: str,
    recipe: str,
    schedule_name: str,
    module_name: str,
    version: str,
) -> list[str]:
    parameters = sum(p.elements for p in graph.parameters)
    lines = [
        "#!/usr/bin/env python3",
        f"# Generated by mpress-plan {version} together with {schedule_name} -- edit the model or the plan, not this file.",
        f"#   model     {graph.model}, {parameters:,} parameters, micro-batch {graph.micro_batch}",
        f"#   training  {recipe}",
        f"#   pipeline  {len(plan.stages)} stages on {machine}, {plan.schedule.value}, {plan.micro_batches} micro-batches a step",
        "#   memory    predicted peak of each stage:",
    ]
    for index, stage in enumerate(plan.stages):
        peak = gib(replay.stages[index].peak_bytes)
        lines.append(f"#     stage {index}   {peak:>10}   {stage_title(chain, stage)}")
        if stage.shares:
            lines.append(f"#               {swap_words(stage)}")
    return [
        *lines,
        "#",
        f"#   torchrun --nproc-per-node {len(plan.stages)} {module_name} --steps K [--state-dict FILE]",
        f"#   python {module_name} --virtual --steps K          # all stages in one process, for tests",
        "#",
        "# How to read it.  A stage's fwd and bwd call one function a cell.  `p` holds parameters and buffers under the user's own names,",
        "# `c` what one micro-batch leaves behind between forward and backward; each line that touches it is one memory decision:",
        "#   c.save(t=t)          keep on this GPU until the backward",
        "#   c.swap_out(t=t)      start copying to the pools named in the schedule file; c.free(..): the copy is done, the memory is free",
        "#   c.prefetch(..)       allocate and start copying back;                      c.load(..): wait for it, use it",
        "#   # recompute          not saved at all: rebuilt on this line",
        "#   p.grad[..] += t      add to the gradient buffer of a parameter",
        "",
    ]
