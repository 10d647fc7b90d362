"""What was decided and what it costs, as plain values for the terminal and for `--json`.  Computes; never prints.

`actions` tells what happens to which tensors, `crossings` what goes from stage to stage, `layers` names what a stage holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mpress.cells import Cell, Chain
from mpress.emit.actions import ActionReport, count_actions
from mpress.emit.crossings import Crossings, CutReport
from mpress.emit.layers import layer_words, placed_layers
from mpress.graph import Graph
from mpress.holdings import trainable_elements
from mpress.machine import Machine
from mpress.plan import HOST, Plan, StagePlan, in_flight
from mpress.program import CellProgram
from mpress.recipe import Recipe
from mpress.simulate import Replay
from mpress.sizes import SizeRow
from mpress.units import Bytes, Seconds
from mpress.workload import Workload

Item = TypeVar("Item")


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
class TieReport:
    """A parameter stored on several GPUs.  copy_bytes: what each copy takes, with its gradient and its share of the optimizer.

    reduced_bytes: its gradient, which they all-reduce once a step (0 for a frozen one).
    """

    names: tuple[str, ...]
    gpus: tuple[int, ...]
    copy_bytes: Bytes
    reduced_bytes: Bytes


@dataclass(frozen=True, slots=True)
class InputReport:
    """An input of the model, the shape of one micro-batch of it, and the stages that read it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole plan.  gap: proven distance from the best plan under the cost model, as a fraction of the step (-1: none proven).

    layers, placed_layers: numbered blocks of the model, and those that are whole on the stages (always all of them).
    checkpoints: regions the model's own checkpoints recompute.  no_module: why no module is written, "" if one is.
    proof: "proven" (against real runs), "twin" (at its small size) or "not proven"; and how, or why not.
    sizes: the micro-batch sizes the plan was chosen from, if there were several.
    """

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
    cuts: tuple[CutReport, ...]
    actions: tuple[ActionReport, ...]
    stripes: tuple[StripeReport, ...]
    layers: int
    placed_layers: int
    ties: tuple[TieReport, ...]
    inputs: tuple[InputReport, ...]
    checkpoints: int
    assumptions: tuple[str, ...]
    no_module: str
    proof: tuple[str, str]
    sizes: tuple[SizeRow, ...] = ()

    def total(self, action: str) -> tuple[int, Bytes]:
        """(tensors, bytes) of one action over all kinds, for one micro-batch."""
        rows = [row for row in self.actions if row.action == action]
        return sum(row.tensors for row in rows), Bytes(sum(row.bytes for row in rows))


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
    no_module: str,
    proof: tuple[str, str],
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
    placed, layers = placed_layers(graph, chain, plan)
    return Report(
        model=graph.model,
        machine=machine.name,
        gpus=len(plan.stages),
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
        cuts=Crossings(graph, chain).cuts(plan),
        actions=count_actions(graph, chain, workload, programs, machine, plan),
        stripes=_stripes(machine, plan, replay),
        layers=layers,
        placed_layers=placed,
        ties=tied_copies(graph, chain, workload, plan),
        inputs=entries(graph, chain, plan),
        checkpoints=graph.checkpoints,
        assumptions=graph.assumptions,
        no_module=no_module,
        proof=proof,
    )


def tied_copies(graph: Graph, chain: Chain, workload: Workload, plan: Plan) -> tuple[TieReport, ...]:
    """Parameters that cells of several stages use; the bytes are those the replay holds and all-reduces."""
    rows = []
    for parameter in graph.parameters:
        used = _stages_of(chain, plan, parameter.names[0], lambda cell: cell.parameters)
        if len(used) > 1:
            per_element = workload.bytes_per_trainable if parameter.trainable else workload.bytes_per_frozen
            copy = parameter.elements * per_element + (workload.bytes_per_tensor if parameter.trainable else 0)
            size = parameter.elements * workload.gradient_element_bytes if parameter.trainable else 0
            rows.append(TieReport(parameter.names, tuple(plan.stages[s].device for s in used), Bytes(copy), Bytes(size)))
    return tuple(rows)


def entries(graph: Graph, chain: Chain, plan: Plan) -> tuple[InputReport, ...]:
    """Where each input of the model is read."""
    rows = []
    for item in graph.inputs:
        tensor = graph.tensors[item.tensor]
        rows.append(InputReport(item.name, tensor.shape, tensor.dtype, _stages_of(chain, plan, item.tensor, lambda cell: cell.user_inputs)))
    return tuple(rows)


def _stages_of(chain: Chain, plan: Plan, wanted: Item, uses: Callable[[Cell], tuple[Item, ...]]) -> tuple[int, ...]:
    """Stages with a cell that uses something."""
    return tuple(s for s, stage in enumerate(plan.stages) if any(wanted in uses(cell) for cell in chain.cells[stage.first : stage.last]))


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
