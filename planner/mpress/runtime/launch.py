"""The command line of an emitted program."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpress.runtime.checks import Program, check_buffers, check_program, check_state_dict, unused
from mpress.runtime.parameters import Knobs
from mpress.runtime.schedule_file import RunError, ScheduleFile, read_schedule
from mpress.runtime.session import Outcome, Settings, first_value, run_remote, run_virtual


def main(program: Program, schedule_name: str, argv: Sequence[str] | None = None) -> None:
    """Run an emitted module; exits with 2 on a refusal, 1 when more memory was used than predicted."""
    options = _parser(program, schedule_name).parse_args(argv)
    try:
        sys.exit(_main(program, schedule_name, options))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _parser(program: Program, schedule_name: str) -> argparse.ArgumentParser:
    name = Path(program.__file__).name
    parser = argparse.ArgumentParser(
        prog=name, description=f"Run under torchrun --nproc-per-node {len(program.STAGES)} {name}, or alone with --virtual."
    )
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps to run (default 1)")
    parser.add_argument("--state-dict", type=Path, metavar="FILE", help="weights under the user's names (torch.save); random if not given")
    parser.add_argument("--data", type=Path, metavar="FILE", help="torch.save'd list of steps, each a list of micro-batches, each a dict")
    parser.add_argument("--schedule", type=Path, metavar="FILE", help=f"schedule file (default {schedule_name} beside this file)")
    parser.add_argument("--virtual", action="store_true", help="run all stages in this process, on CPU")
    parser.add_argument("--account", action="store_true", help="measure live bytes per rank and hold them against the prediction")
    parser.add_argument("--seed", type=int, default=0, help="of dropout masks and made-up data (default 0)")
    parser.add_argument("--lr", type=float, default=Knobs("").learning_rate, help="learning rate (default %(default)g)")
    parser.add_argument("--weight-decay", type=float, default=Knobs("").weight_decay, help="weight decay (default %(default)g)")
    parser.add_argument("--momentum", type=float, default=Knobs("").momentum, help="of sgd-momentum (default %(default)g)")
    parser.add_argument("--save-state-dict", type=Path, metavar="FILE", help="write the trained weights")
    parser.add_argument("--save-losses", type=Path, metavar="FILE", help="write the mean loss of each step (torch.save)")
    parser.add_argument("--save-gradients", type=Path, metavar="FILE", help="write the gradients of each step (torch.save; for tests)")
    return parser


def _main(program: Program, schedule_name: str, options: argparse.Namespace) -> int:
    schedule = read_schedule(options.schedule or Path(program.__file__).with_name(schedule_name))
    if not options.virtual and "RANK" not in os.environ:
        raise RunError(f"start me with torchrun --nproc-per-node {len(program.STAGES)} {Path(program.__file__).name}, or pass --virtual")
    check_program(program, schedule, None if options.virtual else int(os.environ["WORLD_SIZE"]))
    settings = Settings(
        steps=options.steps,
        seed=options.seed,
        knobs=Knobs(schedule.optimizer, options.lr, options.weight_decay, options.momentum),
        state_dict=_load(options.state_dict, "--state-dict"),
        data=_load(options.data, "--data"),
        account=options.account,
        keep_gradients=options.save_gradients is not None,
        on_step=lambda step, loss: print(f"step {step}  loss {loss:.6f}", flush=True),
    )
    if settings.state_dict is None:
        check_buffers(program)
    else:
        check_state_dict(program, settings.state_dict)
    if options.virtual:
        outcomes = [run_virtual(program, schedule, settings)]
        return _finish(program, schedule, options, settings, outcomes)
    rank = int(os.environ["RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", schedule.devices[rank]) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        outcome = run_remote(program, schedule, settings, rank, device)
        if not options.save_state_dict:
            outcome.weights = {}
        outcome.buffers = {}
        everyone: list[Any] | None = [None] * len(schedule.stages) if rank == 0 else None
        dist.gather_object(outcome, everyone)
        code = _finish(program, schedule, options, settings, everyone) if everyone is not None else 0
        dist.barrier()
        return code
    finally:
        dist.destroy_process_group()


def _load(path: Path | None, flag: str) -> Any:
    if path is None:
        return None
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(f"cannot read {path} ({str(error).splitlines()[0]}); {flag} takes a file written by torch.save") from error


def _finish(program: Program, schedule: ScheduleFile, options: argparse.Namespace, settings: Settings, outcomes: Sequence[Outcome]) -> int:
    """Write the files asked for and print the comparison of memory; returns the exit code."""
    if options.save_losses:
        torch.save(next(outcome.losses for outcome in outcomes if outcome.losses), options.save_losses)
    if options.save_gradients:
        steps = [{name: g for outcome in outcomes for name, g in outcome.gradients[step].items()} for step in range(options.steps)]
        torch.save(steps, options.save_gradients)
    if options.save_state_dict:
        state = {name: weight.cpu() for outcome in outcomes for name, weight in outcome.weights.items()}
        for one in unused(program):
            if settings.state_dict is not None or one.make is not None:
                state |= dict.fromkeys(one.names, first_value(one, settings.state_dict))
        torch.save(state, options.save_state_dict)
    late = sum(outcome.late for outcome in outcomes)
    if late:
        print(f"{late} loads were not prefetched")
    over = 0
    if options.account:
        print("rank   predicted peak    measured peak   measured/predicted")
        for rank, measured in sorted((rank, peak) for outcome in outcomes for rank, peak in outcome.peak.items()):
            predicted = schedule.stages[rank].peak_bytes
            over += measured > predicted
            print(f"{rank:4}  {predicted:15,}  {measured:15,}   {100 * measured / predicted:8.2f} %")
        if over:
            print(f"error: {over} of {len(schedule.stages)} ranks used more memory than predicted", file=sys.stderr)
    return 1 if over else 0
