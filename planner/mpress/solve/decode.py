"""Counts back to plans: which cells, which modes, how many whole bytes to which pool."""

from __future__ import annotations

from collections.abc import Sequence

from mpress.plan import HOST, Plan, Share, StagePlan
from mpress.problem import Composition, Problem, mode_order
from mpress.solve.backend import Linear, Model, Status, solve
from mpress.units import Bytes

Shares = tuple[tuple[Share, ...], ...]
Lags = tuple[tuple[int, int], ...]
_CRUMB = 0.05  # stripes below this share of a stage's swapped bytes join the largest, where there is room


def stage_modes(problem: Problem, composition: Composition) -> tuple[tuple[int, ...], ...]:
    """The mode of every cell of every stage, types in canonical mode order from the first cell to the last."""
    work = problem.workload
    orders = [mode_order(cost) for cost in work.types]
    first = 0
    found = []
    for s, end in enumerate(composition.cuts()):
        left = [[m for m in orders[t] for _ in range(composition.counts[s][t][m])] for t in range(len(work.types))]
        found.append(tuple(left[work.cells[i]].pop(0) for i in range(first, end)))
        first = end
    return tuple(found)


def to_composition(problem: Problem, modes: Sequence[Sequence[int]]) -> Composition:
    """Counts of the modes of every stage's cells."""
    work = problem.workload
    counts = [[[0] * len(cost.modes) for cost in work.types] for _ in modes]
    cells = iter(work.cells)
    for s, row in enumerate(modes):
        for m in row:
            counts[s][next(cells)][m] += 1
    return Composition(tuple(tuple(tuple(r) for r in stage) for stage in counts))


def swapped_bytes(problem: Problem, composition: Composition) -> tuple[int, ...]:
    """Bytes one micro-batch of every stage swaps."""
    types = problem.workload.types
    return tuple(
        sum(n * types[t].modes[m].swapped_bytes for t, row in enumerate(stage) for m, n in enumerate(row)) for stage in composition.counts
    )


def to_plan(problem: Problem, modes: tuple[tuple[int, ...], ...], shares: Shares, lags: Lags) -> Plan:
    """Put the pieces together; stage s runs on GPU s."""
    stages, first = [], 0
    for s, row in enumerate(modes):
        drain, lead = lags[s]
        stages.append(StagePlan(s, first, first + len(row), row, shares[s], drain, lead))
        first += len(row)
    return Plan(problem.schedule, problem.micro_batches, tuple(stages))


def stripe(problem: Problem, composition: Composition, room: tuple[int, ...]) -> Shares | None:
    """Shares of every stage's swapped bytes; room[r]: bytes GPU r can lend.

    A linear program: first as little copy time as possible beyond what the stage's own compute hides, then the shortest copies, then
    the fewest bytes to host memory.  None if the pools are too small.
    """
    swapped = swapped_bytes(problem, composition)
    stages, machine, types = problem.stages, problem.machine, problem.workload.types
    if not any(swapped):
        return ((),) * stages
    scale = 1.0 / max(swapped)
    cells = [[sum(row) for row in stage] for stage in composition.counts]
    compute = [
        (
            sum(n * cost.forward_seconds for n, cost in zip(row, types, strict=True)),
            sum(n * cost.backward_seconds for n, cost in zip(row, types, strict=True)),
        )
        for row in cells
    ]
    second = 1.0 / max(max(pair) for pair in compute)
    model = Model()
    into: list[Linear] = [Linear() for _ in range(stages)]
    hosts = Linear()
    columns: list[dict[int, int]] = []
    for s in range(stages):
        row: dict[int, int] = {}
        if swapped[s]:
            if machine.host_bandwidth[s] > 0:
                row[HOST] = model.variable(f"host[{s}]")
                hosts.term(row[HOST], float(problem.in_flight(s)))
                model.objective.term(row[HOST], 1e-6)
            for r in range(stages):
                if r != s and machine.links[s][r] > 0 and machine.links[r][s] > 0:
                    row[r] = model.variable(f"d2d[{s},{r}]")
                    into[r].term(row[r], float(problem.in_flight(s)))
            model.equal(f"swapped[{s}]", Linear(dict.fromkeys(row.values(), 1.0)), swapped[s] * scale)
            for outward in (True, False):
                copy = model.variable(f"copy[{s},{outward}]")
                over = model.variable(f"over[{s},{outward}]")
                model.objective.term(copy, 1e-3).term(over, 1.0)
                model.at_least(f"over[{s},{outward}]", Linear({over: 1.0, copy: -1.0}), -compute[s][0 if outward else 1] * second)
                rate = scale / second
                port = Linear({copy: 1.0})
                for pool, variable in row.items():
                    if pool == HOST:
                        bandwidth = min([machine.host_bandwidth[s], *(b for group, b in machine.uplinks if s in group)])
                    else:
                        bandwidth = machine.links[s][pool] if outward else machine.links[pool][s]
                        port.term(variable, -1.0 / (machine.port * rate))
                    model.at_least(f"pool[{s},{pool},{outward}]", Linear({copy: 1.0, variable: -1.0 / (bandwidth * rate)}))
                model.at_least(f"port[{s},{outward}]", port)
        columns.append(row)
    spare = 2 * stages * problem.micro_batches  # whole bytes are rounded
    for r in range(stages):
        if into[r].terms:
            model.at_most(f"room[{r}]", into[r], max(room[r] - spare, 0) * scale)
    model.at_most("host memory", hosts, max(machine.host_memory - spare, 0) * scale)
    result = solve(model, 0.0, 1, relax=True)
    if result.status is not Status.OPTIMAL:
        return None
    wanted = [{pool: result.values[v] / scale for pool, v in row.items()} for row in columns]
    for crumb in (_CRUMB, 1e-3):
        shares = tuple(_whole(size, parts, crumb) for size, parts in zip(swapped, wanted, strict=True))
        if crumb < _CRUMB or _has_room(problem, shares, room):
            return shares
    return None


def _has_room(problem: Problem, shares: Shares, room: tuple[int, ...]) -> bool:
    held = dict.fromkeys((HOST, *range(problem.stages)), 0)
    for s, row in enumerate(shares):
        for share in row:
            held[share.pool] += int(share.bytes) * problem.in_flight(s)
    return held[HOST] <= problem.machine.host_memory and all(held[r] <= max(room[r], 0) for r in range(problem.stages))


def _whole(size: int, parts: dict[int, float], crumb: float) -> tuple[Share, ...]:
    """Whole bytes that sum to `size`; what is less than `crumb` of it goes with the largest share."""
    if size == 0:
        return ()
    taken = {pool: int(value) for pool, value in parts.items() if value >= crumb * size and int(value) > 0}
    if not taken:
        taken = {max(parts, key=lambda pool: (parts[pool], -pool)): size}
    largest = max(taken, key=lambda pool: (taken[pool], -pool))
    taken[largest] += size - sum(taken.values())
    return tuple(Share(pool, Bytes(taken[pool])) for pool in sorted(taken))
