"""The fence around the user's file, and what we say when the file is not what we need."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpress.errors import InputError
from mpress.trace.model_file import load, parse_value
from mpress.trace.record import trace
from tiny_models import write_model

NET = """
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x):
        {body}

def build_model(**kw):
    return Net(**kw)

def example_inputs(batch=1, width=4):
    return (torch.randn(batch, width),)

def loss(out):
    return out.square().mean()
"""


def _net(folder: Path, body: str = "return self.a(x)", extra: str = "") -> str:
    return write_model(folder, NET.format(body=body) + extra)


def _refusal(path: str, **model_args: str) -> InputError:
    with pytest.raises(InputError) as caught:
        trace(path, model_args=model_args, micro_batch=2, precision="fp32")
    return caught.value


def test_prints_never_reach_stdout_and_main_never_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    noise = """
import logging, sys
print("at import", sys.argv)
logging.basicConfig(stream=sys.stdout, level=logging.INFO, force=True)
if __name__ == "__main__":
    raise SystemExit("training")
"""
    argv, path = list(sys.argv), list(sys.path)
    file = _net(tmp_path, 'print("in forward"); import logging; logging.info("logged"); return self.a(x)', noise)
    trace(file, model_args={}, micro_batch=1, precision="fp32")
    out, err = capfd.readouterr()
    assert out == ""
    assert "at import" in err and "model.py" in err and "in forward" in err
    assert (sys.argv, sys.path) == (argv, path)
    assert [item.name for item in tmp_path.iterdir()] == ["model.py"]  # no __pycache__ beside the user's files


def test_model_arguments_reach_factory_and_inputs(tmp_path: Path) -> None:
    graph = trace(_net(tmp_path), model_args={"width": "6"}, micro_batch=3, precision="fp32")
    assert graph.tensors[graph.inputs[0].tensor].shape == (3, 6)
    assert [p.elements for p in graph.parameters] == [36, 6]
    error = _refusal(_net(tmp_path), depth="3")
    assert error.code == "model-file" and "depth" in error.message


def test_another_factory(tmp_path: Path) -> None:
    file = _net(tmp_path, extra="def wide():\n    return Net(4).double()\n")
    assert load(f"{file}:wide", {}).factory_name == "wide"
    error = _refusal(f"{file}:missing")
    assert error.code == "model-file" and "'missing'" in error.message and "Net" in error.message and "def build_model" in error.hint


def test_unknown_argument_of_a_closed_factory(tmp_path: Path) -> None:
    error = _refusal(_net(tmp_path, extra="def closed(width=4):\n    return Net(width)\n") + ":closed", wdith="4")
    assert error.code == "model-arg" and "--model-arg" in error.message and "wdith" in error.message and "width" in error.hint


def test_missing_file_and_functions(tmp_path: Path) -> None:
    assert "no file" in _refusal(str(tmp_path / "nothing.py")).message
    error = _refusal(write_model(tmp_path, "class Mine(nn.Module):\n    pass\n"))
    assert error.code == "model-file" and "Mine" in error.message and "Mine(**kw)" in error.hint
    broken = _refusal(write_model(tmp_path, "raise RuntimeError('boom')\n"))
    assert broken.where == "model.py:4" and "boom" in broken.message


@pytest.mark.parametrize(("text", "value"), [("4", 4), ("0.5", 0.5), ("true", True), ("False", False), ("gelu", "gelu")])
def test_values(text: str, value: object) -> None:
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("y = self.a(x); return y if y.sum() > 0 else x", "data-dependent", "y.sum() > 0"),
        ("y = self.a(x); return y[y[:, 0] > 0]", "data-dependent", "y[:, 0]"),
        ("return self.a(x) @ x", "trace", "@ x"),
        ("return self.a(x.to('cuda'))", "device", "to('cuda')"),
        ("return self.a(x) + torch.tensor([1.0] * 5000)[:4]", "constant", "torch.tensor"),
        ("return x.square()", "no-gradient", ""),
        ("return self.a(x).detach()", "no-gradient", ""),
    ],
)
def test_refusals_name_the_line(tmp_path: Path, body: str, code: str, line: str) -> None:
    error = _refusal(_net(tmp_path, body))
    assert error.code == code, error.message
    if line:
        assert line in error.message
        assert error.where == "model.py:11"
    assert error.hint


def test_a_checkpoint_that_repeats_something_else_is_refused(tmp_path: Path) -> None:
    body = """calls = []
        def region(y):
            calls.append(1)
            return torch.tanh(self.a(y) * (1.0 if len(calls) == 1 else 2.0))
        from torch.utils.checkpoint import checkpoint
        return checkpoint(region, x, use_reentrant=False).sin()"""
    error = _refusal(_net(tmp_path, body))
    assert error.code == "activation-checkpoint" and "aten.mul.Tensor" in error.message and error.where == "model.py:14"


def test_errors_of_the_model_leave_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _refusal(_net(tmp_path, "return self.a(x) @ x")).code == "trace"
    assert capfd.readouterr().err == ""


def test_unused_parameter_is_named(tmp_path: Path) -> None:
    error = _refusal(_net(tmp_path, "return F.linear(x, self.a.weight)"))
    assert error.code == "no-gradient" and error.where == "a.bias"


def test_an_input_that_hides_tensors_is_refused(tmp_path: Path) -> None:
    """Its tensors would become constants, and every micro-batch would train on the example's values."""
    body = """
from dataclasses import dataclass

@dataclass
class Batch:
    x: torch.Tensor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, batch):
        return self.f(batch.x).square().mean()

def build_model():
    return Net()

def example_inputs(batch=1):
    return (Batch(torch.randn(batch, 4)),)
"""
    with pytest.raises(InputError) as caught:
        trace(write_model(tmp_path, body), model_args={}, micro_batch=2, precision="fp32")
    assert caught.value.code == "model-file" and "Batch" in caught.value.message and "dict" in caught.value.hint
