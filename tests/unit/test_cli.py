"""The command line: exit codes, streams, refusals.  The driver is replaced where a plan would only take time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpress.driver
from graph_example import broken, example
from made_report import report
from mpress.driver import Outcome, file_names
from mpress.errors import BrokenPlanError, InfeasibleError, InputError
from mpress.intake import Progress
from mpress.options import Options
from mpress.plan import ScheduleKind
from mpress_cli.app import run
from tiny_models import gpt_args, write_model

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "gpt.py")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """A driver that plans nothing and remembers what it was asked."""
    asked: list[Options] = []

    def plan_model(options: Options, on_step: Progress) -> Outcome:
        asked.append(options)
        on_step("trace", None, "")
        on_step("trace", 1.25, "12 operators")
        files = () if options.dry_run else file_names(options.model)
        return Outcome(report(), files, (("trace_seconds", 1.25), ("solve_seconds", 2.0), ("emit_seconds", 0.1)))

    monkeypatch.setattr(mpress.driver, "plan_model", plan_model)
    return asked


def refuse_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def plan_model(options: Options, on_step: Progress) -> Outcome:
        raise error

    monkeypatch.setattr(mpress.driver, "plan_model", plan_model)


def test_help_needs_neither_torch_nor_a_solver() -> None:
    code = (
        "import sys; from mpress_cli.app import run; code = run(['--help']); "
        "print(code, [m for m in ('torch', 'ortools', 'mpress.driver', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 []"
    for flag in (
        "--gpus",
        "--machine",
        "--model-arg",
        "--json",
        "--dry-run",
        "--dump-fx",
        "--work-limit",
        "--schedule-only",
        "mpress-plan trace",
        "Exit codes",
    ):
        assert flag in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"mpress-plan {mpress.__version__}\n"


def test_options_reach_the_driver(seen: list[Options], tmp_path: Path) -> None:
    line = "m.py:make --gpus 4 --schedule gpipe --precision fp16 --optimizer sgd-momentum --gap 0.02 --model-arg a=1 --model-arg b=x=y"
    assert run([*line.split(), "--out", str(tmp_path)]) == 0
    (options,) = seen
    assert (options.model, options.gpus, options.schedule, options.out) == ("m.py:make", 4, ScheduleKind.GPIPE, tmp_path)
    assert (options.recording.precision.value, options.optimizer.value, options.gap) == ("fp16", "sgd-momentum", 0.02)
    assert options.model_args == (("a", "1"), ("b", "x=y"))
    assert (options.micro_batch, options.recording.micro_batch, options.micro_batches, options.reserve) == (None, 1, 32, 0.05)
    assert not options.schedule_only


def test_data_on_stdout_talk_on_stderr(seen: list[Options], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["m.py", "--gpus", "8"]) == 0
    said = capsys.readouterr()
    assert "Peak memory per GPU" in said.out and "12 operators" not in said.out
    assert "trace" in said.err and "1.2 s" in said.err and "12 operators" in said.err and "Peak" not in said.err


def test_json_is_exactly_one_document(seen: list[Options], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["m.py", "--gpus", "8", "--json", "--dry-run"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "within_gap" and document["files"] == []


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (InfeasibleError("no-plan", "no plan fits", "stage 0", "use more GPUs"), 1),
        (InputError("no-file", "'m.py' does not exist", "m.py", "check the path"), 2),
        (BrokenPlanError("over-capacity", "stage 0 needs 40 GiB", "stage 0", "report it"), 3),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: InputError, exit_code: int) -> None:
    refuse_with(monkeypatch, error)
    assert run(["m.py", "--gpus", "8"]) == exit_code
    said = capsys.readouterr()
    assert said.out == ""
    for words in (error.code, error.message, error.where, error.hint):
        assert words in said.err
    assert "Traceback" not in said.err and len(said.err.splitlines()) < 24
    assert run(["m.py", "--gpus", "8", "--json"]) == exit_code
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "schema_version": 1,
        "status": "error",
        "code": error.code,
        "message": error.message,
        "where": error.where,
        "hint": error.hint,
    }


def test_a_bug_is_ours_and_shows_its_traceback_only_when_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refuse_with(monkeypatch, ZeroDivisionError("division by zero"))
    assert run(["m.py", "--gpus", "8"]) == 3
    said = capsys.readouterr().err
    assert "internal" in said and "ZeroDivisionError" in said and "--traceback" in said and "Traceback" not in said
    assert run(["m.py", "--gpus", "8", "--traceback"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refuse_with(monkeypatch, KeyboardInterrupt())
    monkeypatch.setattr("mpress_cli.app.signal.signal", lambda *_: None)
    assert run(["m.py", "--gpus", "8", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["code"] == "interrupted"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "m.py",
        "m.py --gpus x",
        "m.py --gpus 8 --schedule zb",
        "m.py --gpus 8 --nonsense",
        "m.py other.py --gpus 8",
        "m.py --gpus 8 --model-arg a",
    ],
)
def test_a_wrong_command_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and "hint" in said.err and "Traceback" not in said.err
    assert run([*line.split(), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "error" and document["code"] in ("usage", "model-arg")


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ("--gpus 0", "--gpus"),
        ("--gpus 8 --reserve 1", "--reserve"),
        ("--gpus 8 --gap nan", "--gap"),
        ("--gpus 8 --micro-batches 0", "--micro-batches"),
        ("--gpus 8 --work-limit -1", "--work-limit"),
        ("--gpus 8 --out no/such/directory", "--out"),
    ],
)
def test_options_are_checked_before_tracing(flags: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([EXAMPLE, *flags.split(), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["where"] == where and document["message"]


def test_an_error_leaves_an_earlier_plan_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "broken.py"
    model.write_text("def build_model():\n    raise ValueError('no')\n\ndef example_inputs(batch=1):\n    return ()\n")
    for name in file_names(str(model)):
        (tmp_path / name).write_text("an earlier plan")
    assert run([str(model), "--gpus", "2", "--out", str(tmp_path), "--json"]) == 2
    assert [(tmp_path / name).read_text() for name in file_names(str(model))] == ["an earlier plan"] * 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "broken.py",
        "broken.schedule.json",
        "broken_mpress.py",
    ]


def test_file_names() -> None:
    assert file_names("models/gpt.py:tiny") == ("gpt_mpress.py", "gpt.schedule.json")
    assert file_names("gpt.py") == ("gpt_mpress.py", "gpt.schedule.json")


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """A tiny model file and the flags that plan it."""
    path = write_model(tmp_path, TWO_LAYERS, "two_layers.py")
    return [path, "--gpus", "2", "--machine", "dgx-a100-40gb", "--micro-batches", "4", "--out", str(tmp_path)]


TWO_LAYERS = """
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()
def build_model(width=8):
    return Net(width)
