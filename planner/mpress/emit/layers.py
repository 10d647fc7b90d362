"""Which layers a stage holds, in few words; and whether every numbered layer of the graph is on some stage."""

from __future__ import annotations

import re

from mpress.cells import Chain
from mpress.graph import Graph, Phase
from mpress.plan import Plan

_NUMBERED = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def layer_words(chain: Chain, first: int, last: int) -> str:
    """Cells [first, last) in few words: "wte..drop, h.0-h.8, h.9.attn"; a block is named whole when all its cells are there."""
    parts: dict[str, int] = {}
    for cell in chain.cells:
        parts[_block(cell.name)] = parts.get(_block(cell.name), 0) + 1
    runs: list[tuple[str, list[str]]] = []  # (block, its cells in this stage)
    for cell in chain.cells[first:last]:
        block = _block(cell.name)
        if runs and runs[-1][0] == block:
            runs[-1][1].append(cell.name)
        else:
            runs.append((block, [cell.name]))
    whole = [len(inside) == parts[block] for block, inside in runs]
    words: list[str] = []
    position = 0
    while position < len(runs):
        block, inside = runs[position]
        end = position
        if whole[position]:
            while end + 1 < len(runs) and whole[end + 1] and _follows(runs[end][0], runs[end + 1][0]):
                end += 1
            words.append(block if end == position else f"{block}-{runs[end][0]}")
        else:
            words += inside if len(inside) < 3 else [f"{inside[0]}-{inside[-1]}"]
        position = end + 1
    return ", ".join(words)


def _block(name: str) -> str:
    """ "h.3" of "h.3.attn" and of "h.3/2"; the name without its part where no number is in it."""
    found = re.match(r"((?:[^./]+\.)*?\d+)(?=[./]|$)", name)
    return found[1] if found else name.split("/", 1)[0]


def _follows(a: str, b: str) -> bool:
    first, second = re.fullmatch(r"(.*?)(\d+)", a), re.fullmatch(r"(.*?)(\d+)", b)
    return bool(first and second and first[1] == second[1] and int(second[2]) == int(first[2]) + 1)


def placed_layers(graph: Graph, chain: Chain, plan: Plan) -> tuple[int, int]:
    """(layers whose every forward op runs on a stage, layers): a layer is a numbered module, "h.3".

    Counted from the modules of the graph's ops to the stages, not from the names of cells: a layer lost on the way would be missing.
    """
    on_stage = {op for stage in plan.stages for cell in chain.cells[stage.first : stage.last] for op in cell.forward}
    whole: dict[str, bool] = {}
    for op in graph.ops:
        layer = _NUMBERED.match(op.module)
        if op.phase is Phase.FORWARD and layer is not None:
            whole[layer[0]] = whole.get(layer[0], True) and op.id in on_stage
    return sum(whole.values()), len(whole)
