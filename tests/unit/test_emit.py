"""Names, loops and expressions of emitted code, on the real recorded GPT."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import models_of_all_kinds
from mpress.cells import Chain
from mpress.emit.cell_code import cell_functions
from mpress.emit.expressions import Expressions
from mpress.emit.fingerprint import fingerprint
from mpress.emit.names import RUNTIME, LocalNames, identifier, parameter_name
from mpress.emit.stage_code import runs
from mpress.errors import InputError
from mpress.fold import fold
from mpress.graph import Graph, reads
from mpress.lines import build_program
from mpress.plan import StagePlan
from mpress.trace.record import trace
from tiny_models import GPT, gpt_args, write_model
from tiny_plans import emit_model


@cache
def recorded(layers: int = 5) -> tuple[Graph, Chain]:
    graph = trace(
        GPT, model_args=gpt_args(layers=layers, hidden=32, heads=2, sequence=16, vocabulary=64, tied=True), micro_batch=1, precision="fp32"
    )
    return graph, fold(graph)


@pytest.mark.parametrize(
    ("text", "name"), [("c_attn", "c_attn"), ("0", "layer_0"), ("sum", "sum_"), ("a.b", "a_b"), ("class", "class_"), ("", "value")]
)
def test_identifiers_shadow_nothing(text: str, name: str) -> None:
    assert identifier(text) == name
    assert name.isidentifier()


FACTORIES = """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("place", torch.arange(8, device="cpu") * torch.ones(8))

    def forward(self, x):
        y = self.a(x) + self.place + torch.arange(8) + torch.zeros(8) + torch.full((8,), 2.0) + torch.tensor([1.0] * 8) + torch.eye(8)[0]
        y = y + torch.linspace(0, 1, 8) + torch.linspace(torch.tensor(0.0), torch.tensor(1.0), 8) + torch.rand(8) + torch.randint(3, (8,))
        y = y + torch.randperm(8) + torch.normal(0.0, 1.0, (8,)) + torch.empty(8).fill_(2) + torch.hann_window(8)
        y = y + torch.tril_indices(4, 2)[0, 0]
        y = y + torch.scalar_tensor(2.0) + torch.arange(8, device="cpu").to("cpu", torch.float64).to(y)
        return (y + torch.ones_like(y, device="cpu") + y.new_zeros(8, device="cpu")).square().mean()

