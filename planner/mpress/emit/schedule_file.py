"""The schedule file: who does what when, where every swapped tensor lies, and what was proven.

JSON, one row a line so that it can be read and compared; integers only (bytes, nanoseconds) but for the gap; fixed order; no
times, hosts or paths.  docs/schedule-format.md lists the keys; `mpress.runtime.schedule_file` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpress.cells import Cell, Chain
from mpress.emit.crossings import Crossings
from mpress.emit.fingerprint import fingerprint
from mpress.emit.names import LocalNames, parameter_name
from mpress.graph import Graph
from mpress.holdings import tied_stages
from mpress.plan import HOST, Plan, in_flight
from mpress.program import CellProgram
from mpress.schedule import Word, actions
from mpress.simulate import Replay
from mpress.stripes import Layout, Swapped, layout
from mpress.units import Bytes
from mpress.workload import Workload

FORMAT = "mpress.schedule/1"

Json = int | float | str | None | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the solver proved: no plan under the cost model is faster than bound_seconds; gap = 1 - bound / step."""

    solver: str
    status: str
    bound_seconds: float
    gap: float


def emit_schedule(
    graph: Graph,
    chain: Chain,
    workload: Workload,
    programs: Sequence[Sequence[CellProgram]],
    plan: Plan,
    replay: Replay,
    certificate: Certificate,
    *,
    machine: str,
    precision: str,
    optimizer: str,
    version: str,
) -> str:
    """Text of the schedule file of a plan and its replay."""
    places, rows = _tensors(graph, chain, programs, plan)
    tied, crossings = tied_stages(workload, plan), Crossings(graph, chain)
    document: dict[str, Json] = {
        "format": FORMAT,
        "planner": {"version": version},
        "model": {
            "name": graph.model,
            "graph_sha256": fingerprint(graph),
            "parameters": sum(p.elements for p in graph.parameters),
            "micro_batch": graph.micro_batch,
        },
        "machine": {"name": machine},
        "recipe": {"precision": precision, "optimizer": optimizer},
        "pipeline": {
            "schedule": plan.schedule.value,
            "stages": len(plan.stages),
            "micro_batches": plan.micro_batches,
            "devices": [stage.device for stage in plan.stages],
            "tied": _tied(graph, chain, plan),
        },
        "edges": [_edge(graph, chain.cells[stage.last], crossings) for stage in plan.stages[:-1]],
        "stages": _stages(chain, plan, replay),
        "pools": {
            "devices": {str(pool): int(size) for pool, size in places.pools},
            "host": {
                str(stage.device): sum(region.slots * int(region.slot_bytes) for region in place.regions if region.pool == HOST)
                for stage, place in zip(plan.stages, places.stages, strict=True)
                if any(region.pool == HOST for region in place.regions)
            },
        },
        "tensors": rows,
        "actions": {str(s): _action_lines(plan, s, any(s in group for group, _ in tied)) for s in range(len(plan.stages))},
        "certificate": {
            "solver": certificate.solver,
            "status": certificate.status,
            "step_ns": round(replay.step_seconds * 1e9),
            "bound_ns": round(certificate.bound_seconds * 1e9),
            "gap": round(certificate.gap, 6),
        },
    }
    return _text(document)


def _stages(chain: Chain, plan: Plan, replay: Replay) -> list[Json]:
    rows: list[Json] = []
    for index, (stage, seen) in enumerate(zip(plan.stages, replay.stages, strict=True)):
        rows.append(
            {
                "stage": index,
                "device": stage.device,
                "cells": [chain.cells[stage.first].name, chain.cells[stage.last - 1].name],
                "in_flight": seen.in_flight,
                "peak_bytes": int(seen.peak_bytes),
                "peak_at": seen.peak_action,
                "causes": {name: int(size) for name, size in seen.causes},
                "forward_ns": round(seen.forward_seconds * 1e9),
                "backward_ns": round(seen.backward_seconds * 1e9),
                "recompute_ns": round(seen.recompute_seconds * 1e9),
                "drain_lag": stage.drain_lag,
                "prefetch_lead": stage.prefetch_lead,
            }
        )
    return rows


