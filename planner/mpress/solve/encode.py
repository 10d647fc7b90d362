"""Problem -> variables and rows.  Names are those of docs/formulation.md; every row is a relaxation of a rule of the replay.

Memory is in units of the largest usable capacity / 100 and time in units of the balanced step / 100, so that tolerances mean the same
for every problem.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mpress.plan import ScheduleKind
from mpress.problem import Composition, Problem, cut_classes, mode_order, totals
from mpress.schedule import Word
from mpress.solve.backend import Linear, Model, total
from mpress.solve.memory import MemoryRows
from mpress.solve.timeline import Durations, Path


@dataclass(frozen=True, slots=True)
class Variant:
    """What is asked of the problem.

    free: only the partition - no actions, no memory - which bounds every plan from below.  reserve: bytes held back per stage.
    slack: let every capacity be exceeded, and minimise the bytes missing.  ends: a fixed partition.  thrift: minimise bytes moved, then
    recomputation, at a step of at most `limit` seconds.  careful: copies of different stages over one uplink or into one GPU are taken to
    meet in every forward and backward; no relaxation any more, but such plans replay well.
    """

    free: bool = False
    reserve: tuple[int, ...] = ()
    slack: bool = False
    ends: tuple[int, ...] = ()
    thrift: bool = False
    limit: float = 0.0
    careful: bool = False
    excluded: tuple[Composition, ...] = ()


@dataclass(slots=True)
class Encoding:
    """The model and where its variables are; order[t] is the canonical order of type t's modes."""

    problem: Problem
    variant: Variant
    model: Model
    second: float  # time units per second
    byte: float  # memory units per byte
    order: tuple[tuple[int, ...], ...]
    cells: list[list[Linear]] = field(default_factory=list)  # N[s,t]
    last: list[list[Linear]] = field(default_factory=list)  # last[s,t]: 1 if stage s ends with a cell of type t
    mode: list[list[dict[int, int]]] = field(default_factory=list)  # z[s,t,l]
    device: list[dict[int, int]] = field(default_factory=list)  # d2d[s,r]
    host: list[int] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)  # F[s]
    backward: list[int] = field(default_factory=list)  # B[s]
    step: int = -1  # W
    missing: list[int] = field(default_factory=list)  # slack[s]

    def quantity(self, s: int, of: dict[tuple[int, int], float]) -> Linear:
        """sum over types and modes of z[s,t,l] x of[t,l]"""
        result = Linear()
        for t, row in enumerate(self.mode[s]):
            for m, variable in row.items():
                result.term(variable, of.get((t, m), 0.0))
        return result

    def per_cell(self, s: int, of: list[float]) -> Linear:
        """sum over types of N[s,t] x of[t]"""
        return total(*((value, self.cells[s][t]) for t, value in enumerate(of)))

    def at_cut(self, s: int, of: list[float]) -> Linear:
        """of[type of the last cell of stage s]"""
        return total(*((value, self.last[s][t]) for t, value in enumerate(of)))


def encode(problem: Problem, variant: Variant, paths: tuple[Path, ...]) -> Encoding:
    """Build the model; `paths` are the step-time rows known so far."""
    work, machine = problem.workload, problem.machine
    largest = max(machine.usable_bytes(d) for d in range(problem.stages))
    compute = sum(work.types[t].forward_seconds + work.types[t].backward_seconds for t in work.cells)
    code = Encoding(
        problem=problem,
        variant=variant,
        model=Model(),
        second=100.0 / max(compute * problem.micro_batches / problem.stages, 1e-30),
        byte=100.0 / max(largest, 1),
        order=tuple(mode_order(cost) for cost in work.types),
    )
    _partition(code)
    _modes(code)
    _durations(code)
    for number, path in enumerate(paths):
        add_path(code, number, path)
    if not variant.free:
        _pools(code)
        MemoryRows(code.problem, code).add()
        for number, composition in enumerate(variant.excluded):
            _exclude(code, number, composition)
    _objective(code)
    return code


