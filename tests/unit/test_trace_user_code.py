"""What people's code does in a step, held against real runs: nested checkpoints, custom functions, hooks, literals, known values.

Each model is proven (its graph interpreted on real tensors equals its own run); its saved bytes and peak equal the measured ones.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mpress.emit.expressions import Expressions
from mpress.errors import InputError
from mpress.graph import Graph, Kind, Phase
from mpress.options import View
from mpress.peak import step_peak
from mpress.trace.proof import Verdict, prove
from mpress.trace.record import open_model, trace, trace_file
from mpress.trace.semantics import Semantics
from real_run import load_case, real_run
from tiny_models import write_model

BATCH = 2
CPU = Semantics(view=View.CPU)
MODEL = """
from torch.utils.checkpoint import checkpoint
import numpy as np
{top}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        {init}

    def forward(self, x):
        {body}

def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 4),)

def loss(out):
    return out.square().mean()
"""
RERUN = """
class Rerun(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w)

    @staticmethod
    def backward(ctx, g):
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.tanh(x @ w)
        return torch.autograd.grad(y, (x, w), g)

rerun = Rerun.apply
"""
MARKED = """
from torch.autograd.function import once_differentiable

class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, nothing=None):
        top = x.argmax(-1)
        ctx.mark_non_differentiable(top)
        ctx.scale = scale
        return x * scale, top

    @staticmethod
    @once_differentiable
    def backward(ctx, g, _top):
        return g * ctx.scale, None, None
