"""Graph files under random weather: exact round trips, and damaged files that are refused or planned, but never crash the planner."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graph_example import example
from models_of_all_kinds import MODELS, write
from mpress.errors import InputError
from mpress.fold import fold
from mpress.graph import Graph
from mpress.graph_check import parameter_dtype
from mpress.graph_file import read_graph, write_graph
from mpress.machine import load_machine
from mpress.modes import build_workload
from mpress.recipe import Optimizer, Precision, Recipe
from mpress.trace.record import trace
from random_graphs import graphs
from tiny_models import GPT, gpt_args, write_model

CONVNET = """
def build_model():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(256, 5))

def example_inputs(batch=1):
    return (torch.randn(batch, 3, 8, 8),)

def loss(out):
    return out.logsumexp(1).mean()
"""


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs())
def test_made_up_graphs_read_back_exactly(graph: Graph) -> None:
    text = write_graph(graph)
    read = read_graph(text, "g.json")
    assert read == graph and repr(read) == repr(graph)
    assert write_graph(read) == text


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("changes", [{"dropout": 0.1}, {"tied": False, "layers": 1}])
def test_traced_graphs_read_back_exactly(precision: str, changes: dict[str, object]) -> None:
    graph = trace(GPT, model_args=gpt_args(**changes), micro_batch=3, precision=precision)
    assert read_graph(write_graph(graph), "gpt.graph.json") == graph


def test_a_model_that_writes_in_place_reads_back_exactly(tmp_path: Path) -> None:
    graph = trace(write_model(tmp_path, CONVNET), model_args={}, micro_batch=2, precision="fp32")
    assert any(op.mutates for op in graph.ops)
    assert read_graph(write_graph(graph), "conv.graph.json") == graph


@pytest.mark.parametrize("name", list(MODELS))
def test_models_of_every_kind_read_back_exactly(tmp_path: Path, name: str) -> None:
    try:
        graph = trace(write(name, tmp_path), model_args={}, micro_batch=2, precision="fp32")
    except InputError as refusal:
        pytest.skip(f"not traced: {refusal.code}")
    assert read_graph(write_graph(graph), "g.json") == graph


def test_complex_parameters_are_stepped_as_real_numbers(tmp_path: Path) -> None:
    path = write("complex_numbers", tmp_path)
    graph = read_graph(write_graph(trace(path, model_args={}, micro_batch=2, precision="fp32")), "g.json")
    assert parameter_dtype(graph) == "float32"


def damage(document: dict[str, Any], dice: random.Random) -> None:
    """One to three changes that keep the JSON valid: swapped, dropped or altered rows, keys and numbers."""
    for _ in range(dice.choice([1, 1, 2, 3])):
        key = dice.choice(["ops", "ops", "ops", "tensors", "storages", "parameters", "inputs", "contributions", "top"])
        if key == "top":
            document[dice.choice(["loss", "seed", "micro_batch"])] = dice.randrange(-1, len(document["tensors"]) + 2)
            continue
        rows = document[key]
        row = dice.choice(rows)
        name = dice.choice(list(row))
        value, many = row[name], max(len(document["tensors"]), len(document["ops"]))
        way = dice.random()
        if way < 0.1:
            other = dice.choice(rows)
            for shared in ("args", "outputs", "shape", "storage", "tensor", "bytes"):
                if shared in row and shared in other:
                    row[shared], other[shared] = other[shared], row[shared]
        elif way < 0.2:
            del row[name]
        elif type(value) is bool:
            row[name] = not value
        elif type(value) is int:
            row[name] = dice.choice([dice.randrange(-1, many), value + 1, value - 1, value * 2])
        elif type(value) is str:
            row[name] = dice.choice(["h.0", "h.1.attn", "1", "float32", "int64", "backward", "forward", "computed", "input", value + "x"])
        elif type(value) is list and value:
            place = dice.randrange(len(value))
            value[place] = dice.choice([{"tensor": dice.randrange(many)}, dice.randrange(many), dice.choice(value)])
        if key == "ops" and dice.random() < 0.3:
            row[dice.choice(["forward_op", "repeats"])] = dice.randrange(many)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32))
def test_damaged_files_are_refused_or_planned(start: int) -> None:
    """Whatever is read can be folded and costed, or is refused in words: no exception of another kind."""
    machine = load_machine("dgx-a100-40gb", gpus=2, reserve=0.05)
    sound = [json.loads(example()), json.loads(write_graph(trace(GPT, model_args=gpt_args(layers=1), micro_batch=1, precision="fp32")))]
    dice = random.Random(start)
    seen: Counter[str] = Counter()
    for _ in range(60):
        document = copy.deepcopy(dice.choice(sound))
        damage(document, dice)
        try:
            graph = read_graph(json.dumps(document), "damaged.json")
        except InputError as error:
            assert error.code == "graph-file" and error.where and error.hint
            seen["refused"] += 1
            continue
        try:
            build_workload(graph, fold(graph), machine, Recipe(Precision.FP32, Optimizer.ADAMW))
            seen["planned"] += 1
        except InputError:
            seen["no chain"] += 1
    assert seen["refused"] > 20 and seen["planned"] > 0