def _partition(code: Encoding) -> None:
    """Cut s is in one class (segment, place in the period) after q complete periods; N[s,t] is the difference of two cuts."""
    problem, model = code.problem, code.model
    work, stages = problem.workload, problem.stages
    classes, count, kinds = cut_classes(work), len(work.cells), range(len(work.types))
    before = [Linear() for _ in kinds]
    position = Linear()
    for s in range(stages):
        if s == stages - 1:
            now = [Linear(constant=float(n)) for n in totals(work)]
            code.last.append([Linear(constant=float(t == work.cells[-1])) for t in kinds])
        else:
            now = [Linear() for _ in kinds]
            code.last.append([Linear() for _ in kinds])
            chosen = Linear()
            repeats: dict[int, Linear] = {}
            for c in classes:
                at = model.variable(f"cut[{s},{c.segment},{c.residue}]", upper=1.0, integer=True)
                chosen.term(at, 1.0)
                code.last[s][c.type].term(at, 1.0)
                for t in kinds:
                    now[t].term(at, float(c.before[t]))
                if c.repeats:
                    repeats.setdefault(c.segment, Linear()).term(at, float(c.repeats))
            model.equal(f"one cut[{s}]", chosen, 1.0)
            for segment, most in repeats.items():
                first = next(c for c in classes if c.segment == segment)
                q = model.variable(f"q[{s},{segment}]", upper=float(first.repeats), integer=True)
                model.at_most(f"q in segment[{s},{segment}]", total((-1.0, most)).term(q, 1.0))
                for t in kinds:
                    now[t].term(q, float(first.each[t]))
        here = total(*((1.0, n) for n in now))
        code.cells.append([total((1.0, a), (-1.0, b)) for a, b in zip(now, before, strict=True)])
        if s < stages - 1:
            model.at_most(f"room for later stages[{s}]", here, float(count - (stages - 1 - s)))
        model.at_least(f"a cell each[{s}]", total((1.0, here), (-1.0, position)), 1.0)
        if code.variant.ends:
            model.equal(f"given cut[{s}]", here, float(code.variant.ends[s]))
        for t in kinds:
            if code.cells[s][t].terms:
                model.at_least(f"N[{s},{t}] >= 0", code.cells[s][t])
        before, position = now, here


def _modes(code: Encoding) -> None:
    """Every cell is in one mode."""
    problem, model = code.problem, code.model
    counts = totals(problem.workload)
    for s in range(problem.stages):
        row: list[dict[int, int]] = []
        for t, cost in enumerate(problem.workload.types):
            modes = (0,) if code.variant.free else range(len(cost.modes))
            row.append({m: model.variable(f"z[{s},{t},{m}]", upper=float(counts[t]), integer=not code.variant.free) for m in modes})
            everything = Linear(dict.fromkeys(row[t].values(), 1.0))
            model.equal(f"N[{s},{t}]", total((1.0, everything), (-1.0, code.cells[s][t])))
        code.mode.append(row)


def _durations(code: Encoding) -> None:
    """F and B of a stage are at least their compute."""
    problem, model, unit = code.problem, code.model, code.second
    types = problem.workload.types
    code.step = model.variable("W")
    redo = {(t, m): mode.recompute_seconds * unit for t, cost in enumerate(types) for m, mode in enumerate(cost.modes)}
    for s in range(problem.stages):
        forward, backward = model.variable(f"F[{s}]"), model.variable(f"B[{s}]")
        code.forward.append(forward)
        code.backward.append(backward)
        compute = code.per_cell(s, [-cost.forward_seconds * unit for cost in types])
        model.at_least(f"compute F[{s}]", compute.term(forward, 1.0))
        compute = code.per_cell(s, [-cost.backward_seconds * unit for cost in types]).add(code.quantity(s, redo), -1.0)
        model.at_least(f"compute B[{s}]", compute.term(backward, 1.0))


def message_seconds(problem: Problem, edge: int) -> tuple[list[float], list[float]]:
    """Seconds of the messages over the cut behind stage `edge`, by the type of its last cell: output forward, gradient back."""
    machine, types = problem.machine, problem.workload.types
    rates = []
    for a, b in ((edge, edge + 1), (edge + 1, edge)):
        rates.append(min(machine.pair_bandwidth(a, b), machine.port) if machine.links[a][b] > 0 else machine.pair_bandwidth(a, b))
    output = [cost.output_bytes / rates[0] + machine.latency_seconds for cost in types]
    gradient = [cost.gradient_bytes / rates[1] + machine.latency_seconds for cost in types]
    return output, gradient


