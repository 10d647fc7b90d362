"""Turns graph, chain, machine and recipe into the Workload: for every cell type the few modes worth choosing from, with their programs.

For each recompute level (see mpress.levels) the big storages that are left may be swapped, in nested sets.  A mode that another one beats
or equals in memory, traffic and time is dropped.
"""

from __future__ import annotations

from collections import Counter

from mpress.cells import Cell, Chain
from mpress.costs import backward_seconds, check_kernels, check_precision, forward_seconds, optimizer_seconds_per_element, recompute_seconds
from mpress.dataflow import Dataflow, study
from mpress.graph import Graph, Parameter, reads
from mpress.levels import levels
from mpress.lines import swappable, write_program
from mpress.liveness import footprint
from mpress.machine import Device, Machine
from mpress.program import CellProgram
from mpress.recipe import Recipe
from mpress.units import Bytes
from mpress.workload import CellCost, Mode, Workload

MOST_LEVELS = 6
MOST_MODES = 16
_TINY = 0.001  # storages below this share of a cell's saved bytes are not worth a line of code
_SMALL = 0.01  # storages below this share are not worth a transfer
_SHARES = (0.0, 1 / 3, 2 / 3, 1.0)  # of what can be swapped


def build_workload(graph: Graph, chain: Chain, machine: Machine, recipe: Recipe) -> tuple[Workload, tuple[tuple[CellProgram, ...], ...]]:
    """The workload and programs[type][mode], parallel to CellCost.modes.  Raises InputError if the machine lacks the dtype or a kernel.

    Seconds are those of the machine's first device (the devices of a profile are equal).
    """
    check_precision(machine, recipe)
    check_kernels(machine, graph)
    ties, shared = _ties(graph, chain), _shared_buffers(graph, chain)
    types: list[CellCost] = []
    programs: list[tuple[CellProgram, ...]] = []
    for type_, index in enumerate(chain.representatives):
        flow = study(graph, chain.cells[index])
        chosen = _modes(graph, flow, machine.devices[0])
        types.append(_cost(graph, chain, flow, machine.devices[0], ties.get(type_, {}), tuple(mode for mode, _ in chosen), shared[type_]))
        programs.append(tuple(program for _, program in chosen))
    workload = Workload(
        types=tuple(types),
        cells=tuple(cell.type for cell in chain.cells),
        segments=tuple((segment.period, segment.count) for segment in chain.segments),
        bytes_per_trainable=recipe.bytes_per_trainable,
        bytes_per_frozen=recipe.bytes_per_frozen,
        bytes_per_tensor=recipe.bytes_per_tensor,
        step_bytes_per_element=recipe.step_bytes_per_element,
        gradient_element_bytes=recipe.gradient_bytes,
        optimizer_seconds_per_element=optimizer_seconds_per_element(recipe, machine.devices[0]),
    )
    return workload, tuple(programs)


def _modes(graph: Graph, flow: Dataflow, device: Device) -> list[tuple[Mode, CellProgram]]:
    """Modes of one type in order of level and swapped bytes; mode 0 keeps everything."""
    total = sum(flow.sizes[s] for s in flow.natural)
    candidates = frozenset(s for s in flow.natural & flow.rebuildable if flow.sizes[s] >= _TINY * total)
    found: list[tuple[Mode, CellProgram]] = []
    coarse: list[bool] = []  # modes in the middle of a level's swap sets: the first to go
    for level in levels(flow, device, candidates, MOST_LEVELS):
        _, extra = flow.closure(level.recompute)
        carried = (flow.natural - level.recompute) | extra
        big = frozenset(s for s in swappable(flow, carried) if flow.sizes[s] >= _SMALL * total)
        sets = _swap_sets(flow, big)
        for place, swap in enumerate(sets):
            program = write_program(flow, level.recompute, swap, graph)
            found.append((_mode(flow, program, device), program))
            coarse.append(0 < place < len(sets) - 1)
    kept = [i for i in range(len(found)) if not any(_beats(found[j][0], found[i][0], j < i) for j in range(len(found)) if j != i)]
    if 0 not in kept:
        kept.insert(0, 0)
    while len(kept) > MOST_MODES:
        kept.remove(next((i for i in reversed(kept) if coarse[i]), kept[-1]))
    return [found[i] for i in kept]


def _swap_sets(flow: Dataflow, big: frozenset[int]) -> list[frozenset[int]]:
    """Nested sets, the biggest storages first: about none, a third, two thirds and all of the bytes."""
    order = sorted(big, key=lambda s: (-flow.sizes[s], s))
    total = sum(flow.sizes[s] for s in order)
    sets: list[frozenset[int]] = []
    for share in _SHARES:
        taken: list[int] = []
        for storage in order:
            if sum(flow.sizes[s] for s in taken) >= share * total:
                break
            taken.append(storage)
        if frozenset(taken) not in sets:
            sets.append(frozenset(taken))
    return sets


