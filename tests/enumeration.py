"""Every plan of a small problem, tried one by one: what the solver is held against.  Knows nothing of the solver.

Every partition, every multiset of modes of every stage in canonical order, every single pool and every quarter split of two pools a stage
may swap to, every lag.  What it prunes is only what cannot win: a composition whose replay with copies that take no time is not faster
than the best plan so far, or does not fit even with the smallest lags.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, pairwise, product

from mpress.holdings import host_bytes
from mpress.plan import HOST, Plan, Share, StagePlan
from mpress.problem import Problem
from mpress.simulate import simulate
from mpress.units import Bytes

MOST_LAGS = 300

Modes = tuple[int, ...]
Shares = tuple[Share, ...]


def _stage_modes(problem: Problem, first: int, last: int) -> Iterator[Modes]:
    """Every multiset of modes of each type, dealt to the cells from most swapped over most recomputed to kept."""
    work = problem.workload
    cells = work.cells[first:last]
    kinds = sorted(set(cells))

    def rank(t: int, m: int) -> tuple[float, ...]:
        mode = work.types[t].modes[m]
        return (-mode.swapped_bytes, -mode.recompute_seconds, mode.resident_bytes, m)

    choices = [combinations_with_replacement(range(len(work.types[t].modes)), cells.count(t)) for t in kinds]
    for picked in product(*choices):
        hands = {t: iter(sorted(hand, key=lambda m, t=t: rank(t, m))) for t, hand in zip(kinds, picked, strict=True)}  # type: ignore[misc]
        yield tuple(next(hands[t]) for t in cells)


def _compositions(problem: Problem) -> Iterator[tuple[Modes, ...]]:
    count = len(problem.workload.cells)
    for cuts in combinations(range(1, count), problem.stages - 1):
        bounds = (0, *cuts, count)
        yield from product(*(tuple(_stage_modes(problem, a, b)) for a, b in pairwise(bounds)))


def _plan(problem: Problem, modes: tuple[Modes, ...], shares: tuple[Shares, ...], lags: tuple[tuple[int, int], ...]) -> Plan:
    stages, first = [], 0
    for s, row in enumerate(modes):
        stages.append(StagePlan(s, first, first + len(row), row, shares[s], *lags[s]))
        first += len(row)
    return Plan(problem.schedule, problem.micro_batches, tuple(stages))


def _swapped(problem: Problem, modes: tuple[Modes, ...]) -> list[int]:
    cells = iter(problem.workload.cells)
    return [sum(int(problem.workload.types[next(cells)].modes[m].swapped_bytes) for m in row) for row in modes]


def _shares(problem: Problem, s: int, size: int) -> list[Shares]:
    if size == 0:
        return [()]
    links = problem.machine.links
    pools = [HOST, *(r for r in range(problem.stages) if links[s][r] > 0 and links[r][s] > 0)]
    found: list[Shares] = [(Share(pool, Bytes(size)),) for pool in pools]
    for one, other in combinations(pools, 2):
        for quarter in (1, 2, 3):
            part = size * quarter // 4
            if 0 < part < size:
                found.append((Share(one, Bytes(part)), Share(other, Bytes(size - part))))
    return found


def _lags(modes: tuple[Modes, ...], swapped: list[int]) -> list[tuple[tuple[int, int], ...]]:
    def pairs(n: int) -> list[tuple[int, int]]:
        return [(drain, lead) for drain in range(1, n + 1) for lead in range(1, n + 1)]

    each = [pairs(len(row)) if size else [(1, 1)] for row, size in zip(modes, swapped, strict=True)]
    total = 1
    for options in each:
        total *= len(options)
    if total <= MOST_LAGS:
        return list(product(*each))
    return [(pair,) * len(modes) for pair in pairs(max(map(len, modes)))]


def _fits(problem: Problem, candidate: Plan) -> tuple[bool, float]:
    replay = simulate(problem.workload, problem.machine, candidate)
    inside = all(stage.peak_bytes <= problem.machine.usable_bytes(s) for s, stage in enumerate(replay.stages))
    return inside and host_bytes(candidate) <= problem.machine.host_memory, float(replay.step_seconds)


def enumerate_best(problem: Problem) -> float | None:
    """Step seconds of the best plan, None if none fits."""
    open_ones: list[tuple[float, tuple[Modes, ...]]] = []
    for modes in _compositions(problem):
        fits, seconds = _fits(problem, _plan(problem, modes, ((),) * problem.stages, ((1, 1),) * problem.stages))
        if fits:
            open_ones.append((seconds, modes))
    best: float | None = None
    for seconds, modes in sorted(open_ones):
        if best is not None and seconds >= best:
            break
        swapped = _swapped(problem, modes)
        for shares in product(*(_shares(problem, s, size) for s, size in enumerate(swapped))):
            if not _fits(problem, _plan(problem, modes, shares, ((1, 1),) * problem.stages))[0]:
                continue
            for lags in _lags(modes, swapped):
                inside, time = _fits(problem, _plan(problem, modes, shares, lags))
                if inside and (best is None or time < best):
                    best = time
    return best
