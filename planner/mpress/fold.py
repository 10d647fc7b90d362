"""Folds a Graph into a Chain: finds the places to cut, names the cells between them and recognises equal ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mpress.cell_types import canonical
from mpress.cells import Cell, Chain, Segment
from mpress.cuts import Positions, find_positions
from mpress.errors import BrokenPlanError, InputError
from mpress.graph import Graph, Kind, Phase, reads

_NUMBERED = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")
_SMALLEST_PART = 0.1  # of a block's FLOPs


@dataclass(frozen=True, slots=True)
class _Part:
    """Forward positions [first, last); key: the block ("h.3") or, outside blocks, the top-level modules ("")."""

    first: int
    last: int
    key: str
    block: bool
    name: str = ""


def fold(graph: Graph) -> Chain:
    """Cut the forward into cells and recognise equal ones.

    Raises InputError("skip-connection") where a tensor reaches over a block, which chains of cells cannot express.
    """
    positions = find_positions(graph)
    parts = [piece for part in _merge(graph, positions, _regions(graph, positions)) for piece in _split(graph, positions, part)]
    cells = _cells(graph, positions, _named(graph, positions, parts))
    types: dict[str, int] = {}
    representatives: list[int] = []
    typed: list[Cell] = []
    for cell in cells:
        key = canonical(graph, cell)
        if key not in types:
            types[key] = len(types)
            representatives.append(cell.index)
        typed.append(replace(cell, type=types[key]))
    return Chain(tuple(typed), tuple(representatives), segments([cell.type for cell in typed]))


def _block_of(module: str) -> str:
    match = _NUMBERED.match(module)
    return match.group(0) if match else ""


def _regions(graph: Graph, positions: Positions) -> list[_Part]:
    """Runs of forward ops of one block, or of ops outside blocks; without any numbered block, of one top-level child."""
    modules = [graph.ops[op].module for op in positions.forward]
    numbered = any(_block_of(module) for module in modules)
    keys = [_block_of(module) if numbered else module.partition(".")[0] for module in modules]
    regions: list[_Part] = []
    for position, key in enumerate(keys):
        if regions and regions[-1].key == key:
            regions[-1] = _Part(regions[-1].first, position + 1, key, regions[-1].block)
        else:
            regions.append(_Part(position, position + 1, key, numbered and key != ""))
    return regions


def _merge(graph: Graph, positions: Positions, regions: Sequence[_Part]) -> list[_Part]:
    """Join regions whose border is no place to cut, unless one lies shortly before it (a block that ends in a saved ReLU)."""
    merged = [regions[0]]
    for region in regions[1:]:
        before = merged[-1]
        border = region.first
        if not positions.valid[border]:
            middle = max(before.first + 1, (before.first + before.last) // 2)
            border = next((p for p in range(border - 1, middle - 1, -1) if positions.valid[p]), -1) if before.block and region.block else -1
        if border >= 0:
            merged[-1] = _Part(before.first, border, before.key, before.block)
            merged.append(_Part(border, region.last, region.key, region.block))
            continue
        if before.block and region.block and before.key != region.key and positions.crossing[region.first] > 1:
            raise _skip(graph, positions, region.first)
        owner = before if before.block or not region.block else region
        merged[-1] = _Part(before.first, region.last, owner.key, owner.block)
    return merged


def _skip(graph: Graph, positions: Positions, border: int) -> InputError:
    """Several tensors cross a border of blocks: name the one that comes from farthest back and the op that needs it."""
    made: dict[int, int] = {}
    for position in range(border):
        made.update((t, position) for t in graph.ops[positions.forward[position]].outputs if t >= 0)
    needed = [
        (made[t], position)
        for position in range(border, len(positions.forward))
        for t in reads(graph.ops[positions.forward[position]])
        if t in made
    ]
    source, user = min(needed) if needed else (border - 1, border)
    producer, consumer = graph.ops[positions.forward[source]], graph.ops[positions.forward[user]]
    message = (
        f"a tensor made in '{producer.module or 'the model'}' (`{producer.source.code}`) is used beyond the next block, "
        f"in '{consumer.module or 'the model'}'; models are planned as chains of blocks that hand over one tensor"
    )
    where = consumer.source.place(consumer.module)
    return InputError("skip-connection", message, where, "compute the tensor inside the block that uses it, or carry it inside one module")


def _flops(graph: Graph, positions: Positions, first: int, last: int) -> float:
    return sum(graph.ops[positions.forward[p]].flops for p in range(first, last))


def _split(graph: Graph, positions: Positions, part: _Part) -> list[_Part]:
    """Cut a block where it hands over one tensor of the size of its input, if both sides compute enough (attention | MLP)."""
    total = _flops(graph, positions, part.first, part.last)
    if not part.block or part.first == 0 or total <= 0.0:
        return [part]
    size = graph.storages[graph.tensors[positions.tensor[part.first]].storage].bytes
    borders = [part.first]
    for p in range(part.first + 1, part.last):
        if (
            positions.valid[p]
            and graph.storages[graph.tensors[positions.tensor[p]].storage].bytes == size
            and _flops(graph, positions, borders[-1], p) >= _SMALLEST_PART * total
            and _flops(graph, positions, p, part.last) >= _SMALLEST_PART * total
        ):
            borders.append(p)
    borders.append(part.last)
    return [_piece(graph, positions, part, a, b) for a, b in pairwise(borders)]


def _piece(graph: Graph, positions: Positions, part: _Part, first: int, last: int) -> _Part:
    """Ops outside the block that were merged with it and cut off again are no part of the block."""
    inside = any(_block_of(graph.ops[positions.forward[p]].module) == part.key for p in range(first, last))
    return _Part(first, last, part.key if inside else "", inside)


def _named(graph: Graph, positions: Positions, parts: Sequence[_Part]) -> list[_Part]:
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
    named: list[_Part] = []
    for part, name in zip(parts, wanted, strict=True):
        seen[name] = seen.get(name, 0) + 1
        unique = name if seen[name] == 1 else f"{name}/{seen[name]}"
        named.append(_Part(part.first, part.last, part.key, part.block, unique))
    return named


def _part_name(graph: Graph, positions: Positions, part: _Part, sharing: Sequence[_Part]) -> str:
    """The child module that computes most in each part ("h.3.attn", "h.3.mlp"); numbers where that is not unique."""
    names = [_main_child(graph, positions, other) for other in sharing]
    index = sharing.index(part)
    if "" in names or len(set(names)) < len(names):
        return f"{part.key}/{index + 1}"
    return f"{part.key}.{names[index]}"


def _main_child(graph: Graph, positions: Positions, part: _Part) -> str:
    flops: dict[str, float] = {}
    for p in range(part.first, part.last):
        op = graph.ops[positions.forward[p]]
        child = op.module[len(part.key) + 1 :].partition(".")[0] if op.module.startswith(part.key + ".") else ""
        flops[child] = flops.get(child, 0.0) + op.flops
    best = max(sorted(flops), key=lambda child: flops[child])
    return best if 2 * flops[best] > sum(flops.values()) else ""


def _outside_name(graph: Graph, positions: Positions, part: _Part) -> str:
    ops = [graph.ops[positions.forward[p]] for p in range(part.first, part.last)]
    modules = [op.module for op in ops if op.module]
    if not modules:
        computing = [op for op in ops if not op.view] or ops
        return computing[-1].name
    return modules[0] if modules[0] == modules[-1] else f"{modules[0]}..{modules[-1]}"


def _cells(graph: Graph, positions: Positions, parts: Sequence[_Part]) -> list[Cell]:
    cell_at = [index for index, part in enumerate(parts) for _ in range(part.first, part.last)]
    cell_of = [cell_at[home] for home in positions.home]
    backward: list[list[int]] = [[] for _ in parts]
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            backward[cell_of[op.id]].append(op.id)
    producer = {t: op.id for op in graph.ops for t in op.outputs if t >= 0}
    contributions: list[list[int]] = [[] for _ in parts]
    for index, contribution in enumerate(graph.contributions):
        maker = producer.get(contribution.tensor)
        contributions[cell_of[maker] if maker is not None else len(parts) - 1].append(index)
    names = {parameter.tensor: parameter.names[0] for parameter in graph.parameters}
    buffer_names = {buffer.tensor: buffer.names[0] for buffer in graph.buffers}
    given = {item.tensor for item in graph.inputs}
    cells = []
    for index, part in enumerate(parts):
        forward = positions.forward[part.first : part.last]
        used = list(dict.fromkeys(t for op in (*forward, *backward[index]) for t in reads(graph.ops[op])))
        last = index == len(parts) - 1
        cells.append(
            Cell(
                index=index,
                type=-1,
                name=part.name,
                prefix=f"{part.key}." if part.block else "",
                forward=forward,
                backward=tuple(backward[index]),
                inputs=(positions.tensor[part.first],) if index > 0 else (),
                user_inputs=tuple(t for t in used if t in given),
                parameters=tuple(names[t] for t in used if t in names),
                buffers=tuple(buffer_names[t] for t in used if t in buffer_names),
                outputs=(graph.loss,) if last else (positions.tensor[part.last],),
                gradient_inputs=(graph.seed,) if last else (positions.gradient[part.last],),
                gradient_outputs=(positions.gradient[part.first],) if index > 0 else (),
                contributions=tuple(contributions[index]),
            )
        )
    return cells


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
    """Raise BrokenPlanError("chain") unless every op is in one cell and data only crosses borders as the cells declare."""
    cell_of: dict[int, int] = {}
    for cell in chain.cells:
        for number in cell.forward + cell.backward:
            _require(number not in cell_of, f"op {number} is in two cells")
            cell_of[number] = cell.index
    _require(len(cell_of) == len(graph.ops), "an op is in no cell")
    _require(sum((s.period * s.count for s in chain.segments), ()) == tuple(c.type for c in chain.cells), "segments differ from cells")
    made = {t: op for op in graph.ops for t in op.outputs if t >= 0}
    for op in graph.ops:
        cell = chain.cells[cell_of[op.id]]
        for tensor in reads(op):
            if tensor == graph.seed:
                _require(cell.index == len(chain.cells) - 1, f"op {op.id} uses the seed before the last cell")
            if tensor not in made:
                continue
            other = chain.cells[cell_of[made[tensor].id]]
            if other.index == cell.index:
                continue
            down = made[tensor].phase is Phase.FORWARD
            _require(other.index == cell.index + (-1 if down else 1), f"op {op.id} reads tensor {tensor} across cells")
            _require(tensor in (cell.inputs if down else cell.gradient_inputs), f"tensor {tensor} is an undeclared input of {cell.name}")
            _require(tensor in (other.outputs if down else other.gradient_outputs), f"tensor {tensor} is no output of {other.name}")
    for left, right in pairwise(chain.cells):
        _require(left.outputs == right.inputs and left.gradient_inputs == right.gradient_outputs, f"{left.name} and {right.name} differ")
        for tensor in left.outputs:
            _require(graph.storages[graph.tensors[tensor].storage].kind is Kind.COMPUTED, f"{left.name} hands over a parameter or input")
    _require(sorted(i for c in chain.cells for i in c.contributions) == list(range(len(graph.contributions))), "a contribution is lost")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BrokenPlanError("chain", message, hint="this is a bug of the planner, not of the model")
