"""The command: parses, calls the driver, prints.  The driver (and with it torch and the solver) is imported inside the command only."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mpress import __version__
from mpress.errors import BrokenPlanError, InputError, MpressError
from mpress.options import Attention, Options
from mpress.plan import ScheduleKind
from mpress.recipe import Optimizer, Precision
from mpress_cli.console import INTERRUPTED, OK, SCHEMA_VERSION, Streams

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
)

EPILOG = "Exit codes: 0 planned, 1 no plan exists, 2 wrong input or a model that cannot be traced, 3 a bug of ours, 130 interrupted."


class _Interrupted(MpressError):
    """Ctrl-C before any plan was found."""

    exit_code = INTERRUPTED


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"mpress-plan {__version__}")
        raise typer.Exit(OK)


@app.command(epilog=EPILOG)
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL.py[:factory]", help="file that defines build_model() and example_inputs()")],
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="GPUs to use", show_default=False)],
    machine: Annotated[str, typer.Option("--machine", metavar="NAME", help="built-in profile, or a .toml file")] = "dgx-a100-40gb",
    micro_batch: Annotated[int, typer.Option("--micro-batch", metavar="N", help="samples in a micro-batch")] = 1,
    micro_batches: Annotated[int, typer.Option("--micro-batches", metavar="N", help="micro-batches in an optimizer step")] = 32,
    schedule: Annotated[Literal["1f1b", "gpipe"], typer.Option("--schedule", help="order of forwards and backwards")] = "1f1b",
    precision: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option("--precision", help="16 bits keep fp32 master weights")] = "bf16",
    optimizer: Annotated[
        Literal["adamw", "sgd", "sgd-momentum"], typer.Option("--optimizer", help="decides the optimizer's state")
    ] = "adamw",
    attention: Annotated[
        Literal["auto", "flash", "efficient", "math"], typer.Option("--attention", help="kernel of attention; auto: torch's choice")
    ] = "auto",
    gap: Annotated[float, typer.Option("--gap", help="stop when this close to the best plan, proven")] = 0.01,
    reserve: Annotated[float, typer.Option("--reserve", help="share of each GPU left to context, libraries, fragmentation")] = 0.05,
    work_limit: Annotated[
        float, typer.Option("--work-limit", metavar="N", help="branch-and-bound nodes at most (deterministic); 0: the default")
    ] = 0,
    model_arg: Annotated[list[str] | None, typer.Option("--model-arg", metavar="KEY=VALUE", help="for build_model(); repeatable")] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="directory for the two files")] = Path(),
    json: Annotated[bool, typer.Option("--json", help="print one JSON document instead of tables")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="write nothing")] = False,
    dump_fx: Annotated[bool, typer.Option("--dump-fx", help="print the recorded step as a torch.fx graph and stop")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="show the raw traceback of an error")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")] = False,
) -> int:
    """Plan the training of a PyTorch model on several GPUs, without a GPU, and write the plan as a runnable program.

    MODEL.py is your file.  Two files are written: MODEL_mpress.py (run it with torchrun) and MODEL.schedule.json.
    """
    streams = Streams(json)
    try:
        options = Options(
            model=model,
            gpus=gpus,
            machine=machine,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            schedule=ScheduleKind(schedule),
            precision=Precision(precision),
            optimizer=Optimizer(optimizer),
            gap=gap,
            reserve=reserve,
            work_limit=work_limit,
            model_args=tuple(_pair(text) for text in model_arg or ()),
            out=out,
            dry_run=dry_run,
            attention=Attention(attention),
        )
        return _dump(options, streams) if dump_fx else _plan(options, streams)
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
    from mpress import driver  # late: imports torch and the solver
    from mpress_cli import render

    outcome = driver.plan_model(options, streams.progress)
    timings = dict(outcome.timings)
    if streams.machine_readable:
        streams.document(render.json_document(outcome.report, outcome.files, timings))
    else:
        streams.show(render.screen(outcome.report, outcome.files, timings))
    return OK


def _dump(options: Options, streams: Streams) -> int:
    from mpress import driver  # late, as above

    text = driver.dump_fx(options, streams.progress)
    if streams.machine_readable:
        streams.document({"schema_version": SCHEMA_VERSION, "status": "traced", "fx": text})
    else:
        streams.text(text)
    return OK


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise InputError("model-arg", f"'{text}' is not KEY=VALUE", where="--model-arg", hint="write it like --model-arg layers=4")
    return key, value


def main() -> None:
    """Entry point of `mpress-plan`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command; returns the exit code.  A wrong flag is refused like any other input, also under --json."""
    try:
        code = app(arguments, prog_name="mpress-plan", standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        hint = "mpress-plan --help lists every option"
        return Streams("--json" in arguments).refuse(InputError("usage", error.format_message(), where="command line", hint=hint))
    except (typer.Abort, KeyboardInterrupt):
        return Streams("--json" in arguments).refuse(_Interrupted("interrupted", "interrupted; nothing was written"))
    return code if isinstance(code, int) else OK
