"""Why there is no plan: which stage, how many bytes, and which switches would help - each of them tried."""

from __future__ import annotations

from dataclasses import replace

from mpress.errors import InfeasibleError
from mpress.machine import Machine
from mpress.plan import Plan, ScheduleKind
from mpress.problem import Problem, check
from mpress.simulate import Replay
from mpress.solve.backend import Status, solve
from mpress.solve.encode import Variant, encode
from mpress.solve.greedy import plain
from mpress.solve.judge import judge
from mpress.units import Bytes, BytesPerSecond, gib

_NODES = 2_000
_ADAM_STATE = 8  # bytes per parameter of Adam's two fp32 moments


def unplanned(problem: Problem) -> tuple[Plan, Replay]:
    """What plain pipelining would do: stages of equal time, everything kept.  May exceed memory."""
    check(problem)
    verdict = judge(problem, plain(problem))
    return verdict.plan, verdict.replay


def missing_bytes(problem: Problem) -> tuple[int, ...] | None:
    """Bytes every stage is short of in the plan that is short of least, (0, ...) if none is; None if the solver cannot tell."""
    code = encode(problem, Variant(slack=True), ())
    result = solve(code.model, 0.02, _NODES)
    if result.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    if not result.values:
        return None
    return tuple(round(result.values[v] / code.byte) if result.values[v] > 1e-6 else 0 for v in code.missing)


def infeasible(problem: Problem) -> InfeasibleError:
    """The refusal, in the user's words."""
    machine, work = problem.machine, problem.workload
    missing = missing_bytes(problem)
    state = sum(
        work.types[t].trainable_elements * work.bytes_per_trainable
        + (work.types[t].parameter_elements - work.types[t].trainable_elements) * work.bytes_per_frozen
        for t in work.cells
    )
    usable = sum(int(machine.usable_bytes(s)) for s in range(problem.stages))
    arithmetic = f"weights, gradients and optimizer state take {gib(state)} of {gib(usable)} usable on {problem.stages} GPUs"
    if missing is None or not any(missing):
        message = f"no plan fits: {arithmetic}, and what is left does not hold the activations of a step"
        return InfeasibleError("no-plan", message, where="memory", hint=_hint(problem, None))
    worst = max(range(problem.stages), key=lambda s: (missing[s], -s))
    message = (
        f"no plan fits: stage {worst} on GPU {problem.gpu(worst)} misses {gib(missing[worst])} ({missing[worst]} bytes) "
        f"of its {gib(machine.usable_bytes(worst))} even in the best case; {arithmetic}"
    )
    if state > usable:
        message += " - the parameters alone do not fit, no choice of activations can help"
    return InfeasibleError("no-plan", message, where=f"stage {worst}", hint=_hint(problem, missing[worst]), missing_bytes=missing[worst])


def _hint(problem: Problem, short: int | None) -> str:
    """Only cures that were tried and leave nothing missing."""
    work, machine = problem.workload, problem.machine
    cures = []
    if problem.schedule is ScheduleKind.GPIPE and _helps(replace(problem, schedule=ScheduleKind.ONE_F_ONE_B)):
        cures.append("--schedule 1f1b")
    if work.bytes_per_tensor > 0 and work.bytes_per_trainable > _ADAM_STATE:  # Adam is the optimizer with a step counter per tensor
        lean = replace(work, bytes_per_trainable=work.bytes_per_trainable - _ADAM_STATE, bytes_per_tensor=0)
        if _helps(replace(problem, workload=lean)):
            cures.append("--optimizer sgd")
    if problem.micro_batches > 1 and problem.schedule is ScheduleKind.GPIPE and _helps(replace(problem, micro_batches=1)):
        cures.append("fewer --micro-batches")
    if short:
        need = max((int(machine.usable_bytes(s)) + short) / max(1.0 - machine.reserve, 1e-9) for s in range(problem.stages))
        cures.append(f"GPUs with at least {gib(int(need))} each")
    if len(work.cells) >= 2 * problem.stages and _helps(replace(problem, machine=_twice(machine))):
        cures.append("twice as many GPUs of this kind")
    return "what would help: " + ", or ".join(cures) if cures else "use GPUs with more memory"


def _twice(machine: Machine) -> Machine:
    """Two of the server in one: every GPU has a twin with its links, and a link to its twin as fast as its fastest."""
    n = len(machine.devices)
    links = tuple(
        tuple(
            machine.links[a % n][b % n] if a % n != b % n else BytesPerSecond(0.0 if a == b else max(machine.links[a % n]))
            for b in range(2 * n)
        )
        for a in range(2 * n)
    )
    uplinks = tuple((tuple(s + k for s in group), rate) for k in (0, n) for group, rate in machine.uplinks)
    return replace(
        machine,
        devices=machine.devices * 2,
        links=links,
        host_bandwidth=machine.host_bandwidth * 2,
        uplinks=uplinks,
        host_memory=Bytes(2 * machine.host_memory),
    )


def _helps(problem: Problem) -> bool:
    missing = missing_bytes(problem)
    return missing is not None and not any(missing)
