"""One-sided copies of swapped bytes.  A pool is memory lent by another GPU, or host memory; only its owner ever touches a range of it.

Ordering is a matter of the owner alone: whoever lends a pool reserves it at the start and takes no part, so no order of steps on the
lender can block a copy.  One copy engine serves one (pool, direction): a side stream on CUDA, a thread on CPU.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from mpress.runtime.schedule_file import Stripe


def raw(tensor: Tensor) -> Tensor:
    """The bytes of the whole storage of a tensor; no copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Work(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Order everything that follows on the compute stream after the copy; blocks on CPU."""

    def done(self) -> bool:
        """Whether the copy has finished, without blocking."""


class Transport:
    """Copies between a stage's tensors and the pools it may use: `pools` maps pool id to bytes as a uint8 tensor."""

    def __init__(self, pools: Mapping[int, Tensor], device: torch.device) -> None:
        self._pools = dict(pools)
        self._cuda = device.type == "cuda"
        self._streams: dict[tuple[int, str], torch.cuda.Stream] = {}
        self._engines: dict[tuple[int, str], _Engine] = {}
        self.moved: dict[tuple[int, str], int] = {}

    def put(self, source: Tensor, stripes: tuple[Stripe, ...], slot: int) -> Work:
        """Start copying the bytes of `source` (uint8) to its stripes; `source` must stay as it is until the work is waited for."""
        return self._copy(source, stripes, slot, "out")

    def get(self, target: Tensor, stripes: tuple[Stripe, ...], slot: int) -> Work:
        """Start copying the stripes back into `target` (uint8)."""
        return self._copy(target, stripes, slot, "in")

    def _copy(self, tensor: Tensor, stripes: tuple[Stripe, ...], slot: int, direction: str) -> Work:
        if sum(stripe.bytes for stripe in stripes) != tensor.numel():
            raise ValueError(f"stripes hold {sum(s.bytes for s in stripes)} bytes, the tensor {tensor.numel()}")
        jobs: list[tuple[int, Tensor, Tensor]] = []
        start = 0
        for stripe in stripes:
            piece = tensor.narrow(0, start, stripe.bytes)
            place = self._pools[stripe.pool].narrow(0, stripe.offset + slot * stripe.bytes, stripe.bytes)
            jobs.append((stripe.pool, piece, place) if direction == "in" else (stripe.pool, place, piece))
            start += stripe.bytes
            self.moved[(stripe.pool, direction)] = self.moved.get((stripe.pool, direction), 0) + stripe.bytes
        return self._on_streams(jobs, direction) if self._cuda else self._on_threads(jobs, direction)

    def _on_threads(self, jobs: list[tuple[int, Tensor, Tensor]], direction: str) -> Work:
        done = []
        for pool, target, source in jobs:
            engine = self._engines.get((pool, direction))
            if engine is None:
                engine = self._engines[(pool, direction)] = _Engine(f"copy {direction} {pool}")
            done.append(engine.start(target, source))
        return _Threads(tuple(done))

    def _on_streams(self, jobs: list[tuple[int, Tensor, Tensor]], direction: str) -> Work:
        now = torch.cuda.current_stream().record_event()
        done = []
        for pool, target, source in jobs:
            stream = self._streams.get((pool, direction))
            if stream is None:
                stream = self._streams[(pool, direction)] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_event(now)  # the bytes are written, or the buffer is free, from here on
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                done.append(stream.record_event())
        return _Streams(tuple(done))

    def close(self) -> None:
        """Finish all copies and let go of the pools; call on every rank before a lender frees its memory."""
        for engine in self._engines.values():
            engine.stop()
        for stream in self._streams.values():
            stream.synchronize()
        self._engines.clear()
        self._pools.clear()


class _Job:
    __slots__ = ("error", "finished", "source", "target")

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target: Tensor | None = target
        self.source: Tensor | None = source
        self.finished = threading.Event()
        self.error: Exception | None = None


class _Engine:
    """A thread that copies one job after the other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, target: Tensor, source: Tensor) -> _Job:
        job = _Job(target, source)
        self._queue.put(job)
        return job

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if job.target is not None and job.source is not None:
                    job.target.copy_(job.source)
            except Exception as error:  # shown by whoever waits for the copy
                job.error = error
            # Drop the tensors before the waiter wakes: it counts on their memory being free.
            job.target = job.source = None
            finished = job.finished
            del job
            finished.set()
            del finished

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()


class _Threads:
    def __init__(self, jobs: tuple[_Job, ...]) -> None:
        self._jobs = jobs

    def wait(self) -> None:
        for job in self._jobs:
            job.finished.wait()
            if job.error is not None:
                raise job.error

    def done(self) -> bool:
        return all(job.finished.is_set() for job in self._jobs)


class _Streams:
    def __init__(self, events: tuple[torch.cuda.Event, ...]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)

    def done(self) -> bool:
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]
