"""Runs a function in several forked processes joined by gloo, with a hard limit on time; no child outlives the call."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


def run_forked(folder: Path, count: int, work: Callable[[int], Result], seconds: float = 120.0) -> list[Result]:
    """`work(rank)` in `count` processes; their results by rank.  Raises AssertionError with the traceback of the first that failed."""
    context = multiprocessing.get_context("fork")
    meeting = folder / f"meet-{os.urandom(4).hex()}"
    children, pipes = [], []
    for rank in range(count):
        mine, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(theirs, meeting, rank, count, work), daemon=True)
        child.start()
        theirs.close()
        children.append(child)
        pipes.append(mine)
    end = time.monotonic() + seconds
    results: list[Result] = []
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(end - time.monotonic(), 0.0)), f"rank {rank} did not answer within {seconds:g} s"
            try:
                failed, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            assert not failed, f"rank {rank}:\n{answer}"
            results.append(answer)
    finally:
        for child in children:
            child.join(max(end - time.monotonic(), 0.0) if len(results) == count else 0.0)
            if child.is_alive():
                child.kill()
                child.join()
    return results


def _child(pipe: Connection, meeting: Path, rank: int, count: int, work: Callable[[int], object]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
        answer = work(rank)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps((False, answer)))  # plain bytes: torch would share the tensors of a process that ends
    except BaseException:
        pipe.send_bytes(pickle.dumps((True, traceback.format_exc())))
    finally:
        pipe.close()
        os._exit(0)  # no exit handlers of the test runner in a child
