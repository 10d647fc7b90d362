"""What was decided and what it costs, as plain values for the terminal and for `--json`.  Computes; never prints.

Bytes and tensors of actions count one micro-batch, summed over all stages; `held_bytes` multiplies by the micro-batches a stage keeps
in flight, which is what an action moves off (or leaves on) the GPUs at the peak.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpress.cells import Cell, Chain
from mpress.costs import op_dtype, op_seconds
from mpress.dataflow import study
from mpress.graph import Graph, Op
from mpress.holdings import trainable_elements
from mpress.machine import Machine
from mpress.plan import HOST, Plan, StagePlan, in_flight
from mpress.program import CellProgram, Verb
from mpress.recipe import Recipe
from mpress.simulate import Replay
from mpress.units import Bytes, Seconds
from mpress.workload import Workload

ACTIONS = ("keep", "recompute", "swap_host", "swap_d2d")


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage.  causes: the planned peak taken apart, summing to peak_bytes.  Seconds are of one micro-batch, stall of the step."""

    stage: int
    gpu: int
    layers: str
    parameters: int
    unplanned_peak_bytes: Bytes
    peak_bytes: Bytes
    peak_action: str
    capacity_bytes: Bytes
    usable_bytes: Bytes
    in_flight: int
    forward_seconds: Seconds
    backward_seconds: Seconds
    recompute_seconds: Seconds
    stall_seconds: Seconds
    causes: tuple[tuple[str, Bytes], ...]


@dataclass(frozen=True, slots=True)
class ActionReport:
    """What happens to the tensors of one kind ("mlp.c_fc addmm"): an action of ACTIONS, how many, how much.

    seconds: compute time of a step spent on rebuilding them (recompute only; swaps cost the stall seconds of stages).
    """

    kind: str
    action: str
    tensors: int
    bytes: Bytes
    held_bytes: Bytes
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class StripeReport:
    """Stripes of one owner in one pool (a GPU, or HOST).  bytes: one way, per step; the same comes back.

    pool_bytes: what the pool holds at most; link_use: share of the step the link is busy with everything it carries that way.
    """

    from_gpu: int
    to_gpu: int
    bytes: Bytes
    pool_bytes: Bytes
    link_use: float


@dataclass(frozen=True, slots=True)
class Report:
    """A whole plan.  gap: proven distance from the best plan under the cost model, as a fraction of the step (-1: none proven)."""

    model: str
    machine: str
    gpus: int
    reserve: float
    host_memory_bytes: Bytes
    precision: str
    optimizer: str
    recipe_words: str
    bytes_per_parameter: int
    parameters: int
    schedule: str
    micro_batch: int
    micro_batches: int
    status: str
    gap: float
    gap_target: float
    bound_seconds: Seconds
    step_seconds: Seconds
    bubble: float
    samples_per_second: float
    recompute_seconds: Seconds
    stall_seconds: Seconds
    solver: str
    iterations: int
    stages: tuple[StageReport, ...]
    actions: tuple[ActionReport, ...]
    stripes: tuple[StripeReport, ...]

    def total(self, action: str) -> tuple[int, Bytes]:
        """(tensors, bytes) of one action over all kinds, for one micro-batch."""
        rows = [row for row in self.actions if row.action == action]
        return sum(row.tensors for row in rows), Bytes(sum(row.bytes for row in rows))


def layer_words(chain: Chain, first: int, last: int) -> str:
    """Cells [first, last) in few words: "wte..drop, h.0-h.8, h.9.attn"; a block is named whole when all its cells are there."""
    parts: dict[str, int] = {}
    for cell in chain.cells:
        parts[_block(cell.name)] = parts.get(_block(cell.name), 0) + 1
    runs: list[tuple[str, list[str]]] = []  # (block, its cells in this stage)
    for cell in chain.cells[first:last]:
        block = _block(cell.name)
        if runs and runs[-1][0] == block:
            runs[-1][1].append(cell.name)
        else:
            runs.append((block, [cell.name]))
    whole = [len(inside) == parts[block] for block, inside in runs]
    words: list[str] = []
    position = 0
    while position < len(runs):
        block, inside = runs[position]
        end = position
        if whole[position]:
            while end + 1 < len(runs) and whole[end + 1] and _follows(runs[end][0], runs[end + 1][0]):
                end += 1
            words.append(block if end == position else f"{block}-{runs[end][0]}")
        else:
            words += inside if len(inside) < 3 else [f"{inside[0]}-{inside[-1]}"]
        position = end + 1
    return ", ".join(words)