"""
INNER = "inner = lambda y: torch.tanh(self.b(y).sin())"
MODELS: dict[str, tuple[str, str, str]] = {
    "nested checkpoints": (
        "", "pass",
        f"{INNER}\n        outer = lambda y: checkpoint(inner, torch.sigmoid(self.a(y)), use_reentrant=False).cos()\n"
        "        return checkpoint(outer, x, use_reentrant=False)",
    ),
    "nested reentrant checkpoints": (
        "", "pass",
        f"{INNER}\n        h = self.a(x)\n"
        "        outer = lambda y: checkpoint(inner, torch.sigmoid(y), use_reentrant=True).cos()\n"
        "        return checkpoint(outer, h, use_reentrant=True) + self.b(x)",
    ),
    "checkpoint without early stop": (
        "", "pass", "return checkpoint(lambda y: torch.tanh(self.b(self.a(y))) * 2.0, x, use_reentrant=False, early_stop=False)",
    ),
    "rerun by hand": (RERUN, "pass", "return rerun(self.a(x), self.b.weight) + self.b(x)"),
    "marked results": (MARKED, "pass", "y, top = Marked.apply(self.a(x), 0.5)\n        return self.b(y) + top[:, None]"),
    "hook of a parameter": ("", "self.a.weight.register_hook(lambda g: g * 2)", "return self.b(self.a(x))"),
    "a literal of the file": ("G = torch.tensor([1.0, 2.0, 3.0, 4.0])", "pass", "return self.b(self.a(x) * G)"),
    "two literals of the file": (
        "G, H = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(4)", "pass",
        "return self.b((self.a(x) * G + H).sin()) * torch.where(G > 2, H, G)",
    ),
    "a literal of numpy": ("", "pass", "return self.b(self.a(x) * torch.from_numpy(np.arange(4, dtype=np.float32)))"),
    "a complex literal": ("", "pass", "return self.b(self.a(x) * (torch.tensor([1j, 2 + 1j, 3.0, 4.0]) * torch.tensor(2j)).real)"),
    "a known branch": ("", "pass", "m = torch.arange(4) > 1\n        return self.b(self.a(x)[:, m].repeat(1, 2)) if m.any() else x"),
    "inference inside": ("", "pass", "with torch.inference_mode():\n            self.b(x).sum()\n        return self.b(self.a(x)).tanh()"),
    "a branch nobody differentiates": ("", "pass", "y = self.a(x)\n        self.b(y).exp().sin()\n        return self.b(y)"),
    "an output taken apart": ("", "pass", "top, where = torch.stack(self.a(x).unbind(1), 1).max(1)\n"
        "        return self.b(x) + top[:, None] * where[:, None]"),
}  # fmt: skip


def model(folder: Path, name: str) -> str:
    top, init, body = MODELS[name]
    return write_model(folder, MODEL.format(top=top, init=init, body=body))


def traced(path: str) -> Graph:
    return trace(path, model_args={}, micro_batch=BATCH, precision="fp32", semantics=CPU)


def refusal(folder: Path, body: str, top: str = "", init: str = "pass") -> InputError:
    with pytest.raises(InputError) as caught:
        traced(write_model(folder, MODEL.format(top=top, init=init, body=body)))
    return caught.value


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # a reentrant checkpoint inside another
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_what_the_user_s_step_does(tmp_path: Path, name: str) -> None:
    path = model(tmp_path, name)
    graph = traced(path)
    build, inputs, loss = load_case(path)
    run = real_run(build, inputs(BATCH), loss)
    last = graph.tensors[graph.loss].storage
    assert sum(s.bytes for s in graph.storages if s.saved and s.kind is Kind.COMPUTED and s.id != last) == run.saved_bytes
    assert step_peak(graph).bytes == run.peak_bytes
    for phase in Phase:
        mine, real = [op.target for op in graph.ops if op.phase is phase], list(run.sequence(backward=phase is Phase.BACKWARD))
        real = [target for target in real if target != "aten._local_scalar_dense.default"]  # gives a Python number, which the trace has
        if "literal" in name:  # one that exists before the step is an operator of the graph only
            mine = [target for target in mine if target != "mpress.literal.default"]
            real = [target for target in real if target != "aten.lift_fresh.default"]
        if name == "hook of a parameter":  # real_run leaves out all that runs where a gradient arrives
            mine = mine[::-1]
            mine.remove("aten.mul.Tensor") if phase is Phase.BACKWARD else None
            mine = mine[::-1]
        assert mine == real
    model_file = open_model(path, {})
    again = trace_file(model_file, micro_batch=BATCH, precision="fp32", semantics=CPU)
    assert prove(model_file, again, micro_batch=BATCH, precision="fp32", semantics=CPU).verdict is Verdict.PROVEN


def test_what_a_checkpoint_repeats_says_so(tmp_path: Path) -> None:
    body = "return checkpoint(lambda y: torch.tanh(self.drop(self.b(y))), self.a(x), use_reentrant=False).sin()"
    graph = traced(write_model(tmp_path, MODEL.format(top="", init="pass", body=body)))
    again = [op for op in graph.ops if op.repeats >= 0]
    assert graph.checkpoints == 1 and len(again) > 2
    for op in again:
        first = graph.ops[op.repeats]
        assert op.phase is Phase.BACKWARD and first.phase is Phase.FORWARD and op.forward_op == -1
        assert (op.target, op.module, op.source, op.random_key) == (first.target, first.module, first.source, first.random_key)
    assert [op.random_key for op in again if op.random_key] == ["drop#0"]
    repeated = {op.id for op in again}
    for op in graph.ops:
        assert op.forward_op not in repeated
        assert op.forward_op == -1 or graph.ops[op.forward_op].phase is Phase.FORWARD


def test_custom_functions_are_atoms(tmp_path: Path) -> None:
    graph = traced(model(tmp_path, "rerun by hand"))
    inside = [op for op in graph.ops if op.atom == "Rerun"]
    assert {op.phase for op in inside} == {Phase.FORWARD, Phase.BACKWARD}
    assert [op.target for op in inside if op.phase is Phase.FORWARD] == ["aten.mm.default", "aten.tanh.default"]
    assert all(op.forward_op == inside[0].id for op in inside if op.phase is Phase.BACKWARD)


def test_values_of_inputs_are_assumptions_and_constants_are_not(tmp_path: Path) -> None:
    graph = traced(write_model(tmp_path, MODEL.format(top="", init="pass", body="return self.b(self.a(x)) * (1 if x.sum() > -1e9 else 2)")))
    (line,) = graph.assumptions
    assert line.startswith("model.py:16 reads values of the example input 'x'") and "x.sum() > -1e9" in line
    assert traced(model(tmp_path, "a known branch")).assumptions == ()


def test_a_known_value_that_is_overwritten_is_unknown(tmp_path: Path) -> None:
    known = "m = torch.zeros(4); m.view(2, 2)[0] += 1; return self.b(self.a(x)) * m.sum().item()"
    (scale,) = {
        op.args[1] for op in traced(write_model(tmp_path, MODEL.format(top="", init="pass", body=known))).ops if op.args[1:] == (2.0,)
    }
    assert scale == 2.0
    for spoilt in ("m.copy_(self.a(x)[0])", "m.uniform_()", "m[0] = self.a(x)[0, 0]"):
        error = refusal(tmp_path, f"m = torch.zeros(4); {spoilt}; return self.b(x) * m.sum().item()")
        assert error.code == "data-dependent" and "'Net'" in error.message and error.where == "model.py:16"


@pytest.mark.parametrize(
    ("body", "top", "init", "code", "words"),
    [
        ("return self.b(self.a(x) * self.t)", "", "self.t = torch.randn(4)", "constant", "register_buffer"),
        ("return self.b(self.a(x) + G)", "G = torch.ones(5000)[:4]; G = torch.ones(5000)", "pass", "constant", "5000"),
        ("G.add_(1); return self.b(self.a(x) + G)", "G = torch.ones(4)", "pass", "constant", "written in place"),
        ("return self.b(self.a(x))", "", "self.b = torch.compile(self.b)", "trace", "torch.compile"),
        ("return self.b(self.a(x))", "", "self.b = torch.jit.script(nn.Linear(4, 4))", "trace", "torch.jit.script"),
        ("raise SystemExit(3)", "", "pass", "trace", "ends the program"),
        ("raise MemoryError()", "", "pass", "host-memory", "not enough memory"),
        ("return self.b(x) * float(self.a(x).detach().numpy().sum())", "", "pass", "data-dependent", "numpy"),
        ("return self.b(self.a(x))", "", "self.a.weight.register_post_accumulate_grad_hook(lambda p: None)", "trace", "a.weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_what_cannot_be_traced_is_refused_clearly(tmp_path: Path, body: str, top: str, init: str, code: str, words: str) -> None:
    error = refusal(tmp_path, body, top, init)
    assert error.code == code and words in f"{error.message} {error.hint}" and error.hint and "None" not in error.where
    assert len(f"{error.message}\n{error.hint}".splitlines()) < 10


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = Path(model(tmp_path, "a known branch"))
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(InputError) as caught:
        traced(str(path))
    assert (caught.value.code, caught.value.where) == ("model-file", "model.py")


STATE = """
import os, logging, warnings, random, numpy, sibling
os.environ["MPRESS_PROBE"] = "1"
torch.set_default_dtype(torch.float64); torch.use_deterministic_algorithms(True); torch.set_grad_enabled(False)
warnings.simplefilter("ignore"); logging.getLogger().addHandler(logging.NullHandler()); logging.getLogger().setLevel(1)
random.random(); numpy.random.rand(); torch.rand(1); sys_path = __import__("sys").path; sys_path.append("/nowhere")
"""


def snapshot() -> dict[str, Any]:
    return {
        "environment": dict(os.environ), "dtype": torch.get_default_dtype(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(), "gradients": torch.is_grad_enabled(), "filters": list(warnings.filters),
        "handlers": list(logging.getLogger().handlers), "level": logging.getLogger().level, "python": random.getstate(),
        "numpy": str(numpy.random.get_state()), "torch": torch.get_rng_state().tolist(), "path": list(sys.path), "argv": list(sys.argv),
        "mkldnn": torch._C._get_mkldnn_enabled(), "compile": torch.compile, "directory": str(Path.cwd()),
        "own modules": {name for name in sys.modules if name.startswith(("mpress_user_model", "sibling"))},
    }  # fmt: skip


def test_nothing_of_the_process_is_changed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sibling.py").write_text("VALUE = 1\n")
    body = 'import os; os.write(1, b"raw\\n"); import sibling; assert sibling.VALUE; return self.b(self.a(x))'
    path = write_model(tmp_path, MODEL.format(top=STATE, init="pass", body=body))
    before = snapshot()
    graph = traced(path)
    after = snapshot()
    assert {key for key in before if before[key] != after[key]} == set()
    assert graph.tensors[graph.parameters[0].tensor].dtype == "float32"
    out, err = capfd.readouterr()
    assert out == "" and err.count("raw") == 1


def test_the_user_s_module_is_left_as_it_was(tmp_path: Path) -> None:
    top = "MADE = []"
    body = "self.calls = getattr(self, 'calls', 0) + 1; self.last = y = self.a(x); return self.b(y)"
    path = write_model(tmp_path, MODEL.format(top=top, init="self.eval(); MADE.append(self)", body=body))
    model_file = open_model(path, {})
    trace_file(model_file, micro_batch=BATCH, precision="fp32", semantics=CPU)
    (net,) = model_file.factory.__globals__["MADE"]
    assert not hasattr(net, "calls") and not hasattr(net, "last")
    assert all(type(p) is torch.nn.Parameter and p.is_meta and p.grad is None for p in net.parameters())


def test_a_complex_literal_is_emitted_as_what_it_is(tmp_path: Path) -> None:
    graph = traced(model(tmp_path, "a complex literal"))
    texts = [Expressions.__new__(Expressions)._literal(op) for op in graph.ops if op.target == "mpress.literal.default"]
    first, second = (eval(text, {"torch": torch, "c": torch.ones(())}) for text in texts)
    assert torch.equal(first, torch.tensor([1j, 2 + 1j, 3.0, 4.0])) and torch.equal(second, torch.tensor(2j))
    assert (first.dtype, second.dtype) == (torch.complex64, torch.complex64)
