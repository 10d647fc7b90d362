"""The command: parses, calls the driver, prints.  The driver (and with it torch or the solver) is imported inside the commands only.

`mpress-plan MODEL ...` plans; `mpress-plan trace MODEL ...` records.  The first word decides, before typer sees the rest.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from mpress import __version__
from mpress.errors import BrokenPlanError, InputError, MpressError
from mpress.options import (
    DEFAULT_MICRO_BATCH,
    DEFAULT_MICRO_BATCHES,
    DEFAULT_PRECISION,
    Attention,
    Depth,
    Options,
    Recording,
    parse_micro_batch,
)
from mpress.plan import ScheduleKind
from mpress.recipe import Optimizer, Precision
from mpress_cli.console import INTERRUPTED, OK, SCHEMA_VERSION, Streams

EXITS = "2 wrong input or a model that cannot be traced, 3 a bug of ours, 130 interrupted."
EPILOG = f"Exit codes: 0 planned, 1 no plan exists, {EXITS}"
TRACE = "trace"


def _app() -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


plan_app, trace_app = _app(), _app()


class _Interrupted(MpressError):
    """Ctrl-C before any plan was found."""

    exit_code = INTERRUPTED


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"mpress-plan {__version__}")
        raise typer.Exit(OK)


PrecisionWord = Literal["bf16", "fp16", "fp32"]
PrecisionOption = typer.Option(
    "--precision", help=f"16 bits keep fp32 master weights [default: {DEFAULT_PRECISION.value}]", show_default=False
)
MicroBatchOption = typer.Option(
    "--micro-batch", metavar="N", help=f"samples in a micro-batch [default: {DEFAULT_MICRO_BATCH}]", show_default=False
)
SizesOption = typer.Option(
    "--micro-batch",
    metavar="N[,N...]|auto",
    help=f"samples in a micro-batch; of several sizes the fastest is kept [default: {DEFAULT_MICRO_BATCH}]",
    show_default=False,
)
MicroBatchesOption = typer.Option(
    "--micro-batches", metavar="N", help=f"micro-batches in an optimizer step [default: {DEFAULT_MICRO_BATCHES}]", show_default=False
)
AttentionWord = Annotated[
    Literal["auto", "flash", "efficient", "math"], typer.Option("--attention", help="kernel of attention; auto: torch's choice")
]
ModelArgs = Annotated[
    list[str] | None, typer.Option("--model-arg", metavar="KEY=VALUE", help="for build_model(), or a key of the config.json; repeatable")
]
SeqLen = Annotated[
    int,
    typer.Option(
        "--seq-len", metavar="N", help="tokens of a sample, for a config.json [default: its positions, 1024 at most]", show_default=False
    ),
]
DepthWord = Annotated[
    Literal["fast", "full"], typer.Option("--trace", help="of equal layers a few are recorded where that is exact, or all: the same graph")
]
ProveFlag = Annotated[bool, typer.Option("--prove/--no-prove", help="hold the recorded step against a real run on this CPU, if small")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document instead of tables")]
Traceback = Annotated[bool, typer.Option("--traceback", help="show the raw traceback of an error")]


@plan_app.command(epilog=EPILOG)
def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL.py[:factory]",
            help="file that defines build_model() and example_inputs(); or a transformers config.json, or a graph file",
        ),
    ],
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="GPUs to use", show_default=False)],
    machine: Annotated[str, typer.Option("--machine", metavar="NAME", help="built-in profile, or a .toml file")] = "dgx-a100-40gb",
    micro_batch: Annotated[str | None, SizesOption] = None,
    micro_batches: Annotated[int | None, MicroBatchesOption] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", metavar="N", help="samples in an optimizer step, in place of --micro-batches")
    ] = None,
    schedule: Annotated[Literal["1f1b", "gpipe"], typer.Option("--schedule", help="order of forwards and backwards")] = "1f1b",
    precision: Annotated[PrecisionWord | None, PrecisionOption] = None,
    optimizer: Annotated[
        Literal["adamw", "sgd", "sgd-momentum"], typer.Option("--optimizer", help="decides the optimizer's state")
    ] = "adamw",
    attention: AttentionWord = "auto",
    seq_len: SeqLen = 0,
    gap: Annotated[float, typer.Option("--gap", help="stop when this close to the best plan, proven")] = 0.01,
    reserve: Annotated[float, typer.Option("--reserve", help="share of each GPU left to context, libraries, fragmentation")] = 0.05,
    work_limit: Annotated[
        float, typer.Option("--work-limit", metavar="N", help="branch-and-bound nodes at most (deterministic); 0: the default")
    ] = 0,
    model_arg: ModelArgs = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="directory for the two files")] = Path(),
    schedule_only: Annotated[bool, typer.Option("--schedule-only", help="write the schedule file, but no module")] = False,
    trace: DepthWord = "fast",
    prove: ProveFlag = True,
    json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="write nothing")] = False,
    dump_fx: Annotated[bool, typer.Option("--dump-fx", help="print the recorded step as a torch.fx graph and stop")] = False,
    traceback: Traceback = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")] = False,
) -> int:
    """Plan the training of a PyTorch model on several GPUs, without a GPU, and write the plan as a runnable program.

    MODEL.py is your file, or the config.json of a transformers model.  Two files are written: MODEL_mpress.py (run it with torchrun)
    and MODEL.schedule.json.  example_inputs() may be a dict of keyword arguments; None, True and numbers in it are fixed in the plan.
    Of what the forward returns only the loss is kept.

    `mpress-plan trace MODEL.py -o graph.json` records a model; `mpress-plan graph.json --gpus N` plans it (schedule file only).
    `mpress-plan trace --help` says more.
    """
    streams = Streams(json)

    def work() -> int:
        if micro_batches is not None and global_batch is not None:
            words = "--global-batch and --micro-batches both say how large an optimizer step is"
            raise InputError("option", words, "--global-batch", "give one of them")
        sizes = None if micro_batch is None else parse_micro_batch(micro_batch)
        options = Options(
            model=model,
            gpus=gpus,
            machine=machine,
            micro_batch=sizes[0] if sizes and len(sizes) == 1 else None,
            micro_batches=DEFAULT_MICRO_BATCHES if micro_batches is None else micro_batches,
            schedule=ScheduleKind(schedule),
            precision=None if precision is None else Precision(precision),
            optimizer=Optimizer(optimizer),
            gap=gap,
            reserve=reserve,
            work_limit=work_limit,
            model_args=_pairs(model_arg),
            out=out,
            dry_run=dry_run,
            attention=Attention(attention),
            depth=Depth(trace),
            schedule_only=schedule_only,
            sequence=seq_len,
            prove=prove,
            sizes=None if sizes and len(sizes) == 1 else sizes,
            global_batch=global_batch,
        )
        return _dump(options, streams) if dump_fx else _plan(options, streams)

    return _guarded(work, streams, traceback)


@trace_app.command(epilog=f"Exit codes: 0 recorded, {EXITS}")
def trace_command(
    model: Annotated[str, typer.Argument(metavar="MODEL.py[:factory]", help="file that defines build_model() and example_inputs()")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.json", help="the graph file [default: MODEL.graph.json]", show_default=False)
    ] = None,
    micro_batch: Annotated[int, MicroBatchOption] = DEFAULT_MICRO_BATCH,
    precision: Annotated[PrecisionWord, PrecisionOption] = DEFAULT_PRECISION.value,
    attention: AttentionWord = "auto",
    seq_len: SeqLen = 0,
    model_arg: ModelArgs = None,
    trace: DepthWord = "fast",
    prove: ProveFlag = True,
    json: AsJson = False,
    traceback: Traceback = False,
) -> int:
    """Record one training step of a PyTorch model, without a GPU, and write it as a graph file.

    `mpress-plan FILE.json --gpus N` plans the file without torch and without the model.  docs/graph-format.md describes it.
    """
    streams = Streams(json)

    def work() -> int:
        recording = Recording(model, _pairs(model_arg), micro_batch, Precision(precision), Attention(attention), seq_len, Depth(trace))
        return _trace(recording, out, prove, streams)

    return _guarded(work, streams, traceback)


def _guarded(work: Callable[[], int], streams: Streams, traceback: bool) -> int:
    """Run a command; whatever goes wrong is a refusal and an exit code."""
    try:
        return work()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not tear the message
        return streams.refuse(_Interrupted("interrupted", "interrupted before any plan was found; nothing was written"))
    except MpressError as error:
        if traceback:
            streams.trace_back()
        return streams.refuse(error)
    except Exception as error:
        if traceback:
            streams.trace_back()
        said = str(error).strip().splitlines()
        return streams.refuse(
            BrokenPlanError(
                "internal",
                f"a bug of mpress-plan: {type(error).__name__}{': ' + said[0] if said else ''}",
                hint="run again with --traceback and report what it prints; nothing was written",
            )
        )


def _plan(options: Options, streams: Streams) -> int:
    from mpress import driver  # late: imports the solver, and torch where a model is traced
    from mpress_cli import document, render

    outcome = driver.plan_model(options, streams.progress)
    timings = dict(outcome.timings)
    if streams.machine_readable:
        streams.document(document.json_document(outcome.report, outcome.files, timings))
    else:
        streams.show(render.screen(outcome.report, outcome.files, timings))
    return OK


def _trace(recording: Recording, out: Path | None, prove: bool, streams: Streams) -> int:
    from mpress import intake  # late, as above
    from mpress_cli import document, render

    traced = intake.trace_model(recording, out, streams.progress, prove)
    if streams.machine_readable:
        streams.document(document.traced_document(traced))
    else:
        streams.show(render.traced_screen(traced))
    return OK


def _dump(options: Options, streams: Streams) -> int:
    from mpress import driver  # late, as above

    text = driver.dump_fx(options, streams.progress)
    if streams.machine_readable:
        streams.document({"schema_version": SCHEMA_VERSION, "status": "traced", "fx": text})
    else:
        streams.text(text)
    return OK


def _pairs(texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    pairs = []
    for text in texts or ():
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier():
            raise InputError("model-arg", f"'{text}' is not KEY=VALUE", where="--model-arg", hint="write it like --model-arg layers=4")
        pairs.append((key, value))
    return tuple(pairs)


def main() -> None:
    """Entry point of `mpress-plan`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command; returns the exit code.  A wrong flag is refused like any other input, also under --json."""
    tracing = arguments[:1] == [TRACE]
    name = f"mpress-plan {TRACE}" if tracing else "mpress-plan"
    try:
        code = (trace_app if tracing else plan_app)(arguments[tracing:], prog_name=name, standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        hint = f"{name} --help lists every option"
        return Streams("--json" in arguments).refuse(InputError("usage", error.format_message(), where="command line", hint=hint))
    except (typer.Abort, KeyboardInterrupt):
        return Streams("--json" in arguments).refuse(_Interrupted("interrupted", "interrupted; nothing was written"))
    return code if isinstance(code, int) else OK
