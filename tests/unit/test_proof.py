"""A trace is proven against real runs: right ones pass for every kind of model, spoiled ones are refused at the spoiled operator."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models_of_all_kinds import MODELS, write
from mpress.errors import InputError
from mpress.graph import Graph, Kind, Op, Phase, Ref
from mpress.options import View
from mpress.peak import step_peak
from mpress.trace import proof
from mpress.trace.interpret import interpret
from mpress.trace.model_file import ModelFile
from mpress.trace.proof import Verdict, hold, prove, without_onednn
from mpress.trace.record import open_model, trace, trace_file
from mpress.trace.semantics import Semantics
from mpress.trace.substitution import check_substitutions
from mpress_cli.app import run
from real_run import load_case, real_run
from tiny_models import GPT, gpt_args, write_model

BATCH = 2
CPU, CUDA = Semantics(view=View.CPU), Semantics()


def proven(path: str, precision: str = "fp32") -> proof.Proof:
    model_file = open_model(path, {})
    graph = trace_file(model_file, micro_batch=BATCH, precision=precision, semantics=CUDA)
    return prove(model_file, graph, micro_batch=BATCH, precision=precision, semantics=CUDA)


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_is_proven(tmp_path: Path, name: str) -> None:
    assert proven(write(name, tmp_path)).verdict is Verdict.PROVEN


def test_also_in_bf16(tmp_path: Path) -> None:
    assert proven(write("gpt", tmp_path), "bf16").verdict is Verdict.PROVEN


_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32},
    "llama": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_key_value_heads": 1, "max_position_embeddings": 32},
    "bert": {"architectures": ["BertForMaskedLM"], "num_hidden_layers": 2, "max_position_embeddings": 32},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 2, "num_key_value_heads": 1, "num_local_experts": 4},
}
_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64, "decoder_start_token_id": 0}


@pytest.mark.parametrize("kind", _CONFIGURATIONS)
def test_transformers_models_are_proven(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    own = _CONFIGURATIONS[kind]
    small = {} if kind == "gpt2" else {key: value for key, value in _SMALL.items() if kind == "t5" or key != "decoder_start_token_id"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "vocab_size": 64, **small, **own}))
    model_file = open_model(str(path), {}, 16)
    graph = trace_file(model_file, micro_batch=BATCH, precision="fp32", semantics=CUDA)
    assert prove(model_file, graph, micro_batch=BATCH, precision="fp32", semantics=CUDA).verdict is Verdict.PROVEN


@pytest.mark.parametrize("name", ["gpt", "draws_of_all_kinds", "buffers_written_in_the_forward", "tied_transposed", "complex_numbers"])
def test_the_interpreter_computes_what_the_user_computes(tmp_path: Path, name: str) -> None:
    path = write(name, tmp_path)
    build, inputs, loss = load_case(path)
    given = inputs(BATCH)
    run = real_run(build, given, loss, seed=5)
    graph = trace(path, model_args={}, micro_batch=BATCH, precision="fp32", semantics=CPU)
    model = build()
    values = list(given.values() if isinstance(given, dict) else given)
    found = interpret(
        graph,
        dict(model.named_parameters()),
        {key: value.clone() for key, value in model.named_buffers()},
        {item.name: value for item, value in zip(graph.inputs, values, strict=True)},
        5,
    )
    assert torch.equal(found.loss, run.loss) and found.saved_bytes == run.saved_bytes
    assert found.gradients.keys() == run.gradients.keys() and found.buffers.keys() == run.buffers.keys()
    for mine, real in ((found.gradients, run.gradients), (found.buffers, run.buffers)):
        for key, value in real.items():
            assert torch.equal(mine[key], value), key


# -- spoiled graphs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFile, Graph]:
    """The toy GPT with dropout as a CPU runs it."""
    model_file = open_model(GPT, gpt_args(dropout=0.2))
    with without_onednn():
        return model_file, trace_file(model_file, micro_batch=BATCH, precision="fp32", semantics=CPU)


def refusal(gpt: tuple[ModelFile, Graph], graph: Graph) -> InputError:
    with pytest.raises(InputError) as caught, without_onednn():
        hold(gpt[0], graph, micro_batch=BATCH, precision="fp32")
    assert caught.value.code == "proof"
    return caught.value


def pick(graph: Graph, name: str, module: str, phase: Phase = Phase.FORWARD) -> Op:
    return next(op for op in graph.ops if op.name == name and op.module == module and op.phase is phase)


def with_op(graph: Graph, op: Op) -> Graph:
    return replace(graph, ops=(*graph.ops[: op.id], op, *graph.ops[op.id + 1 :]))


def line_of(code: str) -> int:
    return next(number for number, line in enumerate(Path(GPT).read_text().splitlines(), 1) if code in line)


def test_the_graph_itself_holds(gpt: tuple[ModelFile, Graph]) -> None:
    with without_onednn():
        hold(gpt[0], gpt[1], micro_batch=BATCH, precision="fp32")


def test_a_wrong_number_is_refused(gpt: tuple[ModelFile, Graph]) -> None:
    op = pick(gpt[1], "native_layer_norm", "h.1.ln_2")
    error = refusal(gpt, with_op(gpt[1], replace(op, args=(*op.args[:-1], 1e-3))))
    assert f"operator {op.id} (aten.native_layer_norm.default, forward)" in error.message
    assert error.where == f"gpt.py:{line_of('return x + self.drop_2')}, module 'h.1.ln_2'"


def test_a_wrong_tensor_is_refused(gpt: tuple[ModelFile, Graph]) -> None:
    graph = gpt[1]
    op = pick(graph, "native_layer_norm", "h.1.ln_2")
    other = pick(graph, "native_layer_norm", "h.0.ln_2")
    assert op.args[2] != other.args[2]
    error = refusal(gpt, with_op(graph, replace(op, args=(*op.args[:2], other.args[2], *op.args[3:]))))  # another block's weight
    assert f"operator {op.id} " in error.message and "computes other values in result 0" in error.message


def test_a_wrong_tensor_in_the_backward_is_refused(gpt: tuple[ModelFile, Graph]) -> None:
    graph = gpt[1]
    ops = [op for op in graph.ops if op.name == "gelu_backward"]
    wrong = replace(ops[0], args=(ops[0].args[0], ops[1].args[1]))
    error = refusal(gpt, with_op(graph, wrong))
    assert f"operator {wrong.id} (aten.gelu_backward.default, backward)" in error.message and "module 'h.1.mlp'" in str(error.where)


def renumbered(graph: Graph, order: list[int]) -> Graph:
    """The graph with these ops in this order."""
    new = {old: index for index, old in enumerate(order)}
    ops = (replace(graph.ops[old], id=index, forward_op=new.get(graph.ops[old].forward_op, -1)) for index, old in enumerate(order))
    return replace(graph, ops=tuple(ops))


def test_a_dropped_op_is_refused(gpt: tuple[ModelFile, Graph]) -> None:
    graph = gpt[1]
    op = pick(graph, "gelu", "h.0.mlp")
    error = refusal(gpt, renumbered(graph, [o.id for o in graph.ops if o is not op]))
    assert f"operator {op.id} is really aten.gelu.default (forward)" in error.message
    assert error.where == f"gpt.py:{line_of('return self.c_proj(F.gelu')}, module 'h.0.mlp'"


def test_swapped_ops_are_refused(gpt: tuple[ModelFile, Graph]) -> None:
    graph = gpt[1]
    op = pick(graph, "gelu", "h.0.mlp")
    order = list(range(len(graph.ops)))
    order[op.id], order[op.id + 1] = op.id + 1, op.id
    assert graph.ops[op.id + 1].target != op.target
    assert f"operator {op.id} is really aten.gelu.default" in refusal(gpt, renumbered(graph, order)).message


def test_swapped_draws_are_refused(gpt: tuple[ModelFile, Graph]) -> None:
    """Two equal operators that draw: only the values tell."""
    graph = gpt[1]
    op = pick(graph, "bernoulli_", "h.0.drop_1")
    error = refusal(gpt, with_op(graph, replace(op, args=(op.args[0], 0.5))))
    # the draw is written where nothing was before; its first reader shows it
    assert "module 'h.0.drop_1'" in str(error.where)


def test_a_wrong_alias_is_refused(gpt: tuple[ModelFile, Graph]) -> None:
    graph = gpt[1]
    op = pick(graph, "gelu", "h.0.mlp")
    source = next(arg.tensor for arg in op.args if isinstance(arg, Ref))
    tensors = list(graph.tensors)
    tensors[op.outputs[0]] = replace(tensors[op.outputs[0]], storage=tensors[source].storage)
    error = refusal(gpt, replace(graph, tensors=tuple(tensors)))
    assert f"operator {op.id} (aten.gelu.default" in error.message and "expected a view" in error.message


def test_a_view_said_to_be_a_copy_is_refused(gpt: tuple[ModelFile, Graph]) -> None:
    graph = gpt[1]
    op = next(op for op in graph.ops if op.view and op.name == "view" and op.module == "h.0.attn.c_attn")
    storage = graph.tensors[op.outputs[0]].storage
    storages = (*graph.storages, replace(graph.storages[storage], id=len(graph.storages), kind=Kind.COMPUTED))
    tensors = list(graph.tensors)
    tensors[op.outputs[0]] = replace(tensors[op.outputs[0]], storage=len(graph.storages))
    error = refusal(gpt, replace(graph, tensors=tuple(tensors), storages=storages))
    assert f"operator {op.id} (aten.view.default" in error.message and "expected new memory" in error.message


def test_wrong_saves_are_refused(gpt: tuple[ModelFile, Graph]) -> None:
    graph = gpt[1]
    kept = graph.tensors[pick(graph, "gelu", "h.0.mlp").outputs[0]].storage
    assert graph.storages[kept].saved
    storages = tuple(replace(s, saved=s.saved and s.id != kept) for s in graph.storages)
    error = refusal(gpt, replace(graph, storages=storages))
    assert "(aten.gelu.default" in error.message and "not recorded as saved" in error.message
    freed = graph.tensors[pick(graph, "embedding", "wpe").outputs[0]].storage
    storages = tuple(replace(s, saved=s.saved or s.id == freed) for s in graph.storages)
    error = refusal(gpt, replace(graph, storages=storages))
    assert "(aten.embedding.default" in error.message and "freed" in error.message


def test_a_wrong_lifetime_is_refused(gpt: tuple[ModelFile, Graph]) -> None:
    graph = gpt[1]
    peak = step_peak(graph)
    early = next(s for s in graph.storages if s.kind is Kind.COMPUTED and 0 <= s.born < s.dies < peak.op and s.bytes > 64)
    storages = tuple(replace(s, dies=len(graph.ops) - 1) if s is early else s for s in graph.storages)
    error = refusal(gpt, replace(graph, storages=storages))
    assert f"{peak.bytes + early.bytes} bytes live at the peak, expected {peak.bytes}" in error.message


def test_a_missing_contribution_is_refused(gpt: tuple[ModelFile, Graph]) -> None:
    graph = gpt[1]
    two = [c for c in graph.contributions if c.parameter == "wte.weight"]
    assert len(two) == 2
    assert "'wte.weight'" in refusal(gpt, replace(graph, contributions=tuple(c for c in graph.contributions if c is not two[0]))).message


# -- models that cannot be planned ------------------------------------------------------------------------------------------------

_NET = """
import random

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        x = self.a(x)
        {line}
        return self.b(x).square().mean()

