"""What a stage holds during the whole step, whatever the order of its steps: state of its parameters, copies of ties, lent pools."""

from __future__ import annotations

from mpress.plan import HOST, Plan, in_flight
from mpress.workload import Workload


def tied_stages(workload: Workload, plan: Plan) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Groups of stages that hold copies of one tied parameter, with the gradient bytes all-reduced in each group per step."""
    homes: dict[int, tuple[set[int], int]] = {}
    for s, stage in enumerate(plan.stages):
        for cell in range(stage.first, stage.last):
            for tie, elements in workload.types[workload.cells[cell]].shared_parameters:
                homes.setdefault(tie, (set(), elements))[0].add(s)
    groups: dict[tuple[int, ...], int] = {}
    for stages, elements in homes.values():
        if len(stages) > 1:
            key = tuple(sorted(stages))
            groups[key] = groups.get(key, 0) + elements * workload.gradient_element_bytes
    return tuple(sorted(groups.items()))


def trainable_elements(workload: Workload, plan: Plan, s: int) -> int:
    """Trainable elements a stage holds; a parameter tied between cells of one stage is there once."""
    return _once(workload, plan, s)[0]


def state_bytes(workload: Workload, plan: Plan, s: int) -> int:
    """Bytes of weights, gradients, optimizer state and buffers of a stage, resident during the whole step."""
    trainable, frozen, tensors = _once(workload, plan, s)
    parameters = trainable * workload.bytes_per_trainable + frozen * workload.bytes_per_frozen + tensors * workload.bytes_per_tensor
    return parameters + _buffer_bytes(workload, plan, s)


def _buffer_bytes(workload: Workload, plan: Plan, s: int) -> int:
    stage = plan.stages[s]
    costs = [workload.types[workload.cells[cell]] for cell in range(stage.first, stage.last)]
    shared = [buffer for cost in costs for buffer in cost.shared_buffers]
    return sum(cost.buffer_bytes for cost in costs) - sum(size for _, size in shared) + sum(dict(shared).values())


def _once(workload: Workload, plan: Plan, s: int) -> tuple[int, int, int]:
    trainable = frozen = tensors = 0
    seen: set[int] = set()
    stage = plan.stages[s]
    for cell in range(stage.first, stage.last):
        cost = workload.types[workload.cells[cell]]
        trainable += cost.trainable_elements
        frozen += cost.parameter_elements - cost.trainable_elements
        tensors += cost.trainable_tensors
        for tie, elements in cost.shared_parameters:
            if tie in seen:
                trainable, tensors = trainable - elements, tensors - 1
            seen.add(tie)
    return trainable, frozen, tensors


def foreign_bytes(plan: Plan, device: int) -> int:
    """Bytes of the pool that `device` lends to other stages: a slot for every micro-batch the owner keeps in flight."""
    return sum(
        int(share.bytes) * in_flight(plan.schedule, len(plan.stages), s, plan.micro_batches)
        for s, stage in enumerate(plan.stages)
        for share in stage.shares
        if share.pool == device
    )


def host_bytes(plan: Plan) -> int:
    """Host memory of all swaps together: a slot for every micro-batch in flight of every stage."""
    return foreign_bytes(plan, HOST)