def example_inputs(batch=1, width=8):
    return {"x": torch.randn(batch, width)}
"""


def said(capsys: pytest.CaptureFixture[str], code: int, arguments: list[str]) -> Any:
    assert run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_traced_graph_plans_as_its_model_does(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = str(tmp_path / "g.json")
    recorded = ["--micro-batch", "3", "--precision", "fp32", "--model-arg", "width=16"]
    traced = said(capsys, 0, ["trace", tiny[0], "-o", graph, *recorded])
    assert (traced["status"], traced["files"], traced["precision"]) == ("traced", [graph], "fp32")
    assert traced["shapes"] == {"micro_batch": 3, "inputs": [{"name": "x", "shape": [3, 16], "dtype": "float32"}]}
    from_graph = said(capsys, 0, [graph, *tiny[1:]])
    assert from_graph["files"] == [str(tmp_path / "g.schedule.json")] and "graph file" in from_graph["no_module"]
    from_model = said(capsys, 0, [*tiny, *recorded])
    assert from_model["no_module"] is None and len(from_model["files"]) == 2
    for same in ("stages", "step_seconds", "schedule", "recipe", "layers", "shapes", "kinds", "model"):
        assert from_graph[same] == from_model[same], same
    assert from_model["layers"] == {"placed": 4, "total": 4}
    schedules = [(tmp_path / name).read_bytes() for name in ("g.schedule.json", "two_layers.schedule.json")]
    assert schedules[0] == schedules[1]
    assert run([graph, *tiny[1:]]) == 0
    assert "no module: planned from a graph file" in capsys.readouterr().out


def test_what_a_graph_file_settles_cannot_be_asked_again(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = str(tmp_path / "two.graph.json")
    assert run(["trace", tiny[0], "--out", graph, "--micro-batch", "2"]) == 0
    capsys.readouterr()
    same = [graph, *tiny[1:], "--dry-run", "--micro-batch", "2", "--precision", "bf16"]
    assert said(capsys, 0, same)["files"] == []
    for flags in (
        "--micro-batch 3",
        "--precision fp16",
        "--model-arg width=9",
        "--attention math",
        "--trace full",
        "--seq-len 8",
        "--dump-fx",
    ):
        document = said(capsys, 2, [graph, *tiny[1:], *flags.split()])
        assert (document["code"], document["where"]) == ("option", flags.split()[0]) and document["hint"]
    document = said(capsys, 2, [graph, "--gpus", "8", "--machine", "dgx1-v100-32gb"])
    assert (document["code"], "fp16" in document["hint"]) == ("precision", True)
    assert said(capsys, 2, ["trace", graph])["code"] == "option"


def test_trace_leaves_an_earlier_file_alone_when_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path, "def build_model():\n    raise ValueError('no')\ndef example_inputs(batch=1):\n    return ()\n")
    before = Path(model).read_text()
    (tmp_path / "g.json").write_text("an earlier graph")
    assert said(capsys, 2, ["trace", model, "-o", str(tmp_path / "g.json")])["code"] == "model-file"
    assert (tmp_path / "g.json").read_text() == "an earlier graph"
    assert said(capsys, 2, ["trace", model, "-o", model])["where"] == "--out"  # not over the model
    assert said(capsys, 2, ["trace", model, "-o", str(tmp_path / "no" / "g.json")])["code"] == "out-dir"
    assert said(capsys, 2, ["trace", model, "--gpus", "8"])["code"] == "usage"
    assert Path(model).read_text() == before


def test_a_refused_graph_file_leaves_an_earlier_plan_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.graph.json"
    bad.write_text(broken("ops.0.args", [{"tensor": 4}]))
    (tmp_path / "bad.schedule.json").write_text("an earlier plan")
    document = said(capsys, 2, [str(bad), "--gpus", "2", "--out", str(tmp_path)])
    assert (document["code"], document["where"]) == ("graph-file", "ops[0].args in bad.graph.json")
    assert (tmp_path / "bad.schedule.json").read_text() == "an earlier plan"
    assert said(capsys, 2, [str(tmp_path / "none.graph.json"), "--gpus", "2"])["code"] == "graph-file"


def test_schedule_only_writes_no_module(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = said(capsys, 0, [*tiny, "--schedule-only"])
    assert document["files"] == [str(tmp_path / "two_layers.schedule.json")] and document["no_module"] == "--schedule-only"
    assert not (tmp_path / "two_layers_mpress.py").exists()


def test_a_precision_the_gpus_lack_is_refused_before_tracing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = said(capsys, 2, [str(tmp_path / "missing.py"), "--gpus", "8", "--machine", "dgx1-v100-32gb", "--precision", "bf16"])
    assert (document["code"], document["where"]) == ("precision", "--precision")


def test_planning_a_graph_file_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "two.graph.json").write_text(example())
    code = (
        "import sys; sys.modules['torch'] = None; from mpress_cli.app import run; "
        "sys.exit(run(['two.graph.json', '--gpus', '2', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(stage["layers"], stage["parameters"]) for stage in document["stages"]] == [("net.0", 16), ("net.1, sum", 16)]
    assert document["shapes"]["inputs"] == [{"name": "x", "shape": [2, 4], "dtype": "float32", "stages": [0]}]


def test_the_help_of_trace_needs_neither_torch_nor_a_solver() -> None:
    code = (
        "import sys; from mpress_cli.app import run; code = run(['trace', '--help']); "
        "print(code, [m for m in ('torch', 'ortools', 'mpress.driver', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "mpress-plan trace [OPTIONS]" in done.stdout and "--out, -o" in done.stdout.replace("-o, --out", "--out, -o")
    assert "--gpus" not in done.stdout.split("Options:")[1]


def test_ops_that_do_not_fit_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sound file whose backward is said to differentiate another block: no recorder writes that, and no plan may come of it."""
    graph = tmp_path / "net.graph.json"
    sizes = [f"--model-arg={key}={value}" for key, value in gpt_args().items()]
    assert run(["trace", EXAMPLE, "-o", str(graph), "--precision", "fp32", *sizes]) == 0
    document = json.loads(graph.read_text())
    other = next(op["id"] for op in document["ops"] if op.get("module") == "h.0.mlp.c_fc")
    backward = [op for op in document["ops"] if op.get("phase") == "backward" and op.get("module") == "h.1.attn"]
    turned = next(op for op in backward if op["target"] == "aten.transpose.int" and op["forward_op"] != backward[0]["forward_op"])
    turned["forward_op"] = other
    graph.write_text(json.dumps(document))
    capsys.readouterr()
    refused = said(capsys, 2, [str(graph), "--gpus", "2", "--dry-run"])
    assert (refused["code"], refused["where"]) == ("graph-file", "ops in net.graph.json"), refused


def test_layers_recorded_in_full_and_in_part_are_one_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [f"--model-arg={key}={value}" for key, value in gpt_args(layers=8).items()]
    texts = []
    for depth in ("fast", "full"):
        graph = tmp_path / f"{depth}.json"
        assert run(["trace", EXAMPLE, "-o", str(graph), "--no-prove", "--trace", depth, *sizes]) == 0
        texts.append((graph.read_bytes(), capsys.readouterr().err))
    assert texts[0][0] == texts[1][0]
    assert texts[0][1].splitlines()[0] != texts[1][1].splitlines()[0]  # it says how it recorded
