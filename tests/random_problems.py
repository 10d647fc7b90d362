"""Small random planning problems, built directly: no tracer, round numbers, every kind of machine the planner must cope with."""

from __future__ import annotations

import random

from mpress.machine import Device, Machine
from mpress.plan import ScheduleKind
from mpress.problem import Problem
from mpress.units import Bytes, BytesPerSecond, Seconds
from mpress.workload import CellCost, Mode, Workload


def random_cost(draw: random.Random, name: str, modes: int, tie: bool) -> CellCost:
    """A cell type whose mode 0 keeps everything; the others recompute, swap, or both."""
    forward = draw.choice([1.0, 2.0, 3.0])
    saved = draw.choice([20, 40, 60])
    work = draw.choice([0, 10, 30])
    output = draw.choice([0, 4, 10])
    rows = [Mode((), (), Bytes(saved), Bytes(0), Bytes(saved + output), Bytes(saved + work + output), Seconds(0.0))]
    for kind in draw.sample(["recompute", "swap", "both"], modes - 1):
        recompute = draw.choice([saved // 2, saved - 10]) if kind != "swap" else 0
        swap = draw.choice([saved // 2, saved - recompute]) if kind == "swap" else (saved - recompute if kind == "both" else 0)
        resident = saved - recompute - swap
        redo = draw.choice([0.25, 0.5, 1.0]) * forward if recompute else 0.0
        peak = Bytes(saved + work + output)
        rows.append(Mode((1,) if recompute else (), (2,) if swap else (), Bytes(resident), Bytes(swap), peak, peak, Seconds(redo)))
    elements = draw.choice([5, 10, 20])
    return CellCost(
        name=name,
        forward_seconds=Seconds(forward),
        backward_seconds=Seconds(2 * forward),
        output_bytes=Bytes(output),
        gradient_bytes=Bytes(output),
        carried_bytes=Bytes(draw.choice([0, 0, 6])),
        kept_bytes=Bytes(draw.choice([0, output])),
        input_bytes=Bytes(draw.choice([0, 0, 2])),
        parameter_elements=elements,
        trainable_elements=elements,
        trainable_tensors=1,
        largest_trainable_elements=elements,
        shared_parameters=((0, elements),) if tie else (),
        modes=tuple(rows),
    )


def random_problem(seed: int) -> Problem:
    """At most 6 cells of 1-2 types with 2-3 modes, 1-3 GPUs, 1-4 micro-batches, both schedules, uneven links, tight and loose memory."""
    draw = random.Random(seed)
    kinds = draw.choice([1, 2, 2])
    stages = draw.choice([1, 2, 2, 3])
    modes = draw.choice([2, 3])
    tie = kinds == 2 and draw.random() < 0.2
    types = tuple(random_cost(draw, f"t{t}", modes if t == 0 else draw.choice([1, 2]), False) for t in range(kinds))
    segments: list[tuple[tuple[int, ...], int]]
    if kinds == 1:
        segments = [((0,), draw.randint(max(stages, 2), 6 if stages < 3 else 5))]
    elif draw.random() < 0.5:
        segments = [((0, 1), draw.randint(2, 3 if stages < 3 else 2))]
    else:
        segments = [((1,), 1), ((0,), draw.randint(2, 4 if stages < 3 else 3))]
    if tie:  # the first cell's type and another share a parameter
        elements = min(cost.parameter_elements for cost in types)
        types = tuple(
            CellCost(**{f: getattr(c, f) for f in c.__dataclass_fields__ if f != "shared_parameters"}, shared_parameters=((0, elements),))
            for c in types
        )
    cells = tuple(t for period, count in segments for _ in range(count) for t in period)
    workload = Workload(
        types=types,
        cells=cells,
        segments=tuple(segments),
        bytes_per_trainable=4,
        bytes_per_frozen=1,
        bytes_per_tensor=draw.choice([0, 4]),
        step_bytes_per_element=draw.choice([0, 4]),
        gradient_element_bytes=2,
        optimizer_seconds_per_element=draw.choice([0.0, 0.01]),
    )
    micro_batches = draw.randint(1, 4)
    whole = sum(types[t].modes[0].resident_bytes * min(stages, micro_batches) + types[t].parameter_elements * 4 for t in cells)
    capacity = int(whole / stages * draw.choice([0.65, 0.75, 0.8, 0.85, 0.9, 1.0, 1.5])) + draw.choice([20, 60, 100])
    speeds = [[0.0 if a == b else draw.choice([0.0, 20.0, 40.0, 80.0]) for b in range(stages)] for a in range(stages)]
    links = tuple(tuple(BytesPerSecond(speeds[a][b] if speeds[b][a] else 0.0) for b in range(stages)) for a in range(stages))
    machine = Machine(
        name="random",
        devices=tuple(Device(Bytes(capacity), (), BytesPerSecond(1.0), 1.0, 0.0) for _ in range(stages)),
        links=links,
        port=BytesPerSecond(draw.choice([60.0, 160.0])),
        host_bandwidth=tuple(BytesPerSecond(draw.choice([10.0, 20.0, 40.0])) for _ in range(stages)),
        uplinks=((tuple(range(min(2, stages))), BytesPerSecond(30.0)),) if draw.random() < 0.3 else (),
        host_memory=Bytes(draw.choice([0, 200, 100_000])),
        latency_seconds=draw.choice([0.0, 0.1]),
        reserve=0.0,
    )
    kind = draw.choice([ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE])
    return Problem(workload, machine, kind, micro_batches, gap=0.0)


def block_problem(blocks: int, stages: int, capacity: int, kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B) -> Problem:
    """A transformer in miniature: embedding, `blocks` pairs of attention and MLP, head; modes recompute, swap and both."""

    def cost(name: str, forward: float, saved: int, elements: int, tie: bool, rows: tuple[tuple[int, int, float], ...]) -> CellCost:
        modes = [Mode((), (), Bytes(saved), Bytes(0), Bytes(saved + 10), Bytes(saved + 30), Seconds(0.0))]
        for resident, swapped, redo in rows:
            recompute = (1,) if redo else ()
            swap = (2,) if swapped else ()
            modes.append(Mode(recompute, swap, Bytes(resident), Bytes(swapped), Bytes(saved + 10), Bytes(saved + 30), Seconds(redo)))
        return CellCost(
            name=name,
            forward_seconds=Seconds(forward),
            backward_seconds=Seconds(2 * forward),
            output_bytes=Bytes(8),
            gradient_bytes=Bytes(8),
            carried_bytes=Bytes(0),
            kept_bytes=Bytes(0),
            input_bytes=Bytes(1 if tie else 0),
            parameter_elements=elements,
            trainable_elements=elements,
            trainable_tensors=2,
            largest_trainable_elements=elements,
            shared_parameters=((0, 20),) if tie else (),
            modes=tuple(modes),
        )

    types = (
        cost("embedding", 0.1, 8, 20, True, ()),
        cost("attention", 1.0, 50, 4, False, ((30, 0, 0.05), (10, 40, 0.0), (10, 0, 0.6))),
        cost("mlp", 1.5, 80, 8, False, ((50, 0, 0.04), (0, 80, 0.0), (8, 0, 0.9), (0, 50, 0.04))),
        cost("head", 1.2, 60, 20, True, ()),
    )
    cells = (0, *(1, 2) * blocks, 3)
    workload = Workload(
        types=types,
        cells=cells,
        segments=(((0,), 1), ((1, 2), blocks), ((3,), 1)),
        bytes_per_trainable=8,
        bytes_per_frozen=1,
        bytes_per_tensor=4,
        step_bytes_per_element=1,
        gradient_element_bytes=1,
        optimizer_seconds_per_element=0.001,
    )
    machine = Machine(
        name="miniature",
        devices=tuple(Device(Bytes(capacity), (), BytesPerSecond(1.0), 1.0, 0.0) for _ in range(stages)),
        links=tuple(tuple(BytesPerSecond(0.0 if a == b else 600.0) for b in range(stages)) for a in range(stages)),
        port=BytesPerSecond(600.0),
        host_bandwidth=tuple(BytesPerSecond(40.0) for _ in range(stages)),
        uplinks=tuple(((s, s + 1), BytesPerSecond(40.0)) for s in range(0, stages - 1, 2)),
        host_memory=Bytes(1_000_000),
        latency_seconds=0.001,
        reserve=0.0,
    )
    return Problem(workload, machine, kind, 8, gap=0.01)
