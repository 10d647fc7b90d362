"""Plans without a solver: the balanced partition, and a greedy choice of modes in it.  Baseline, first incumbent, answer on Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence

from mpress.problem import Composition, Problem
from mpress.solve.decode import to_composition
from mpress.solve.judge import Verdict, judge


def balanced_ends(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """Ends of `stages` non-empty runs whose heaviest is as light as can be; among those, the smallest sum of squares."""
    n = len(weights)
    prefix = [0.0]
    for w in weights:
        prefix.append(prefix[-1] + w)
    best: list[tuple[float, float]] = [(prefix[j], prefix[j] ** 2) if j else (0.0, 0.0) for j in range(n + 1)]
    choices: list[list[int]] = []
    for s in range(1, stages):
        found: list[tuple[float, float]] = [(float("inf"), float("inf"))] * (n + 1)
        choice = [0] * (n + 1)
        for j in range(s + 1, n + 1):
            for i in range(j - 1, s - 1, -1):
                load = prefix[j] - prefix[i]
                if load > found[j][0] * (1 + 1e-12):
                    break
                value = (max(best[i][0], load), best[i][1] + load * load)
                if value < found[j]:
                    found[j], choice[j] = value, i
        best = found
        choices.append(choice)
    ends = [n]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    return tuple(reversed(ends))


def plain(problem: Problem) -> Composition:
    """Every cell in mode 0, stages of equal time."""
    work = problem.workload
    weights = [float(work.types[t].forward_seconds + work.types[t].backward_seconds) for t in work.cells]
    ends = balanced_ends(weights, problem.stages)
    return to_composition(problem, [[0] * (end - start) for start, end in zip((0, *ends), ends, strict=False)])


def greedy(problem: Problem) -> Verdict | None:
    """Stages of equal time or of equal state, then recomputation cell by cell where memory is short; the fastest that fits, or None."""
    work = problem.workload
    weights = [float(work.types[t].forward_seconds + work.types[t].backward_seconds) for t in work.cells]
    state = [float(work.types[t].parameter_elements) for t in work.cells]
    scale = sum(weights) / max(sum(state), 1.0)
    found: list[Verdict] = []
    for mix in (0.0, 0.5):
        blend = [w + mix * (x * scale - w) for w, x in zip(weights, state, strict=True)]
        ends = balanced_ends(blend, problem.stages)
        verdict = _fill(problem, ends)
        if verdict.fits:
            found.append(verdict)
    return min(found, key=lambda v: v.seconds) if found else None


def _fill(problem: Problem, ends: tuple[int, ...]) -> Verdict:
    """Recompute the cell that frees most bytes per second until every stage fits, or nothing is left to free."""
    modes = [[0] * (end - start) for start, end in zip((0, *ends), ends, strict=False)]
    verdict = judge(problem, to_composition(problem, modes))
    for _ in range(4):  # the peak of a running cell moves when modes change, so look again
        if verdict.fits:
            break
        first = 0
        for s, row in enumerate(modes):
            missing = float(verdict.excess[s])
            while missing > 0:
                step = _best_step(problem, s, first, row)
                if step is None:
                    break
                cell, mode, freed = step
                row[cell] = mode
                missing -= freed
            first += len(row)
        verdict = judge(problem, to_composition(problem, modes))
    return verdict


def _best_step(problem: Problem, s: int, first: int, row: list[int]) -> tuple[int, int, float] | None:
    """(cell, mode, bytes freed) with the most bytes freed per second of recomputation among modes that swap nothing."""
    types, cells = problem.workload.types, problem.workload.cells
    best: tuple[float, int, int, float] | None = None
    for i, now in enumerate(row):
        cost = types[cells[first + i]]
        for m, mode in enumerate(cost.modes):
            freed = problem.in_flight(s) * float(cost.modes[now].resident_bytes - mode.resident_bytes)
            if mode.swapped_bytes or freed <= 0:
                continue
            rate = freed / max(float(mode.recompute_seconds - cost.modes[now].recompute_seconds), 1e-12)
            if best is None or rate > best[0] * (1 + 1e-12):
                best = rate, i, m, freed
    return None if best is None else best[1:]
