"""Names, loops and expressions of emitted code, on the real recorded GPT."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache

import pytest

from mpress.cells import Chain
from mpress.emit.cell_code import cell_functions
from mpress.emit.fingerprint import fingerprint
from mpress.emit.names import RUNTIME, LocalNames, identifier, parameter_name
from mpress.emit.stage_code import runs
from mpress.errors import InputError
from mpress.fold import fold
from mpress.graph import Graph
from mpress.lines import build_program
from mpress.plan import StagePlan
from mpress.trace.record import trace
from tiny_models import GPT, gpt_args


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
