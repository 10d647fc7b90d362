"""Refuses a plan that breaks a rule, before anything is emitted.  Shares no line with the solver.

A plan that cannot be explained by these rules is our bug, so the refusal is a BrokenPlanError (exit 3) that names the stage.
"""

from __future__ import annotations

from itertools import pairwise

import networkx as nx

from mpress.errors import BrokenPlanError
from mpress.holdings import host_bytes
from mpress.machine import Machine
from mpress.plan import HOST, Plan, StagePlan, in_flight
from mpress.schedule import Action, Word, actions, parse_action
from mpress.simulate import Replay, simulate
from mpress.units import gib
from mpress.workload import Workload


def verify(workload: Workload, machine: Machine, plan: Plan) -> Replay:
    """Check every rule, replay the step and check every capacity; returns the replay.  Raises BrokenPlanError."""
    _partition(workload, machine, plan)
    for index, stage in enumerate(plan.stages):
        _stage(workload, machine, plan, index, stage)
    _order(plan)
    _no_deadlock(plan)
    replay = simulate(workload, machine, plan)
    for index, (stage, seen) in enumerate(zip(plan.stages, replay.stages, strict=True)):
        usable = machine.usable_bytes(stage.device)
        if seen.peak_bytes > usable:
            raise BrokenPlanError(
                "over-capacity",
                f"stage {index} needs {gib(seen.peak_bytes)} at {seen.peak_action}, GPU {stage.device} has {gib(usable)} usable "
                f"({seen.peak_bytes - usable} bytes missing)",
                where=f"stage {index}",
            )
    host = host_bytes(plan)
    if host > machine.host_memory:
        raise BrokenPlanError("over-host-memory", f"swaps need {gib(host)} of host memory, the machine has {gib(machine.host_memory)}")
    return replay


def _partition(workload: Workload, machine: Machine, plan: Plan) -> None:
    """Every cell on exactly one stage, in order; every stage on its own GPU."""
    if not plan.stages:
        raise BrokenPlanError("no-stage", "the plan has no stage")
    if plan.micro_batches < 1:
        raise BrokenPlanError("micro-batches", f"{plan.micro_batches} micro-batches")
    expected = 0
    for index, stage in enumerate(plan.stages):
        if stage.first != expected or stage.last <= stage.first:
            raise BrokenPlanError("partition", f"stage {index} holds cells {stage.first}..{stage.last}, expected to begin at {expected}")
        expected = stage.last
    if expected != len(workload.cells):
        raise BrokenPlanError("partition", f"{expected} of {len(workload.cells)} cells are placed")
    used = [stage.device for stage in plan.stages]
    if len(set(used)) != len(used) or not all(0 <= d < len(machine.devices) for d in used):
        raise BrokenPlanError("placement", f"stages are placed on GPUs {used}, the machine has 0..{len(machine.devices) - 1}")


def _stage(workload: Workload, machine: Machine, plan: Plan, index: int, stage: StagePlan) -> None:
    """Modes exist, shares hold exactly the swapped bytes, and go only where there is a link."""
    where = f"stage {index}"
    if len(stage.modes) != stage.last - stage.first:
        raise BrokenPlanError("modes", f"{len(stage.modes)} modes for {stage.last - stage.first} cells", where)
    swapped = 0
    for cell, mode in zip(range(stage.first, stage.last), stage.modes, strict=True):
        cost = workload.types[workload.cells[cell]]
        if not 0 <= mode < len(cost.modes):
            raise BrokenPlanError("modes", f"cell {cell} has mode {mode}, its type has {len(cost.modes)}", where)
        swapped += cost.modes[mode].swapped_bytes
    if sum(share.bytes for share in stage.shares) != swapped:
        raise BrokenPlanError("shares", f"shares hold {sum(s.bytes for s in stage.shares)} bytes, {swapped} are swapped", where)
    pools = [share.pool for share in stage.shares]
    if pools != sorted(set(pools)) or any(share.bytes <= 0 for share in stage.shares):
        raise BrokenPlanError("shares", f"shares {pools} are not sorted, unique and positive", where)
    devices = {other.device for other in plan.stages}
    for pool in pools:
        if pool == HOST:
            continue
        if pool == stage.device or pool not in devices:
            raise BrokenPlanError("shares", f"pool {pool} is not another GPU of the plan", where)
        if machine.links[stage.device][pool] <= 0 or machine.links[pool][stage.device] <= 0:
            raise BrokenPlanError("shares", f"there is no link between GPU {stage.device} and GPU {pool}", where)
    if stage.drain_lag < 1 or stage.prefetch_lead < 1:
        raise BrokenPlanError("lags", f"drain_lag {stage.drain_lag} and prefetch_lead {stage.prefetch_lead} must be at least 1", where)


def _order(plan: Plan) -> None:
    """Each stage runs F before B for every micro-batch, each once, never more in flight than memory was planned for; words round-trip."""
    count = len(plan.stages)
    for s in range(count):
        live: set[int] = set()
        done: set[int] = set()
        limit = in_flight(plan.schedule, count, s, plan.micro_batches)
        for action in actions(plan.schedule, count, s, plan.micro_batches, tied=False):
            _round_trip(action)
            if action.word is Word.F:
                if action.micro_batch in live | done:
                    raise BrokenPlanError("order", f"{action} runs twice", f"stage {s}")
                live.add(action.micro_batch)
            elif action.word is Word.B:
                if action.micro_batch not in live:
                    raise BrokenPlanError("order", f"{action} runs before its forward", f"stage {s}")
                live.remove(action.micro_batch)
                done.add(action.micro_batch)
            if len(live) > limit:
                raise BrokenPlanError("order", f"{len(live)} micro-batches in flight after {action}, planned {limit}", f"stage {s}")
        if live or len(done) != plan.micro_batches:
            raise BrokenPlanError("order", f"{len(done)} of {plan.micro_batches} micro-batches finish", f"stage {s}")


def _no_deadlock(plan: Plan) -> None:
    """What must happen before what, over all stages, has no cycle: a proof apart from the replay that the steps can finish.

    A step waits for the one before it on its stage; F and B for the neighbour's SEND and their own RECV; a SEND for the RECV of the
    message before it on that edge, whose buffer it replaces.
    """
    count = len(plan.stages)
    before: nx.DiGraph[str] = nx.DiGraph()
    for s in range(count):
        steps = [str(action) for action in actions(plan.schedule, count, s, plan.micro_batches, tied=False)]
        before.add_edges_from(pairwise(steps))
    for s in range(count - 1):
        for k in range(plan.micro_batches):
            for word, sender, receiver in (("F", s, s + 1), ("B", s + 1, s)):
                before.add_edge(f"{sender}SEND_{word}{k}", f"{receiver}{word}{k}")
                before.add_edge(f"{receiver}RECV_{word}{k}", f"{receiver}{word}{k}")
                if k + 1 < plan.micro_batches:
                    before.add_edge(f"{receiver}RECV_{word}{k}", f"{sender}SEND_{word}{k + 1}")
    if not nx.is_directed_acyclic_graph(before):
        cycle = " -> ".join(edge[0] for edge in nx.find_cycle(before))
        raise BrokenPlanError("deadlock", f"these steps wait for each other: {cycle}")


def _round_trip(action: Action) -> None:
    if parse_action(str(action)) != action:
        raise BrokenPlanError("order", f"'{action}' does not read back as itself")