def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 4),)
"""

LIARS: dict[str, tuple[str, str, Callable[[InputError], bool]]] = {
    "python state chooses operators": (
        "self.calls += 1; x = torch.tanh(x) if self.calls % 2 else torch.relu(x)",
        "aten.relu.default",
        lambda e: "second time" in e.message,
    ),
    "python state changes values": (
        "self.calls += 1; x = x * float(self.calls)",
        "aten.mul.Tensor",
        lambda e: "second time" in e.message,
    ),
    "fake tensors are treated apart": (
        "x = torch.tanh(x) if type(x).__name__ == 'FakeTensor' else torch.sigmoid(x)",
        "aten.sigmoid.default",
        lambda e: "is really" in e.message,
    ),
    "python's random numbers, drawn only where no trace sees it": (
        "x = torch.tanh(x) if type(x).__name__ == 'FakeTensor' or random.random() < 2 else torch.sigmoid(x)",
        "Python's",
        lambda e: "torch" in str(e.hint),
    ),
    "a buffer is replaced": (
        "self.average = self.average * 0.9 + x.detach().mean(0) * 0.1",
        "average",
        lambda e: "in place" in str(e.hint),
    ),
}


@pytest.mark.parametrize("kind", LIARS)
def test_a_model_that_does_not_repeat_itself_is_refused(tmp_path: Path, kind: str) -> None:
    line, words, more = LIARS[kind]
    with pytest.raises(InputError) as caught:
        proven(write_model(tmp_path, _NET.format(line=line)))
    error = caught.value
    assert error.code == "proof" and words in error.message and more(error), error
    expected = "average" if kind == "a buffer is replaced" else "model.py:16"
    assert expected in str(error.where)


WORLDLY = {  # top, constructor, line of the forward
    "a literal of the file and a view of it": ("G = torch.arange(4.0)", "pass", "x = (x * G.view(2, 2).flatten()).sin() * G[:2].repeat(2)"),
    "a literal of the file that is a view": ("G = torch.arange(8.0).view(2, 4).t()", "pass", "x = (x * G[:4, 0]).sin() @ G @ G.t()"),
    "a hook reads a literal": ("G = torch.arange(4.0)", "self.b.weight.register_hook(lambda g: g * G)", "x = x.sin()"),
    "a hook adds up, as the engine does": ("", "self.b.weight.register_hook(lambda g: g + g)", "x = self.b(x) + x"),
    "a hook writes": ("", "self.b.weight.register_hook(lambda g: g.clone().mul_(2) + g)", "x = self.b(x).sin()"),
    "kernels that leave their workspace": (
        "", "self.m = nn.EmbeddingBag(9, 4)", "x = x * self.m(torch.arange(6).view(2, 3)).sum() + F.unfold(x.view(1, 1, -1, 4), 2).mean()"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WORLDLY)
def test_what_is_there_before_the_step_and_what_hooks_do_is_proven(tmp_path: Path, kind: str) -> None:
    top, init, line = WORLDLY[kind]
    body = _NET.format(line=line).replace("self.calls = 0", init)
    assert proven(write_model(tmp_path, f"{top}\n{body}")).verdict is Verdict.PROVEN


def test_python_s_generator_is_left_as_it_was(tmp_path: Path) -> None:
    import random

    before = random.getstate(), torch.get_rng_state()
    proven(write_model(tmp_path, _NET.format(line="x = F.dropout(x, 0.5)")))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_what_runs_on_fakes_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        proven(write_model(tmp_path, _NET.format(line="x = x + F.embedding(torch.full_like(x[:, 0], 9, dtype=torch.long), self.b.weight)")))
    assert caught.value.code == "proof" and "IndexError" in caught.value.message and caught.value.where == "model.py:16"


# -- what is too large to run -----------------------------------------------------------------------------------------------------


def test_a_large_model_is_proven_by_its_twin_or_not_at_all(tmp_path: Path) -> None:
    body = """
    def build_model(width=20000):
        return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width))

    def example_inputs(batch=1, width=20000):
        return (torch.randn(batch, width),)

    def loss(out):
        return out.square().mean()
    """
    path = write_model(tmp_path, body)
    assert proven(path).verdict is Verdict.PROVEN
    path = write_model(tmp_path, body.replace("20000", "20000000"))
    found = proven(path)
    assert found.verdict is Verdict.NOT_PROVEN and "bytes" in found.why and "twin()" in found.why
    path = write_model(tmp_path, body.replace("20000", "20000000") + "\n    def twin():\n        return dict(width=8)\n")
    found = proven(path)
    assert found.verdict is Verdict.TWIN and "4 gradients" in found.why
    path = write_model(tmp_path, body.replace("20000", "20000000") + "\n    def twin():\n        return dict(width=20000001)\n")
    assert proven(path).verdict is Verdict.NOT_PROVEN
    path = write_model(tmp_path, body.replace("20000", "20000000") + "\n    def twin():\n        return [3]\n")
    with pytest.raises(InputError, match="twin returned list"):
        proven(path)


def test_the_command_proves_before_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write_model(tmp_path, _NET.format(line="x = torch.relu(x)")), str(tmp_path / "graph.json")

    def document(*arguments: str) -> dict[str, Any]:
        run([*arguments, "--json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    plan = [path, "--gpus", "1", "--precision", "fp32", "--dry-run", "--schedule-only"]
    proven_words = {"verdict": "proven", "why": "27 operators, loss and 4 gradients bit-equal to a real run"}
    assert document("trace", path, "-o", out, "--precision", "fp32")["proof"] == proven_words
    assert document(*plan)["proof"] == proven_words
    assert document(*plan, "--no-prove")["proof"] == {"verdict": "not proven", "why": "--no-prove"}
    assert document(out, "--gpus", "1", "--dry-run")["proof"]["verdict"] == "not proven"
    liar = write_model(tmp_path, _NET.format(line="self.calls += 1; x = x * float(self.calls)"))
    before = Path(out).read_text()
    found = document("trace", liar, "-o", out)
    assert (found["status"], found["code"]) == ("error", "proof") and Path(out).read_text() == before
    assert document("trace", liar, "-o", out, "--no-prove")["proof"]["verdict"] == "not proven"


def test_the_views_differ_only_where_they_may(tmp_path: Path) -> None:
    path = write_model(tmp_path, _NET.format(line="x = F.dropout(x, 0.5)"))
    cuda, cpu = (trace(path, model_args={}, micro_batch=BATCH, precision="fp32", semantics=view) for view in (CUDA, CPU))
    assert [op.target for op in cuda.ops] != [op.target for op in cpu.ops]
    check_substitutions(cuda, cpu)
    op = next(op for op in cuda.ops if op.name == "addmm" and op.module == "b")
    with pytest.raises(InputError, match="more than dropout") as caught:
        check_substitutions(with_op(cuda, replace(op, target="aten.relu.default")), cpu)
    assert caught.value.where == "model.py:17, module 'b'"