def _block(name: str) -> str:
    """ "h.3" of "h.3.attn" and of "h.3/2"; the name without its part where no number is in it."""
    found = re.match(r"((?:[^./]+\.)*?\d+)(?=[./]|$)", name)
    return found[1] if found else name.split("/", 1)[0]


def _follows(a: str, b: str) -> bool:
    first, second = re.fullmatch(r"(.*?)(\d+)", a), re.fullmatch(r"(.*?)(\d+)", b)
    return bool(first and second and first[1] == second[1] and int(second[2]) == int(first[2]) + 1)


def stage_parameters(graph: Graph, chain: Chain, stage: StagePlan) -> int:
    """Elements of all parameters a stage holds, each once."""
    held = {name for cell in chain.cells[stage.first : stage.last] for name in cell.parameters}
    return sum(parameter.elements for parameter in graph.parameters if parameter.names[0] in held)


def make_report(
    graph: Graph,
    chain: Chain,
    workload: Workload,
    programs: tuple[tuple[CellProgram, ...], ...],
    machine: Machine,
    recipe: Recipe,
    plan: Plan,
    replay: Replay,
    unplanned: tuple[Plan, Replay],
    *,
    status: str,
    gap: float,
    gap_target: float,
    bound_seconds: Seconds,
    solver: str,
    iterations: int,
) -> Report:
    """Gather everything the terminal shows.  `unplanned` is plain pipelining of the same model: its plan and its replay."""
    plain = {stage.device: seen.peak_bytes for stage, seen in zip(unplanned[0].stages, unplanned[1].stages, strict=True)}
    stages = []
    for s, (stage, seen) in enumerate(zip(plan.stages, replay.stages, strict=True)):
        elements = stage_parameters(graph, chain, stage)
        stages.append(
            StageReport(
                stage=s,
                gpu=stage.device,
                layers=layer_words(chain, stage.first, stage.last),
                parameters=elements,
                unplanned_peak_bytes=plain.get(stage.device, Bytes(0)),
                peak_bytes=seen.peak_bytes,
                peak_action=seen.peak_action,
                capacity_bytes=machine.devices[stage.device].capacity_bytes,
                usable_bytes=machine.usable_bytes(stage.device),
                in_flight=seen.in_flight,
                forward_seconds=seen.forward_seconds,
                backward_seconds=seen.backward_seconds,
                recompute_seconds=seen.recompute_seconds,
                stall_seconds=seen.stall_seconds,
                causes=_causes(seen.causes, elements, trainable_elements(workload, plan, s), recipe),
            )
        )
    samples = graph.micro_batch * plan.micro_batches
    return Report(
        model=graph.model,
        machine=machine.name,
        gpus=len(machine.devices),
        reserve=machine.reserve,
        host_memory_bytes=machine.host_memory,
        precision=recipe.precision.value,
        optimizer=recipe.optimizer.value,
        recipe_words=recipe.words(),
        bytes_per_parameter=workload.bytes_per_trainable,
        parameters=sum(parameter.elements for parameter in graph.parameters),
        schedule=plan.schedule.value,
        micro_batch=graph.micro_batch,
        micro_batches=plan.micro_batches,
        status=status,
        gap=gap,
        gap_target=gap_target,
        bound_seconds=bound_seconds,
        step_seconds=replay.step_seconds,
        bubble=replay.bubble,
        samples_per_second=samples / replay.step_seconds if replay.step_seconds > 0 else 0.0,
        recompute_seconds=Seconds(plan.micro_batches * sum(stage.recompute_seconds for stage in stages)),
        stall_seconds=Seconds(sum(stage.stall_seconds for stage in stages)),
        solver=solver,
        iterations=iterations,
        stages=tuple(stages),
        actions=_actions(graph, chain, workload, programs, machine, plan),
        stripes=_stripes(machine, plan, replay),
    )


def _causes(seen: tuple[tuple[str, Bytes], ...], elements: int, trainable: int, recipe: Recipe) -> tuple[tuple[str, Bytes], ...]:
    """The simulator's causes with "state" taken apart into weights, gradients and optimizer (master weights included)."""
    result: list[tuple[str, Bytes]] = []
    for cause, size in seen:
        if cause != "state":
            result.append((cause, size))
            continue
        weights = elements * recipe.weight_bytes
        gradients = trainable * recipe.gradient_bytes
        result += [("weights", Bytes(weights)), ("gradients", Bytes(gradients)), ("optimizer", Bytes(size - weights - gradients))]
    return tuple(result)