def tail_seconds(problem: Problem) -> list[float]:
    """Optimizer seconds of one cell of each type, tied parameters left out (they are counted at least once somewhere)."""
    types = problem.workload.types
    own = [cost.trainable_elements - sum(elements for _, elements in cost.shared_parameters) for cost in types]
    return [n * problem.workload.optimizer_seconds_per_element for n in own]


def add_path(code: Encoding, number: int, path: Path) -> None:
    """W >= the length of a path."""
    problem, unit = code.problem, code.second
    row = Linear({code.step: 1.0})
    for s in range(problem.stages):
        row.term(code.forward[s], -float(path.forwards[s])).term(code.backward[s], -float(path.backwards[s]))
    for edge in range(problem.stages - 1):
        output, gradient = message_seconds(problem, edge)
        row.add(code.at_cut(edge, [x * unit for x in output]), -float(path.outputs[edge]))
        row.add(code.at_cut(edge, [x * unit for x in gradient]), -float(path.gradients[edge]))
    row.add(code.per_cell(path.end, [x * unit for x in tail_seconds(problem)]), -1.0)
    code.model.at_least(f"path[{number}]", row)


def durations(code: Encoding, values: tuple[float, ...]) -> Durations:
    """The durations of a solution, in seconds."""
    edges = range(code.problem.stages - 1)
    messages = [message_seconds(code.problem, edge) for edge in edges]
    return Durations(
        forward=tuple(values[v] / code.second for v in code.forward),
        backward=tuple(values[v] / code.second for v in code.backward),
        output=tuple(code.at_cut(e, messages[e][0]).value(values) for e in edges),
        gradient=tuple(code.at_cut(e, messages[e][1]).value(values) for e in edges),
        tail=tuple(code.per_cell(s, tail_seconds(code.problem)).value(values) for s in range(code.problem.stages)),
    )


def _pools(code: Encoding) -> None:
    """Swapped bytes go somewhere; copies of a forward drain within it, copies of a backward arrive within it; links have bandwidth."""
    problem, model = code.problem, code.model
    machine, stages = problem.machine, problem.stages
    types = problem.workload.types
    swapped = {(t, k): mode.swapped_bytes * code.byte for t, cost in enumerate(types) for k, mode in enumerate(cost.modes)}
    rate = code.byte / code.second  # memory units per time unit, for one byte per second
    swaps = [cost for cost in types if any(mode.swapped_bytes for mode in cost.modes)]
    shortest = min((cost.forward_seconds for cost in swaps), default=0.0), min((cost.backward_seconds for cost in swaps), default=0.0)
    most = sum(n * max(swapped[t, k] for k in code.mode[0][t]) for t, n in enumerate(totals(problem.workload)))
    for s in range(stages):
        peers = [r for r in range(stages) if r != s and machine.links[s][r] > 0 and machine.links[r][s] > 0]
        code.device.append({r: model.variable(f"d2d[{s},{r}]") for r in peers})
        code.host.append(model.variable(f"host[{s}]"))
        pools = Linear(dict.fromkeys((*code.device[s].values(), code.host[s]), -1.0))
        model.equal(f"swapped[{s}]", pools.add(code.quantity(s, swapped)))
        if not swaps:
            continue
        # the first swapped cell computes before (forward) or after (backward) all copies of the stage
        active = model.variable(f"swaps[{s}]", upper=1.0, integer=True)
        model.at_most(f"swaps if any[{s}]", code.quantity(s, swapped).term(active, -most))
        for word, duration, beside in ((Word.F, code.forward[s], shortest[0]), (Word.B, code.backward[s], shortest[1])):
            floor = Linear({duration: 1.0}).term(active, -beside * code.second)
            for r, variable in code.device[s].items():
                link = machine.links[s][r] if word is Word.F else machine.links[r][s]
                model.at_least(f"link {word.value}[{s},{r}]", floor.copy().term(variable, -1.0 / (link * rate)))
            port = Linear(dict.fromkeys(code.device[s].values(), -1.0 / (machine.port * rate)))
            model.at_least(f"port {word.value}[{s}]", floor.copy().add(port))
            bandwidth = machine.host_bandwidth[s]
            if bandwidth > 0:
                model.at_least(f"host {word.value}[{s}]", floor.copy().term(code.host[s], -1.0 / (bandwidth * rate)))
            else:
                model.equal(f"no host[{s}]", Linear({code.host[s]: 1.0}))
    for r in range(stages):
        sources = {s: code.device[s][r] for s in range(stages) if r in code.device[s]}
        _shared(code, f"port of donor[{r}]", sources, list(sources), machine.port * rate)
    uplinks = machine.uplinks if code.variant.careful or not problem.any_uplinks else problem.any_uplinks
    for group, (members, bandwidth) in enumerate(uplinks):
        inside = [s for s in members if s < stages]
        _shared(code, f"uplink[{group}]", {s: code.host[s] for s in inside}, inside, bandwidth * rate)
    slots = Linear({code.host[s]: float(problem.in_flight(s)) for s in range(stages)})
    model.at_most("host memory", slots, machine.host_memory * code.byte)


