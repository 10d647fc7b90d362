"""Seconds of operators on a device: the slower of arithmetic and memory traffic, plus the launch.  A compass, not a stopwatch.

seconds(op) = max(flops / (peak of its dtype x efficiency), bytes moved / memory bandwidth) + launch;  views cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpress.dataflow import Dataflow
from mpress.errors import InputError
from mpress.graph import Graph, Op, references
from mpress.machine import Device, Machine
from mpress.program import CellProgram, Verb
from mpress.recipe import Recipe
from mpress.units import Seconds

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def check_precision(machine: Machine, recipe: Recipe) -> None:
    """Refuse a recipe whose dtype the machine's GPUs cannot compute in."""
    for device in machine.devices:
        known = tuple(dtype for dtype, _ in device.peak_flops)
        if recipe.dtype not in known:
            others = ", ".join(word for word, dtype in (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")) if dtype in known)
            message = f"the GPUs of {machine.name} do not compute in {recipe.dtype}"
            raise InputError("precision", message, "--precision", f"this machine has {others}")


def check_kernels(machine: Machine, graph: Graph) -> None:
    """Refuse a graph that was recorded for GPUs with a flash attention kernel where the machine's have none."""
    if all(device.flash_attention for device in machine.devices):
        return
    for op in graph.ops:
        if op.name.startswith("_scaled_dot_product_flash_attention"):
            message = f"the step runs flash attention, for which the GPUs of {machine.name} have no kernel"
            raise InputError("attention", message, op.source.place(op.module), "trace the model again with --attention efficient, or math")


def op_seconds(op: Op, device: Device, dtype: str) -> Seconds:
    """Seconds of one call whose arithmetic is done in `dtype` ("bfloat16"); 0 for views."""
    if op.view:
        return Seconds(0.0)
    arithmetic = 0.0
    if op.flops > 0:
        peak = dict(device.peak_flops).get(dtype)
        if peak is None:
            message = f"{op.target} computes in {dtype}, which has no peak in the machine's profile"
            raise InputError("precision", message, op.source.place(op.module))
        arithmetic = op.flops / (peak * device.efficiency)
    return Seconds(max(arithmetic, op.bytes_moved / device.memory_bandwidth) + device.launch_seconds)


def op_dtype(op: Op, flow: Dataflow) -> str:
    """The dtype an op computes in: of its first floating-point argument, else of its first floating-point output, else float32."""
    ids = (*references(op.args), *(t for t in op.outputs if t >= 0))
    return next((flow.tensors[t].dtype for t in ids if flow.tensors[t].dtype in _FLOATS), "float32")


def total_seconds(ops: Iterable[Op], flow: Dataflow, device: Device) -> Seconds:
    """Sum over ops, in their own dtypes."""
    return Seconds(sum(op_seconds(op, device, op_dtype(op, flow)) for op in ops))


def forward_seconds(flow: Dataflow, device: Device) -> Seconds:
    """One forward of the cell."""
    return total_seconds((flow.ops[index] for index in flow.cell.forward), flow, device)


def backward_seconds(graph: Graph, flow: Dataflow, device: Device) -> Seconds:
    """One backward of the cell without recomputation: its ops, and `grad += value` (read both, write one) for every contribution."""
    seconds = total_seconds((flow.ops[index] for index in flow.cell.backward), flow, device)
    storages = {storage.id: storage.bytes for storage in graph.storages}
    for number in flow.cell.contributions:
        size = storages[flow.tensors[graph.contributions[number].tensor].storage]
        seconds = Seconds(seconds + 3.0 * size / device.memory_bandwidth + device.launch_seconds)
    return seconds


def recompute_seconds(flow: Dataflow, program: CellProgram, device: Device) -> Seconds:
    """The RECOMPUTE lines of a program."""
    return total_seconds((flow.ops[line.op] for line in program.backward if line.verb is Verb.RECOMPUTE), flow, device)


def optimizer_seconds_per_element(recipe: Recipe, device: Device) -> float:
    """Seconds per trainable element of the step: it only moves bytes, so traffic over bandwidth."""
    return recipe.step_traffic_bytes / device.memory_bandwidth