def _mode(flow: Dataflow, program: CellProgram, device: Device) -> Mode:
    seen = footprint(flow, program)
    return Mode(
        recompute=program.recompute,
        swap=program.swap,
        resident_bytes=seen.resident,
        swapped_bytes=seen.swapped,
        forward_peak_bytes=seen.forward_peak,
        backward_peak_bytes=seen.backward_peak,
        recompute_seconds=recompute_seconds(flow, program, device),
    )


def _beats(one: Mode, other: Mode, earlier: bool) -> bool:
    """`one` is nowhere worse than `other`, and better somewhere or earlier in the list."""
    a, b = _scores(one), _scores(other)
    return all(x <= y for x, y in zip(a, b, strict=True)) and (a != b or earlier)


def _scores(mode: Mode) -> tuple[float, ...]:
    return (mode.resident_bytes, mode.swapped_bytes, mode.recompute_seconds, mode.forward_peak_bytes, mode.backward_peak_bytes)


def _cost(
    graph: Graph,
    chain: Chain,
    flow: Dataflow,
    device: Device,
    ties: dict[int, int],
    modes: tuple[Mode, ...],
    shared: tuple[tuple[int, int], ...],
) -> CellCost:
    cell = flow.cell
    known = {parameter.names[0]: parameter for parameter in graph.parameters}
    parameters = [known[name] for name in cell.parameters]
    trainable = [_elements(graph, parameter) for parameter in parameters if parameter.trainable]
    return CellCost(
        name=cell.name,
        forward_seconds=forward_seconds(flow, device),
        backward_seconds=backward_seconds(graph, flow, device),
        output_bytes=_storage_bytes(graph, cell.outputs),
        gradient_bytes=_storage_bytes(graph, cell.gradient_inputs),
        carried_bytes=Bytes(sum(graph.storages[s].bytes for s in cell.carried)),
        kept_bytes=Bytes(sum(graph.storages[s].bytes for s in _kept(graph, cell, modes))),
        input_bytes=_storage_bytes(graph, cell.user_inputs),
        parameter_elements=sum(_elements(graph, parameter) for parameter in parameters),
        trainable_elements=sum(trainable),
        trainable_tensors=len(trainable),
        largest_trainable_elements=max(trainable, default=0),
        shared_parameters=tuple(sorted(ties.items())),
        modes=modes,
        buffer_bytes=_storage_bytes(graph, tuple(buffer.tensor for buffer in graph.buffers if buffer.names[0] in cell.buffers)),
        shared_buffers=shared,
    )


def _kept(graph: Graph, cell: Cell, modes: tuple[Mode, ...]) -> set[int]:
    """Storages that leave the cell and stay saved in its stage whatever the mode: carried on, or saved by the cell in every mode."""
    leaving = {graph.tensors[t].storage for t in cell.outputs}
    read = {graph.tensors[t].storage for op in cell.backward for t in reads(graph.ops[op])}
    dropped = {s for mode in modes for s in (*mode.recompute, *mode.swap)}
    return leaving & (set(cell.carried) | (read - dropped))


def _storage_bytes(graph: Graph, tensors: tuple[int, ...]) -> Bytes:
    """Bytes of the storages of these tensors, each once."""
    wanted = {graph.tensors[t].storage for t in tensors}
    return Bytes(sum(graph.storages[s].bytes for s in wanted))


def _shared_buffers(graph: Graph, chain: Chain) -> list[tuple[tuple[int, int], ...]]:
    """By type: (buffer id, bytes) of buffers that all its cells use and that more than one cell uses; the id is the index of the buffer.

    A buffer two cells of a block share with each other, but not with other blocks, counts in both.
    """
    users = Counter(name for cell in chain.cells for name in cell.buffers)
    common: dict[int, frozenset[str]] = {}
    for cell in chain.cells:
        names = frozenset(cell.buffers)
        common[cell.type] = common.get(cell.type, names) & names
    return [
        tuple(
            (index, int(graph.storages[graph.tensors[buffer.tensor].storage].bytes))
            for index, buffer in enumerate(graph.buffers)
            if users[buffer.names[0]] > 1 and buffer.names[0] in common[type_]
        )
        for type_ in range(len(chain.representatives))
    ]


def _ties(graph: Graph, chain: Chain) -> dict[int, dict[int, int]]:
    """type -> {tie id: elements} of trainable parameters that more than one cell uses; the tie id is the index of the parameter."""
    index = {parameter.names[0]: number for number, parameter in enumerate(graph.parameters)}
    users = Counter(name for cell in chain.cells for name in cell.parameters)
    ties: dict[int, dict[int, int]] = {}
    for type_, representative in enumerate(chain.representatives):
        for name in chain.cells[representative].parameters:
            if users[name] > 1 and graph.parameters[index[name]].trainable:
                ties.setdefault(type_, {})[index[name]] = _elements(graph, graph.parameters[index[name]])
    return ties


def _elements(graph: Graph, parameter: Parameter) -> int:
    """Real numbers in a parameter: a complex element is two."""
    return parameter.elements * (2 if graph.tensors[parameter.tensor].dtype.startswith("complex") else 1)