def _tensors(graph: Graph, chain: Chain, programs: Sequence[Sequence[CellProgram]], plan: Plan) -> tuple[Layout, list[Json]]:
    """The layout of all pools, and one row per swapped tensor of every cell."""
    names = [LocalNames(graph, chain.cells[r]) for r in chain.representatives]
    swapped: list[list[Swapped]] = []
    owners: list[list[tuple[str, str]]] = []
    for stage in plan.stages:
        storages, labels = list[Swapped](), list[tuple[str, str]]()
        for index, mode in zip(range(stage.first, stage.last), stage.modes, strict=True):
            cell = chain.cells[index]
            program = programs[cell.type][mode]
            for root in program.saved:
                storage = graph.tensors[root].storage
                if storage in program.swap:
                    storages.append(Swapped(index, storage, Bytes(graph.storages[storage].bytes)))
                    labels.append((cell.name, names[cell.type].of(root)))
        swapped.append(storages)
        owners.append(labels)
    places = layout(plan, tuple(tuple(storages) for storages in swapped))
    rows: list[Json] = []
    for s, place in enumerate(places.stages):
        slots = in_flight(plan.schedule, len(plan.stages), s, plan.micro_batches)
        for (cell_name, name), away, stripes in zip(owners[s], swapped[s], place.stripes, strict=True):
            # all slots of one stripe lie side by side: address = offset + slot * bytes
            cut: list[Json] = []
            for stripe in stripes:
                offset = int(place.region(stripe.pool).start) + slots * int(stripe.offset)
                cut.append([stripe.pool, offset, int(stripe.bytes)])
            rows.append({"stage": s, "cell": cell_name, "name": name, "bytes": int(away.bytes), "slots": slots, "stripes": cut})
    return places, rows


def _tied(graph: Graph, chain: Chain, plan: Plan) -> list[Json]:
    """Copies of every parameter that lives on more than one stage, under the name each stage knows it by."""
    homes: dict[str, dict[int, str]] = {}
    for s, stage in enumerate(plan.stages):
        for cell in chain.cells[stage.first : stage.last]:
            for canonical in cell.parameters:
                homes.setdefault(canonical, {}).setdefault(s, parameter_name(graph, cell, canonical))
    rows: list[Json] = []
    for canonical, copies in homes.items():
        if len(copies) > 1:
            rows.append({"parameter": canonical, "copies": [{"stage": s, "parameter": name} for s, name in sorted(copies.items())]})
    return rows


def _edge(graph: Graph, cell: Cell, crossings: Crossings) -> Json:
    """Tensors that cross the cut before a cell: forward, and the gradients that come back (not one to one), each under the name of the
    tensor it belongs to."""
    rows = {tensor: crossings.name(tensor) for tensor in cell.inputs}
    back = [(t, crossings.owner(t, cell.inputs)) for t in cell.gradient_outputs]
    return {
        "forward": [_tensor(graph, t, name) for t, name in rows.items()],
        "gradients": [_tensor(graph, t, owner if isinstance(owner, str) else rows[owner]) for t, owner in back],
    }


def _tensor(graph: Graph, tensor: int, name: str) -> Json:
    found = graph.tensors[tensor]
    return {"name": name, "shape": list(found.shape), "stride": list(found.stride), "dtype": found.dtype}


def _action_lines(plan: Plan, s: int, tied: bool) -> list[Json]:
    """Action words of a stage, a line for each backward."""
    lines, line = list[Json](), list[str]()
    for action in actions(plan.schedule, len(plan.stages), s, plan.micro_batches, tied):
        line.append(str(action))
        if action.word is Word.B:
            lines.append(" ".join(line))
            line = []
    return [*lines, " ".join(line)]


def _text(document: Mapping[str, Json]) -> str:
    """Top-level keys on lines of their own, rows of lists and mappings one a line."""
    parts = []
    for key, value in document.items():
        if isinstance(value, list):
            body = "[" + ",".join(f"\n  {json.dumps(row)}" for row in value) + ("\n ]" if value else "]")
        elif isinstance(value, dict):
            body = "{" + ",".join(f"\n  {json.dumps(name)}: {_value(row)}" for name, row in value.items()) + ("\n }" if value else "}")
        else:
            body = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _value(row: Json) -> str:
    """Lists of lines (the actions) keep a line each."""
    if isinstance(row, list) and row and all(isinstance(item, str) for item in row):
        return "[" + ",".join(f"\n   {json.dumps(item)}" for item in row) + "\n  ]"
    return json.dumps(row)
