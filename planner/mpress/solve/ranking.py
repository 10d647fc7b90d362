"""How well an order of GPUs suits a plan, in microseconds of work instead of a solve: what to try first.

A load is what is known of a plan before it has an order: seconds, messages, and the bytes every stage needs.  On an order, messages take
their links' time; what exceeds a GPU's memory is moved over its links to GPUs with room, and a forward is at least as long as that takes.
The score is the longest of the paths of the schedule that messages or slow stages can make critical, and of the uplinks' own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul

from mpress.plan import Plan
from mpress.problem import Problem
from mpress.simulate import Replay
from mpress.solve.timeline import Durations, Path, Timeline
from mpress.topology import Order


@dataclass(frozen=True, slots=True)
class Load:
    """forward, backward: seconds of each stage; output, gradient: bytes over each cut; need: bytes each stage holds where nothing is
    swapped; in_flight: micro-batches it holds."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    output: tuple[int, ...]
    gradient: tuple[int, ...]
    need: tuple[int, ...]
    in_flight: tuple[int, ...]


def load_of(problem: Problem, plan: Plan, replay: Replay) -> Load:
    """The load of a plan, wherever its stages are."""
    work = problem.workload
    last = [work.types[work.cells[stage.last - 1]] for stage in plan.stages[:-1]]
    need = []
    for stage, seen in zip(plan.stages, replay.stages, strict=True):
        lent = dict(seen.causes).get("foreign stripes", 0)
        need.append(int(seen.peak_bytes) - int(lent) + sum(int(share.bytes) for share in stage.shares) * seen.in_flight)
    return Load(
        forward=tuple(float(seen.forward_seconds) for seen in replay.stages),
        backward=tuple(float(seen.backward_seconds + seen.recompute_seconds) for seen in replay.stages),
        output=tuple(int(cost.output_bytes) for cost in last),
        gradient=tuple(int(cost.gradient_bytes) for cost in last),
        need=tuple(need),
        in_flight=tuple(seen.in_flight for seen in replay.stages),
    )


class Ranking:
    """Scores orders of one problem's machine for one load."""

    def __init__(self, problem: Problem, load: Load) -> None:
        self._problem, self._machine, self._load = problem, problem.machine, load
        machine = problem.machine
        every = range(len(machine.devices))
        self._rate = [[float(machine.boundary_bandwidth(a, b)) if a != b else 0.0 for b in every] for a in every]
        self._best = max((rate for row in self._rate for rate in row), default=0.0)
        slowest = min((rate for row in self._rate for rate in row if rate > 0), default=self._best)
        self._paths = tuple((*p.forwards, *p.backwards, *p.outputs, *p.gradients) for p in self._critical_paths(slowest))

    def _critical_paths(self, slowest: float) -> tuple[Path, ...]:
        """The paths that are critical where no message is slow, where one is, and where all are."""
        problem, load = self._problem, self._load
        timeline = Timeline(problem.schedule, problem.stages, problem.micro_batches)
        found = list(timeline.classic_paths())
        edges = range(problem.stages - 1)
        for slow in ((), edges, *((e,) for e in edges)):
            rates = [slowest if e in slow else self._best for e in edges]
            found.append(timeline.critical(self._durations(load, rates, rates))[1])
        return tuple(dict.fromkeys(found))

    def _durations(self, load: Load, forth: Sequence[float], back: Sequence[float]) -> Durations:
        return Durations(
            forward=load.forward,
            backward=load.backward,
            output=tuple(size / rate for size, rate in zip(load.output, forth, strict=True)),
            gradient=tuple(size / rate for size, rate in zip(load.gradient, back, strict=True)),
            tail=(0.0,) * self._problem.stages,
        )

    def __call__(self, order: Order) -> float:
        """Seconds of a step on an order, or at least that of any order that begins so."""
        stages = self._problem.stages
        forth = [self._rate[order[e]][order[e + 1]] if e + 1 < len(order) else self._best for e in range(stages - 1)]
        back = [self._rate[order[e + 1]][order[e]] if e + 1 < len(order) else self._best for e in range(stages - 1)]
        durations = self._durations(self._load, forth, back)
        floor = 0.0
        if len(order) == stages:
            durations, floor = self._swapping(order, durations)
        seconds = (*durations.forward, *durations.backward, *durations.output, *durations.gradient)
        longest: float = max(sum(map(mul, path, seconds)) for path in self._paths)
        return max(floor, longest)

    def _swapping(self, order: Order, quiet: Durations) -> tuple[Durations, float]:
        """The durations where what is over capacity is swapped, and the seconds of the busiest uplink."""
        load, machine = self._load, self._machine
        usable = [int(machine.usable_bytes(g)) for g in order]
        over = [max(0, need - have) for need, have in zip(load.need, usable, strict=True)]
        if not any(over):
            return quiet, 0.0
        room = [max(0, have - need) for need, have in zip(load.need, usable, strict=True)]
        stages = range(len(order))
        link = [[min(machine.links[order[s]][order[r]], machine.links[order[r]][order[s]]) for r in stages] for s in stages]
        wanted = [sum(over[s] for s in stages if link[s][r] > 0) for r in stages]
        seconds, hosted = [], []
        for s in stages:
            if not over[s]:
                seconds.append(0.0)
                hosted.append(0.0)
                continue
            offers = [(link[s][r], room[r] * over[s] / wanted[r]) for r in stages if link[s][r] > 0 and room[r] > 0]
            each = load.in_flight[s]
            took, left = _fill(
                over[s] / each, [(rate, most / each) for rate, most in offers], machine.host_bandwidth[order[s]], machine.port
            )
            seconds.append(took)
            hosted.append(left)
        slower = replace(
            quiet,
            forward=tuple(max(a, b) for a, b in zip(quiet.forward, seconds, strict=True)),
            backward=tuple(max(a, b) for a, b in zip(quiet.backward, seconds, strict=True)),
        )
        return slower, self._uplinks(order, slower, hosted)

    def _uplinks(self, order: Order, durations: Durations, hosted: list[float]) -> float:
        """The copies of all stages behind one uplink take turns; the other stages run once before, all backwards of a micro-batch after."""
        longest = 0.0
        for group, rate in self._machine.uplinks:
            inside = [s for s, g in enumerate(order) if g in group]
            size = sum(hosted[s] for s in inside)
            if size > 0:
                rest = sum(f for s, f in enumerate(durations.forward) if s not in inside)
                longest = max(longest, self._problem.micro_batches * size / rate + rest + sum(durations.backward))
        return longest


def _fill(size: float, offers: list[tuple[float, float]], host: float, port: float) -> tuple[float, float]:
    """(seconds to move `size` bytes over all ways at once, bytes of it that go to host memory); offers: (bytes/s, bytes at most)."""
    host = max(host, 1e-3)
    now = moved = parked = 0.0
    waiting = sorted((most / rate, rate) for rate, most in offers)
    while waiting:
        open_rate = min(sum(rate for _, rate in waiting), port)
        until = waiting[0][0]
        step = min(until - now, (size - moved) / (open_rate + host))
        moved, now, parked = moved + step * (open_rate + host), now + step, parked + step * open_rate
        if now < until:
            return now, moved - parked
        waiting.pop(0)
    now += (size - moved) / host
    return now, size - parked
