"""Seconds of operators against the roofline by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpress.costs import check_precision, op_seconds, optimizer_seconds_per_element
from mpress.errors import InputError
from mpress.fold import fold
from mpress.graph import Op, Phase, Source
from mpress.machine import Device, load_machine
from mpress.modes import build_workload
from mpress.recipe import Optimizer, Precision, Recipe
from mpress.trace.record import trace
from mpress.trace.semantics import Semantics
from mpress.units import Bytes, BytesPerSecond, Flops

DEVICE = Device(Bytes(2**30), (("float32", 100.0),), BytesPerSecond(10.0), 0.5, 0.25)
GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")


def op(flops: float, size: int, view: bool = False) -> Op:
    source = Source("net.py", 3, "x @ y")
    return Op(0, "aten.mm.default", (), (), (), False, Phase.FORWARD, "net", source, -1, view, (), "", Flops(flops), Bytes(size))


def test_the_slower_of_arithmetic_and_traffic_plus_the_launch() -> None:
    assert op_seconds(op(200.0, 10), DEVICE, "float32") == pytest.approx(4.0 + 0.25)
    assert op_seconds(op(200.0, 100), DEVICE, "float32") == pytest.approx(10.0 + 0.25)
    assert op_seconds(op(0.0, 100), DEVICE, "float64") == pytest.approx(10.0 + 0.25)
    assert op_seconds(op(0.0, 100, view=True), DEVICE, "float32") == 0.0


def test_a_dtype_without_a_peak_is_refused_at_its_line() -> None:
    with pytest.raises(InputError, match="bfloat16") as refusal:
        op_seconds(op(200.0, 10), DEVICE, "bfloat16")
    assert refusal.value.where == "net.py:3"


def test_v100_has_no_bfloat16() -> None:
    machine = load_machine("dgx1-v100-32gb", gpus=8)
    check_precision(machine, Recipe(Precision.FP16, Optimizer.ADAMW))
    with pytest.raises(InputError) as refusal:
        check_precision(machine, Recipe(Precision.BF16, Optimizer.ADAMW))
    assert refusal.value.code == "precision" and "fp16" in refusal.value.hint


def test_the_optimizer_is_bound_by_memory() -> None:
    assert optimizer_seconds_per_element(Recipe(Precision.FP32, Optimizer.ADAMW), DEVICE) == pytest.approx(3.2)


def single_gpu(batch: int, hidden: int, layers: int, heads: int) -> float:
    """Predicted seconds of a step of a GPT on one V100, sequence 2048, fp16, every block recomputed (as in the published rows)."""
    arguments = {
        "layers": str(layers),
        "hidden": str(hidden),
        "heads": str(heads),
        "sequence": "2048",
        "vocabulary": "50688",
        "dropout": "0.1",
    }
    graph = trace(GPT, model_args=arguments, micro_batch=batch, precision="fp16", semantics=Semantics(flash=False))
    machine, recipe = load_machine("dgx1-v100-32gb", gpus=1), Recipe(Precision.FP16, Optimizer.ADAMW)
    workload, _ = build_workload(graph, fold(graph), machine, recipe)
    seconds = workload.optimizer_seconds_per_element * sum(parameter.elements for parameter in graph.parameters)
    for kind in workload.cells:
        cost = workload.types[kind]
        again = cost.forward_seconds if cost.shared_parameters == () else 0.0
        seconds += cost.forward_seconds + cost.backward_seconds + again
    return seconds


def test_a_published_step_is_predicted_within_a_quarter() -> None:
    """DLPerf: GPT 1536x16, micro-batch 2, one V100: 406 ms (OneFlow) and 464 ms (Megatron-LM)."""
    seconds = single_gpu(2, 1536, 16, 16)
    assert 0.75 * 0.406 < seconds < 1.25 * 0.464
