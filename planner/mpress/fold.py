"""Folds a Graph into a Chain: finds the places to cut, names the cells between them and recognises equal ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from mpress.cell_types import canonical
from mpress.cells import Cell, Chain, Segment
from mpress.contents import Part, fill
from mpress.cuts import Positions, find_positions
from mpress.errors import BrokenPlanError
from mpress.graph import Graph, Kind, reads

_NUMBERED = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")
_SMALLEST_PART = 0.1  # of a block's FLOPs


def fold(graph: Graph) -> Chain:
    """Cut the forward into cells and recognise equal ones.

    What reaches over a block (a skip connection, the memory of an encoder) passes through all cells between.
    """
    positions = find_positions(graph)
    parts = [piece for part in _merge(graph, positions, _regions(graph, positions)) for piece in _split(graph, positions, part)]
    if len(parts) == 1:
        parts = _anywhere(graph, positions)
    cells = fill(graph, positions, _named(graph, positions, parts))
    users = Counter(name for cell in cells for name in cell.parameters)
    tied = frozenset(name for name, count in users.items() if count > 1)
    types: dict[str, int] = {}
    representatives: list[int] = []
    typed: list[Cell] = []
    for cell in cells:
        key = canonical(graph, cell, tied)
        if key not in types:
            types[key] = len(types)
            representatives.append(cell.index)
        typed.append(replace(cell, type=types[key]))
    return Chain(tuple(typed), tuple(representatives), segments([cell.type for cell in typed]))


def _block_of(module: str) -> str:
    match = _NUMBERED.match(module)
    return match.group(0) if match else ""


def _container(key: str) -> str:
    """ "encoder.layers." of "encoder.layers.3"."""
    return key.rstrip("0123456789")


def _regions(graph: Graph, positions: Positions) -> list[Part]:
    """Runs of forward ops of one block, or of ops outside blocks; without any numbered block, of one top-level child."""
    modules = [graph.ops[op].module for op in positions.forward]
    numbered = any(_block_of(module) for module in modules)
    keys = [_block_of(module) if numbered else module.partition(".")[0] for module in modules]
    regions: list[Part] = []
    for position, key in enumerate(keys):
        if regions and regions[-1].key == key:
            regions[-1] = Part(regions[-1].first, position + 1, key, regions[-1].block)
        else:
            regions.append(Part(position, position + 1, key, numbered and key != ""))
    return regions


def _merge(graph: Graph, positions: Positions, regions: Sequence[Part]) -> list[Part]:
    """Join regions whose border is no place to cut, unless one lies shortly before it.

    What stands between two blocks of one container (residual additions) belongs to the first.  A place shortly before the border is
    also taken where less is saved on both sides of it (a block that ends in a saved ReLU).
    """
    merged = [regions[0]]
    for region, following in zip_longest(regions[1:], regions[2:]):
        before = merged[-1]
        between = following is not None and region.key == "" and _container(before.key) == _container(following.key) != ""
        border = -1 if between else _border(graph, positions, before, region)
        if border > before.first:
            merged[-1] = Part(before.first, border, before.key, before.block)
            merged.append(Part(border, region.last, region.key, region.block))
            continue
        owner = before if before.block or not region.block else region
        merged[-1] = Part(before.first, region.last, owner.key, owner.block)
    return merged


def _border(graph: Graph, positions: Positions, before: Part, region: Part) -> int:
    """The best place to cut at or shortly before the beginning of `region`, -1 if there is none."""
    cut, behind = positions.cuts[region.first], positions.cuts[region.last]
    if cut is not None and region.key == "" and (cut.shared or len(cut.down) > (1 if behind is None else len(behind.down))):
        cut = None  # ops between blocks that join what the block before left (a residual, a loss) belong to it
    if cut is not None and cut.shared == 0:
        return region.first
    best, fewest = (region.first, cut.shared) if cut is not None else (-1, None)
    if before.block and region.block:
        half = _flops(graph, positions, before.first, before.last) / 2
        for p in range(region.first - 1, before.first, -1):
            if _flops(graph, positions, p, before.last) > half:
                break
            other = positions.cuts[p]
            if other is not None and (fewest is None or other.shared < fewest) and (cut is None or len(other.down) <= len(cut.down)):
                best, fewest = p, other.shared
    return best


def _flops(graph: Graph, positions: Positions, first: int, last: int) -> float:
    return sum(graph.ops[positions.forward[p]].flops for p in range(first, last))


def _split(graph: Graph, positions: Positions, part: Part) -> list[Part]:
    """Cut a block where as much crosses as where it begins, if both sides compute enough (attention | MLP)."""
    total = _flops(graph, positions, part.first, part.last)
    entry = positions.cuts[part.first]
    if not part.block or entry is None or total <= 0.0:
        return [part]
    borders = [part.first]
    for p in range(part.first + 1, part.last):
        cut = positions.cuts[p]
        if (
            cut is not None
            and (cut.bytes, len(cut.down)) == (entry.bytes, len(entry.down))
            and cut.shared <= entry.shared
            and _flops(graph, positions, borders[-1], p) >= _SMALLEST_PART * total
            and _flops(graph, positions, p, part.last) >= _SMALLEST_PART * total
        ):
            borders.append(p)
    borders.append(part.last)
    return [_piece(graph, positions, part, a, b) for a, b in pairwise(borders)]


def _anywhere(graph: Graph, positions: Positions) -> list[Part]:
    """A model without modules to go by: cut wherever least crosses and something is computed on both sides."""
    total = len(positions.forward)
    least = min(((cut.shared, len(cut.down)) for cut in positions.cuts if cut is not None), default=(0, 0))
    borders = [0]
    for p, cut in enumerate(positions.cuts):
        if cut is None or (cut.shared, len(cut.down)) != least:
            continue
        if _flops(graph, positions, borders[-1], p) > 0 and _flops(graph, positions, p, total) > 0:
            borders.append(p)
    return [Part(a, b, "", False) for a, b in pairwise([*borders, total])]


def _piece(graph: Graph, positions: Positions, part: Part, first: int, last: int) -> Part:
    """Ops outside the block that were merged with it and cut off again are no part of the block."""
    inside = any(_block_of(graph.ops[positions.forward[p]].module) == part.key for p in range(first, last))
    return Part(first, last, part.key if inside else "", inside)


def _named(graph: Graph, positions: Positions, parts: Sequence[Part]) -> list[Part]:
    """Give every part a unique name that reads well."""
    wanted: list[str] = []
    for part in parts:
        sharing = [other for other in parts if other.key == part.key and other.block]
        if not part.block:
            wanted.append(_outside_name(graph, positions, part))
        elif len(sharing) == 1:
            wanted.append(part.key)
        else:
            wanted.append(_part_name(graph, positions, part, sharing))
    seen: dict[str, int] = {}
    named: list[Part] = []
    for part, name in zip(parts, wanted, strict=True):
        seen[name] = seen.get(name, 0) + 1
        unique = name if seen[name] == 1 else f"{name}/{seen[name]}"
        named.append(Part(part.first, part.last, part.key, part.block, unique))
    return named


def _part_name(graph: Graph, positions: Positions, part: Part, sharing: Sequence[Part]) -> str:
    """The child module that computes most in each part ("h.3.attn", "h.3.mlp"); numbers where that is not unique."""
    names = [_main_child(graph, positions, other) for other in sharing]
    index = sharing.index(part)
    if "" in names or len(set(names)) < len(names):
        return f"{part.key}/{index + 1}"
    return f"{part.key}.{names[index]}"


def _main_child(graph: Graph, positions: Positions, part: Part) -> str:
    flops: dict[str, float] = {}
    for p in range(part.first, part.last):
        op = graph.ops[positions.forward[p]]
        child = op.module[len(part.key) + 1 :].partition(".")[0] if op.module.startswith(part.key + ".") else ""
        flops[child] = flops.get(child, 0.0) + op.flops
    best = max(sorted(flops), key=lambda child: flops[child])
    return best if 2 * flops[best] > sum(flops.values()) else ""


def _outside_name(graph: Graph, positions: Positions, part: Part) -> str:
    ops = [graph.ops[positions.forward[p]] for p in range(part.first, part.last)]
    modules = [op.module for op in ops if op.module]
    if not modules:
        computing = [op for op in ops if not op.view] or ops
        return computing[-1].name
    return modules[0] if modules[0] == modules[-1] else f"{modules[0]}..{modules[-1]}"


def segments(types: Sequence[int]) -> tuple[Segment, ...]:
    """Compress a sequence of types: from left to right the repetition that covers most, the shortest period first."""
    found: list[Segment] = []
    start = 0
    while start < len(types):
        best_length, best_count = 1, 1
        for length in range(1, (len(types) - start) // 2 + 1):
            period = types[start : start + length]
            count = 1
            while types[start + count * length : start + (count + 1) * length] == period:
                count += 1
            if count > 1 and length * count > best_length * best_count:
                best_length, best_count = length, count
        found.append(Segment(tuple(types[start : start + best_length]), best_count))
        start += best_length * best_count
    return tuple(found)


def check_chain(graph: Graph, chain: Chain) -> None:
    """Raise BrokenPlanError("chain") unless every op is where it belongs and data only crosses borders as the cells declare."""
    owners: dict[int, list[int]] = {}
    for cell in chain.cells:
        for number in cell.forward + cell.backward:
            owners.setdefault(number, []).append(cell.index)
    for op in graph.ops:
        _require(len(owners.get(op.id, ())) == 1 or op.view, f"op {op.id} is in {len(owners.get(op.id, ()))} cells")
    _require(sum((s.period * s.count for s in chain.segments), ()) == tuple(c.type for c in chain.cells), "segments differ from cells")
    computed = {t.id for t in graph.tensors if graph.storages[t.storage].kind is Kind.COMPUTED}
    made = {t for op in graph.ops for t in op.outputs if t in computed}
    for cell in chain.cells:
        here = {*cell.inputs}
        for number in cell.forward:
            here = _need(graph, cell, number, here, made)
        _require(here >= {t for t in cell.outputs if t in made}, f"{cell.name} does not make what it hands over")
        here |= {*cell.gradient_inputs}
        for number in cell.backward:
            here = _need(graph, cell, number, here, made)
        _require(here >= {t for t in cell.gradient_outputs if t in made}, f"{cell.name} does not make the gradients it hands back")
        _require(here >= {graph.contributions[n].tensor for n in cell.contributions} & made, f"{cell.name} lacks a gradient")
    for left, right in pairwise(chain.cells):
        _require(left.outputs == right.inputs and left.gradient_inputs == right.gradient_outputs, f"{left.name} and {right.name} differ")
        for tensor in left.outputs:
            _require(graph.storages[graph.tensors[tensor].storage].kind is Kind.COMPUTED, f"{left.name} hands over a parameter or input")
    _require(sorted(i for c in chain.cells for i in c.contributions) == list(range(len(graph.contributions))), "a contribution is lost")


def _need(graph: Graph, cell: Cell, number: int, here: set[int], made: set[int]) -> set[int]:
    """Everything op `number` reads is in the cell by now; returns that and what the op makes."""
    op = graph.ops[number]
    for tensor in reads(op):
        known = tensor in here or (tensor not in made and tensor != graph.seed)
        _require(known, f"op {op.id} ({op.target}) of {cell.name} reads tensor {tensor}, which does not get there")
    return here | {t for t in op.outputs if t >= 0}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BrokenPlanError("chain", message, hint="this is a bug of the planner, not of the model")