def _shared(code: Encoding, name: str, copies: dict[int, int], stages: list[int], bandwidth: float) -> None:
    """Copies of several stages over one resource take turns.

    The way out begins with the first forward of the first of these stages and ends with the last forward of the last of them; the rest
    of the pipeline runs once before and after, and all backwards of the last micro-batch follow.  The way back is the mirror image.
    GPipe ends all forwards of a stage before any backward, so there the two ways follow each other.
    """
    if not copies:
        return
    problem, m = code.problem, float(code.problem.micro_batches)
    rest = [r for r in range(problem.stages) if r < min(stages) or r > max(stages)]
    everyone = list(range(problem.stages))
    rows = [("out", 1.0, rest, everyone), ("back", 1.0, everyone, rest)]
    if problem.schedule is ScheduleKind.GPIPE:
        rows.append(("out and back", 2.0, rest, rest))
    for way, turns, forwards, backwards in rows:
        row = Linear(dict.fromkeys(copies.values(), -turns * m / bandwidth)).term(code.step, 1.0)
        for r in forwards:
            row.term(code.forward[r], -1.0)
        for r in backwards:
            row.term(code.backward[r], -1.0)
        code.model.at_least(f"{name} {way}", row)
    if code.variant.careful and len(copies) > 1:
        together = Linear(dict.fromkeys(copies.values(), -1.0 / bandwidth))
        for s in stages:
            code.model.at_least(f"{name} F[{s}]", together.copy().term(code.forward[s], 1.0))
            code.model.at_least(f"{name} B[{s}]", together.copy().term(code.backward[s], 1.0))


def _exclude(code: Encoding, number: int, composition: Composition) -> None:
    """At least one count differs from a composition that has been judged."""
    model, counts = code.model, totals(code.problem.workload)
    differs = Linear()
    for s, row in enumerate(code.mode):
        for t, modes in enumerate(row):
            for m, variable in modes.items():
                value = composition.counts[s][t][m]
                if value < counts[t]:
                    up = model.variable(f"above[{number},{s},{t},{m}]", upper=1.0, integer=True)
                    model.at_least(f"above[{number},{s},{t},{m}]", Linear({variable: 1.0, up: -float(value + 1)}))
                    differs.term(up, 1.0)
    model.at_least(f"another composition[{number}]", differs, 1.0)


def _objective(code: Encoding) -> None:
    model, variant = code.model, code.variant
    if variant.limit > 0:
        model.at_most("limit", Linear({code.step: 1.0}), variant.limit * code.second)
    if variant.slack:
        most = model.variable("most missing")
        for s, v in enumerate(code.missing):
            model.at_least(f"most missing[{s}]", Linear({most: 1.0, v: -1.0}))
        model.objective = Linear(dict.fromkeys(code.missing, 0.001)).term(most, 1.0)
    elif variant.thrift:
        types = code.problem.workload.types
        moved = {(t, k): mode.swapped_bytes * code.byte for t, cost in enumerate(types) for k, mode in enumerate(cost.modes)}
        redo = {(t, k): 1e-3 * (k > 0) for t, cost in enumerate(types) for k in range(len(cost.modes))}
        for s in range(code.problem.stages):
            model.objective.add(code.quantity(s, moved)).add(code.quantity(s, redo))
    else:
        model.objective = Linear({code.step: 1.0})