def _actions(
    graph: Graph, chain: Chain, workload: Workload, programs: tuple[tuple[CellProgram, ...], ...], machine: Machine, plan: Plan
) -> tuple[ActionReport, ...]:
    kinds = [_Kinds(graph, chain.cells[index]) for index in chain.representatives]
    counts: dict[tuple[str, str], list[int]] = {}
    costs: dict[tuple[str, str], float] = {}
    for s, stage in enumerate(plan.stages):
        depth = in_flight(plan.schedule, len(plan.stages), s, plan.micro_batches)
        away = sum(share.bytes for share in stage.shares)
        peers = sum(share.bytes for share in stage.shares if share.pool != HOST)
        device = machine.devices[stage.device]
        for cell, index in zip(chain.cells[stage.first : stage.last], stage.modes, strict=True):
            mode, program, kind = workload.types[cell.type].modes[index], programs[cell.type][index], kinds[cell.type]
            saved = dict.fromkeys(graph.tensors[root].storage for root in program.saved)
            rows = [(storage, "keep", int(graph.storages[storage].bytes)) for storage in saved if storage not in mode.swap]
            rows += [(storage, "recompute", int(graph.storages[storage].bytes)) for storage in mode.recompute]
            for storage in mode.swap:
                size = int(graph.storages[storage].bytes)
                striped = size * peers // away if away else 0
                rows += [(storage, action, part) for action, part in (("swap_d2d", striped), ("swap_host", size - striped)) if part]
            for storage, action, size in rows:
                row = counts.setdefault((kind.of_storage(storage), action), [0, 0, 0])
                row[0] += 1
                row[1] += size
                row[2] += size * depth
            for line in program.backward:
                if line.verb is Verb.RECOMPUTE:
                    op = kind.flow.ops[line.op]
                    key = (kind.of_op(op), "recompute")
                    counts.setdefault(key, [0, 0, 0])  # rebuilt on the way to another tensor
                    costs[key] = costs.get(key, 0.0) + plan.micro_batches * op_seconds(op, device, op_dtype(op, kind.flow))
    order = sorted(counts.items(), key=lambda item: (ACTIONS.index(item[0][1]), -item[1][2], item[0][0]))
    return tuple(
        ActionReport(kind, action, row[0], Bytes(row[1]), Bytes(row[2]), Seconds(costs.get((kind, action), 0.0)))
        for (kind, action), row in order
    )


class _Kinds:
    """Names the tensors of one cell type in the user's words: the module that makes them, without its block's number, and the operator."""

    def __init__(self, graph: Graph, cell: Cell) -> None:
        self.flow = study(graph, cell)
        self._cell = cell
        self._makers: dict[int, Op] = {}
        for index in cell.forward:
            op = self.flow.ops[index]
            for output in op.outputs:
                if output >= 0 and not op.view:
                    self._makers.setdefault(graph.tensors[output].storage, op)

    def of_storage(self, storage: int) -> str:
        """ "mlp.c_fc addmm", or "mlp input" for what an earlier cell made."""
        op = self._makers.get(storage)
        return self.of_op(op) if op is not None else f"{self._cell.name.removeprefix(self._cell.prefix)} input"

    def of_op(self, op: Op) -> str:
        """ "mlp.c_fc addmm"."""
        module = f"{op.module}.".removeprefix(self._cell.prefix).rstrip(".")
        name = op.name.strip("_").removeprefix("scaled_dot_product_").removeprefix("native_").removesuffix("_for_cpu")
        return f"{module} {name}".strip()


def _stripes(machine: Machine, plan: Plan, replay: Replay) -> tuple[StripeReport, ...]:
    carried = {(source, target): size for source, target, size in replay.link_bytes}
    rows = []
    for s, stage in enumerate(plan.stages):
        depth = in_flight(plan.schedule, len(plan.stages), s, plan.micro_batches)
        for share in stage.shares:
            ways = [(stage.device, share.pool), (share.pool, stage.device)]
            busy = 0.0
            for source, target in ways:
                bandwidth = machine.host_bandwidth[stage.device] if share.pool == HOST else machine.pair_bandwidth(source, target)
                if replay.step_seconds > 0:
                    busy = max(busy, carried.get((source, target), 0) / bandwidth / replay.step_seconds)
            moved = Bytes(share.bytes * plan.micro_batches)
            rows.append(StripeReport(stage.device, share.pool, moved, Bytes(share.bytes * depth), busy))
    return tuple(sorted(rows, key=lambda row: (row.from_gpu, row.to_gpu)))