def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
"""


def test_what_the_forward_makes_is_made_on_the_stages_device(tmp_path: Path) -> None:
    """Whatever device was recorded: a recording of fake tensors says cpu or, from another front end, nothing."""
    graph = trace(write_model(tmp_path, FACTORIES), model_args={}, micro_batch=2, precision="fp32")
    silent = replace(graph, ops=tuple(replace(op, kwargs=tuple(pair for pair in op.kwargs if pair[0] != "device")) for op in graph.ops))
    makers = {"arange", "zeros", "full", "eye", "linspace", "rand", "randint", "randperm", "normal", "empty", "hann_window", "tril_indices"}
    for one in (graph, silent):
        chain = fold(one)
        written = [Expressions(one, cell, LocalNames(one, cell)) for cell in chain.cells]
        calls = {
            i: text.call(one.ops[i]) for text, cell in zip(written, chain.cells, strict=True) for i in cell.forward if not one.ops[i].view
        }
        fresh = {one.ops[i].name: text for i, text in calls.items() if not reads(one.ops[i]) or one.ops[i].name == "linspace"}
        assert makers | {"literal", "scalar_tensor"} <= fresh.keys()
        assert all("device=c.device" in text for text in fresh.values()), fresh
        assert not any("cpu" in text for text in calls.values())
    copies = [text for text in calls.values() if "_to_copy" in text]
    assert copies and not any("device" in text for text in copies)  # where nothing is recorded a copy stays where its source is


def test_a_buffers_first_value_is_made_without_a_stage(tmp_path: Path) -> None:
    """There is no stage yet, so no device of one: what runs while a module is loaded names none."""
    emitted = emit_model(tmp_path, write_model(tmp_path, FACTORIES), {}, "keep", 1, 1)
    _, _, make, _ = emitted.program.STAGES[0].BUFFERS["place"]
    assert make is not None and torch.equal(make(), torch.arange(8.0))


def test_every_stage_bears_the_users_name_of_a_tied_parameter() -> None:
    graph, chain = recorded()
    assert parameter_name(graph, chain.cells[0], "wte.weight") == "wte.weight"
    assert parameter_name(graph, chain.cells[-1], "wte.weight") == "lm_head.weight"


def test_locals_are_unique_and_equal_cells_get_equal_names() -> None:
    graph, chain = recorded()
    for kind in range(len(chain.representatives)):
        cells = [cell for cell in chain.cells if cell.type == kind]
        spelled = []
        for cell in cells:
            names = LocalNames(graph, cell)
            bound = [names.of(t) for i in (*cell.forward, *cell.backward) for t in graph.ops[i].outputs if t >= 0 and names.has(t)]
            spelled.append(bound)
        assert all(row == spelled[0] for row in spelled)
        assert len(set(spelled[0])) == len(spelled[0])


def test_equal_layers_become_one_loop_with_what_is_left_beside_it() -> None:
    _, chain = recorded()  # wte..drop, 5 x (attn, mlp), ln_f..lm_head
    stage = StagePlan(0, 0, len(chain.cells), (0,) * len(chain.cells), (), 1, 1)
    found = runs(chain, stage)
    assert [(len(run.period), run.first, run.count) for run in found] == [(1, -1, 1), (2, 0, 5), (1, -1, 1)]
    other = replace(stage, first=2, last=8, modes=(0, 0, 0, 1, 0, 1))  # mlp, then layers in other modes
    assert sum(len(run.period) * run.count for run in runs(chain, other)) == 6
    assert [run.count for run in runs(chain, other)] != [6]


@pytest.mark.parametrize("place", range(4))
def test_functions_bind_every_name_they_use(place: int) -> None:
    """Each local is assigned before it is read and nothing is read after `del`; `pyflakes` by hand, on the real text."""
    graph, chain = recorded()
    cell = chain.cells[chain.representatives[place]]
    text = "\n".join(cell_functions(graph, cell, build_program(graph, cell, (), ()), "cell", "here"))
    for function in ast.parse(text).body:
        assert isinstance(function, ast.FunctionDef)
        alive = {argument.arg for argument in function.args.args} | {"aten", "torch", *RUNTIME}
        for statement in function.body:
            read = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            assert read <= alive, f"{function.name} reads {read - alive} too early or too late"
            alive |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            alive -= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Del)}


def test_each_line_of_arithmetic_names_the_line_of_the_user() -> None:
    graph, chain = recorded()
    cell = chain.cells[1]
    text = cell_functions(graph, cell, build_program(graph, cell, (), ()), "cell", "here")
    starts = [line for line in text if re.match(r"    \w.* = (aten|sdpa|dropout)", line)]
    assert starts and all(re.search(r"# gpt\.py:\d+$", line) for line in starts)


def test_the_fingerprint_sees_the_computation_and_not_the_text() -> None:
    graph, _ = recorded()
    moved = tuple(replace(op, source=replace(op.source, line=op.source.line + 7, code="another")) for op in graph.ops)
    assert fingerprint(replace(graph, ops=moved)) == fingerprint(graph)
    last = graph.ops[-1]
    changed = (*graph.ops[:-1], replace(last, args=(*last.args[:-1], 12345)))
    assert fingerprint(replace(graph, ops=changed)) != fingerprint(graph)


def test_an_operator_without_a_form_is_refused_by_name_and_line() -> None:
    graph, chain = recorded()
    cell = chain.cells[1]
    place = next(i for i in cell.forward if not graph.ops[i].view)
    drawn = replace(graph.ops[place], target="aten.unheard_of.default", random_key="h.0#0")
    broken = replace(graph, ops=tuple(drawn if op.id == place else op for op in graph.ops))
    with pytest.raises(InputError, match="unheard_of") as refusal:
        cell_functions(broken, cell, build_program(graph, cell, (), ()), "cell", "here")
    assert refusal.value.code == "no-form" and "gpt.py:" in refusal.value.where


def test_a_stage_that_nothing_trains_has_no_backward(tmp_path: Path) -> None:
    emitted = emit_model(tmp_path, models_of_all_kinds.write("lora_frozen_backbone", tmp_path), {}, "keep", 6, 2)
    text = emitted.module_path.read_text()
    untrained = [cell.gradient_inputs == () for cell in emitted.chain.cells]
    last = emitted.plan.stages[0].last
    assert all(untrained[:last]) and not untrained[last]
    stage = text.split("class Stage0:")[1].split("class Stage1:")[0]
    assert "_bwd(" not in stage and "return ()" in stage
    assert "_bwd(" in text.split("class Stage1:")[1]
    assert not re.search(r"_bwd\(c, p\):", text)  # no function without a gradient
