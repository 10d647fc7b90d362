"""Finishes a composition - stripes and lags - and lets the replay judge it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, islice, product

from mpress.plan import HOST, Plan, Share
from mpress.problem import Composition, Problem
from mpress.simulate import Replay, simulate
from mpress.solve.decode import Lags, Shares, stage_modes, stripe, swapped_bytes, to_plan
from mpress.units import Bytes

FEW_CELLS = 8  # chains up to this length get every uniform pair of lags and every simple split tried
MOST_SPLITS = 400


@dataclass(frozen=True, slots=True)
class Verdict:
    """excess[s]: bytes stage s needs beyond its usable memory, all zero in a plan that fits."""

    composition: Composition
    plan: Plan
    replay: Replay
    excess: tuple[int, ...]

    @property
    def fits(self) -> bool:
        return not any(self.excess)

    @property
    def seconds(self) -> float:
        return float(self.replay.step_seconds)


def judge(problem: Problem, composition: Composition) -> Verdict:
    """The best plan of a composition: the fastest that fits, or else the one with the fewest bytes missing."""
    modes = stage_modes(problem, composition)
    swapped = swapped_bytes(problem, composition)
    nothing: Shares = ((),) * problem.stages
    tight: Lags = ((1, 1),) * problem.stages
    bare = _try(problem, composition, to_plan(problem, modes, nothing, tight))
    if not any(swapped) or not bare.fits:
        return bare
    room = tuple(int(problem.machine.usable_bytes(s) - stage.peak_bytes) for s, stage in enumerate(bare.replay.stages))
    best: Verdict | None = None
    options = [stripe(problem, composition, room)]
    few = len(problem.workload.cells) <= FEW_CELLS
    if few:
        options += _simple_splits(problem, swapped)
    for shares in options:
        if shares is None:
            continue
        found = _with_lags(problem, composition, modes, shares)
        if few:
            for pair in product(range(1, max(map(len, modes)) + 1), repeat=2):
                same: Lags = ((pair[0], pair[1]),) * problem.stages
                found = _better(found, _try(problem, composition, to_plan(problem, modes, shares, same)))
        best = _better(best, found)
    if best is None:  # the pools are too small for what is swapped; the stage that swaps most cannot place it
        worst = max(range(problem.stages), key=lambda s: swapped[s])
        return Verdict(composition, bare.plan, bare.replay, tuple(swapped[s] if s == worst else 0 for s in range(problem.stages)))
    return best


def _better(one: Verdict | None, other: Verdict) -> Verdict:
    if one is None:
        return other
    keys = [(sum(v.excess), v.seconds) for v in (one, other)]
    return other if keys[1] < keys[0] else one


def _try(problem: Problem, composition: Composition, plan: Plan) -> Verdict:
    replay = simulate(problem.workload, problem.machine, plan)
    excess = tuple(max(0, int(stage.peak_bytes - problem.machine.usable_bytes(s))) for s, stage in enumerate(replay.stages))
    return Verdict(composition, plan, replay, excess)


def _simple_splits(problem: Problem, swapped: tuple[int, ...]) -> list[Shares | None]:
    """Every way to give each swapping stage one pool, or two in quarters."""
    machine = problem.machine
    choices: list[list[tuple[Share, ...]]] = []
    for s, size in enumerate(swapped):
        if size == 0:
            choices.append([()])
            continue
        pools = [HOST] if machine.host_bandwidth[s] > 0 else []
        pools += [r for r in range(problem.stages) if r != s and machine.links[s][r] > 0 and machine.links[r][s] > 0]
        row: list[tuple[Share, ...]] = [(Share(pool, Bytes(size)),) for pool in pools]
        for one, other in combinations(pools, 2):
            parts = [size * quarter // 4 for quarter in (1, 2, 3)]
            row += [(Share(one, Bytes(part)), Share(other, Bytes(size - part))) for part in parts if 0 < part < size]
        choices.append(row)
    found: list[Shares | None] = []
    for shares in islice(product(*choices), MOST_SPLITS):
        hosted = sum(share.bytes * problem.in_flight(s) for s, row in enumerate(shares) for share in row if share.pool == HOST)
        if hosted <= machine.host_memory:
            found.append(tuple(shares))
    return found


def _with_lags(problem: Problem, composition: Composition, modes: tuple[tuple[int, ...], ...], shares: Shares) -> Verdict:
    """The smallest lags that cost no time on a quiet machine; where that does not fit, the largest that do."""
    lags = [_quiet_lags(problem, s, row, shares[s], composition) for s, row in enumerate(modes)]
    verdict = _try(problem, composition, to_plan(problem, modes, shares, tuple(lags)))
    while not verdict.fits:
        shrunk = False
        for s, over in enumerate(verdict.excess):
            drain, lead = lags[s]
            if over and (drain > 1 or lead > 1):
                forward = "F" in verdict.replay.stages[s].peak_action
                smaller = (drain - 1, lead) if (forward and drain > 1) or lead == 1 else (drain, lead - 1)
                lags[s] = smaller
                shrunk = True
        if not shrunk:
            break
        verdict = _try(problem, composition, to_plan(problem, modes, shares, tuple(lags)))
    return verdict


def _quiet_lags(problem: Problem, s: int, row: tuple[int, ...], shares: tuple[Share, ...], composition: Composition) -> tuple[int, int]:
    """(drain_lag, prefetch_lead) of a stage that has its links to itself."""
    total = sum(share.bytes for share in shares)
    if total == 0:
        return 1, 1
    machine, work = problem.machine, problem.workload
    first = sum(composition.cells(r) for r in range(s))
    types = [work.types[work.cells[first + i]] for i in range(len(row))]
    modes = [cost.modes[m] for cost, m in zip(types, row, strict=True)]
    per_byte = []
    for outward in (True, False):
        times = [sum(x.bytes for x in shares if x.pool != HOST) / machine.port]
        for share in shares:
            if share.pool == HOST:
                times.append(share.bytes / min([machine.host_bandwidth[s], *(b for group, b in machine.uplinks if s in group)]))
            else:
                times.append(share.bytes / (machine.links[s][share.pool] if outward else machine.links[share.pool][s]))
        per_byte.append(max(times) / total)
    out = [mode.swapped_bytes * per_byte[0] for mode in modes]
    back = [mode.swapped_bytes * per_byte[1] for mode in modes]
    compute = [float(cost.forward_seconds) for cost in types]
    redo = [float(cost.backward_seconds + mode.recompute_seconds) for cost, mode in zip(types, modes, strict=True)]
    sizes = range(1, len(row) + 1)
    drains = [_forward_end(compute, out, lag) for lag in sizes]
    leads = [_backward_end(redo, back, lead) for lead in sizes]
    return _smallest(drains), _smallest(leads)


def _smallest(ends: list[float]) -> int:
    least = min(ends) * (1 + 1e-9)
    return next(i + 1 for i, end in enumerate(ends) if end <= least)


def _forward_end(compute: list[float], out: list[float], lag: int) -> float:
    """When a forward ends whose copies queue on one engine and are waited for `lag` cells later."""
    now = free = 0.0
    done = []
    for i, seconds in enumerate(compute):
        now += seconds
        free = max(free, now) + out[i] if out[i] > 0 else free
        done.append(free if out[i] > 0 else 0.0)
        if i - lag >= 0:
            now = max(now, done[i - lag])
    return max([now, *done])


def _backward_end(redo: list[float], back: list[float], lead: int) -> float:
    """When a backward ends whose copies are asked for `lead` cells ahead."""
    now = free = 0.0
    n = len(redo)
    done = [0.0] * n
    for i in range(n - 1, -1, -1):
        asked = range(n - 1, max(n - 1 - lead, 0) - 1, -1) if i == n - 1 else range(i - lead, i - lead - 1, -1)
        for j in asked:
            if j >= 0 and back[j] > 0:
                free = max(free, now) + back[j]
                done[j] = free
        now = max(now, done[i]) + redo[i]
    return now
