"""Modes of a real GPT: useful, nested, in order, and adding up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from mpress.cells import Chain
from mpress.dataflow import study
from mpress.fold import fold
from mpress.graph import Graph, Kind
from mpress.levels import levels
from mpress.liveness import footprint
from mpress.machine import load_machine
from mpress.modes import MOST_LEVELS, MOST_MODES, build_workload
from mpress.program import CellProgram
from mpress.recipe import Optimizer, Precision, Recipe
from mpress.trace.record import trace
from mpress.workload import Workload

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
MACHINE = load_machine("dgx-a100-40gb", gpus=4)
Built = tuple[Graph, Chain, Workload, tuple[tuple[CellProgram, ...], ...]]


@pytest.fixture(scope="module")
def built() -> Built:
    arguments = {"layers": "3", "hidden": "1024", "heads": "16", "sequence": "1024", "vocabulary": "50304"}
    graph = trace(GPT, model_args=arguments, micro_batch=2, precision="bf16")
    chain = fold(graph)
    workload, programs = build_workload(graph, chain, MACHINE, Recipe(Precision.BF16, Optimizer.ADAMW))
    return graph, chain, workload, programs


def test_mode_0_keeps_everything(built: Built) -> None:
    graph, chain, workload, programs = built
    for kind, cost in enumerate(workload.types):
        assert cost.modes[0].recompute == cost.modes[0].swap == () and cost.modes[0].recompute_seconds == 0.0
        flow = study(graph, chain.cells[chain.representatives[kind]])
        assert cost.modes[0].resident_bytes == sum(flow.sizes[s] for s in flow.natural)
        assert len(cost.modes) == len(programs[kind]) <= MOST_MODES
        for mode, program in zip(cost.modes, programs[kind], strict=True):
            assert (mode.recompute, mode.swap, kind) == (program.recompute, program.swap, program.type)
            assert footprint(flow, program).resident == mode.resident_bytes


def test_no_mode_beats_another(built: Built) -> None:
    for cost in built[2].types:
        rows = [(m.resident_bytes, m.swapped_bytes, m.recompute_seconds, m.forward_peak_bytes, m.backward_peak_bytes) for m in cost.modes]
        assert len(set(rows)) == len(rows)
        for a in rows[1:]:
            assert not any(b != a and all(y <= x for x, y in zip(a, b, strict=True)) for b in rows)


def test_levels_are_nested_and_convex(built: Built) -> None:
    graph, chain, _, _ = built
    for index in chain.representatives:
        flow = study(graph, chain.cells[index])
        everything = flow.natural & flow.rebuildable
        found = levels(flow, MACHINE.devices[0], everything, MOST_LEVELS)
        assert found[0].recompute == frozenset() and found[-1].recompute == everything and len(found) <= MOST_LEVELS
        prices = []
        for before, after in pairwise(found):
            assert before.recompute < after.recompute and after.saved_bytes <= before.saved_bytes
            if after.saved_bytes < before.saved_bytes:
                prices.append((after.seconds - before.seconds) / (before.saved_bytes - after.saved_bytes))
        assert prices == sorted(prices)


def test_the_cheapest_drops_come_first(built: Built) -> None:
    """A block gives up its layer-norm outputs and its GELU before a matmul."""
    graph, chain, _, _ = built
    flow = study(graph, chain.cells[chain.representatives[1]])
    second = levels(flow, MACHINE.devices[0], flow.natural & flow.rebuildable, MOST_LEVELS)[1]
    assert not any(op.flops > 0 for op in flow.closure(second.recompute)[0])


def test_parameters_inputs_and_cuts_add_up(built: Built) -> None:
    graph, chain, workload, _ = built
    tie = workload.types[0].shared_parameters
    assert len(tie) == 1 and tie == workload.types[workload.cells[-1]].shared_parameters
    total = sum(workload.types[kind].parameter_elements for kind in workload.cells) - tie[0][1]
    assert total == sum(parameter.elements for parameter in graph.parameters)
    assert sum(workload.types[kind].input_bytes for kind in workload.cells) == sum(
        storage.bytes for storage in graph.storages if storage.kind is Kind.INPUT
    )
    for before, after in pairwise(workload.cells):
        assert workload.types[before].output_bytes == workload.types[before].gradient_bytes == 2 * 1024 * 1024 * 2
        assert workload.types[after].forward_seconds > 0
    unfolded = [kind for period, count in workload.segments for _ in range(count) for kind in period]
    assert tuple(unfolded) == workload.cells == tuple(cell.type for cell in chain.cells)


def test_building_twice_gives_the_same(built: Built) -> None:
    graph, chain, workload, programs = built
    assert build_workload(graph, chain, MACHINE, Recipe(Precision.BF16, Optimizer.ADAMW)) == (workload, programs)
