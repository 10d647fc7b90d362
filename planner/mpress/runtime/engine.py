"""Walks one stage through its list of steps (the words of the schedule file).

A walk is a generator: it yields while it must wait for another stage of this process and runs straight through when every stage has a
process of its own.  It obeys the rules of the schedule: a receive allocates its buffer where RECV stands; one sent buffer an edge stays
alive until the next SEND on that edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from mpress.runtime.account import Accountant
from mpress.runtime.context import Context
from mpress.runtime.parameters import Parameters, Row
from mpress.runtime.schedule_file import RunError, ScheduleFile, Step
from mpress.runtime.transport import Transport
from mpress.runtime.wires import Message, Wires, buffers, sendable


class Stage(Protocol):
    """What an emitted stage class provides; both functions get boundary tensors from `c.take()` and return those to send."""

    PARAMS: Mapping[str, tuple[int, ...]]
    BUFFERS: Mapping[str, Row]
    INPUTS: tuple[str, ...]

    @staticmethod
    def fwd(c: Context, p: Parameters) -> tuple[Tensor, ...]: ...
    @staticmethod
    def bwd(c: Context, p: Parameters) -> tuple[Tensor, ...]: ...


class Rank:
    """One stage at work.  losses: of the step under way, last stage only; late: loads that nobody prefetched."""

    def __init__(
        self,
        index: int,
        stage: type[Stage],
        schedule: ScheduleFile,
        parameters: Parameters,
        transport: Transport,
        wires: Wires,
        device: torch.device,
        seed: int,
        accountant: Accountant | None = None,
    ) -> None:
        self.index, self.stage, self.schedule = index, stage, schedule
        self.parameters, self.transport, self.wires = parameters, transport, wires
        self.device, self.seed, self.accountant = device, seed, accountant
        self.last = index == len(schedule.stages) - 1
        self.losses: list[Tensor] = []
        self.late = 0
        self.at = "start"
        self._inputs: list[dict[str, Tensor]] = []
        self._contexts: dict[int, Context] = {}
        self._arriving: dict[tuple[str, int], tuple[tuple[Tensor, ...], Message]] = {}
        self._sent: dict[str, tuple[tuple[Tensor, ...], Message]] = {}
        self._finished: tuple[Tensor, ...] = ()

    def walk(self, step: int, inputs: list[dict[str, Tensor]], before_step: Callable[[Rank], None] | None = None) -> Iterator[None]:
        """One optimizer step; `inputs` holds what this stage reads of each micro-batch.  `before_step` sees the finished gradients."""
        self._inputs, self.losses = inputs, []
        for action in self.schedule.stages[self.index].steps:
            self.at = f"{self.index}{action}"
            if self.accountant is not None:
                self.accountant.action = self.at
            if action.word == "STEP":
                yield from self._drain()
                if before_step is not None:
                    before_step(self)
                self.parameters.step()
            else:
                yield from self._run(action, step)
        self._inputs = []
        if left := [name for context in self._contexts.values() for name in context.left()]:
            raise RunError(f"stage {self.index} never used {', '.join(sorted(left))}: the module and the schedule do not belong together")
        self._contexts.clear()

    def _run(self, action: Step, step: int) -> Iterator[None]:
        k = action.micro_batch
        if action.word == "F":
            yield from self._forward(k, step)
        elif action.word == "B":
            yield from self._backward(k)
        elif action.word == "TIED":
            yield from self._drain()
            yield from self._tied()
        else:
            verb, word = action.word.split("_")
            if verb == "RECV":
                if word == "F":
                    tensors = buffers(self.schedule.stages[self.index - 1].forward, self.device)
                else:
                    tensors = buffers(self.schedule.stages[self.index].gradients, self.device)
                self._arriving[(word, k)] = (tensors, self.wires.receive(self.index, word, k, tensors))
            else:
                yield from self._release(word)
                tensors = tuple(sendable(tensor) for tensor in self._finished)
                self._finished = ()
                self._sent[word] = (tensors, self.wires.send(self.index, word, k, tensors))

    def _arrived(self, word: str, k: int) -> Iterator[None]:
        """Wait for the boundary tensors of a compute action."""
        message = self._arriving[(word, k)][1]
        while not message.ready():
            yield
        message.wait()

    def _forward(self, k: int, step: int) -> Iterator[None]:
        context = Context(self.transport, self.schedule.stages[self.index].swapped, self.device, self._inputs[k], self.seed, step, k)
        self._contexts[k] = context
        if self.index > 0:
            yield from self._arrived("F", k)
            context.give(self._arriving.pop(("F", k))[0], backward=False)
        made = self.stage.fwd(context, self.parameters)
        if self.last:
            self.losses.append(made[0])
        else:
            self._finished = made

    def _backward(self, k: int) -> Iterator[None]:
        context = self._contexts[k]
        if self.last:
            share = 1.0 / self.schedule.micro_batches
            context.give((torch.full_like(self.losses[-1], share),), backward=True)
        else:
            yield from self._arrived("B", k)
            context.give(self._arriving.pop(("B", k))[0], backward=True)
        made = self.stage.bwd(context, self.parameters)
        self._finished = made
        self.late += context.late
        if not context.left():
            del self._contexts[k]

    def _release(self, word: str) -> Iterator[None]:
        """Wait for the previous send on an edge and let its buffer go."""
        if word in self._sent:
            message = self._sent[word][1]
            while not message.ready():
                yield
            message.wait()
            del self._sent[word]

    def _drain(self) -> Iterator[None]:
        for word in ("F", "B"):
            yield from self._release(word)

    def _tied(self) -> Iterator[None]:
        messages = []
        for number, group in enumerate(self.schedule.tied):
            for stage, name in group.copies:
                if stage == self.index and name in self.parameters.gradients():
                    messages.append(self.wires.reduce(self.index, number, self.parameters.gradients()[name]))
        for message in messages:
            while not message.ready():
                yield
            message.wait()


def run_together(walks: Mapping[Rank, Iterator[None]], accountant: Accountant | None) -> None:
    """Step several ranks of one process in turn until all are through; raises RunError when none can go on."""
    alive = dict(walks)
    while alive:
        moved = False
        for rank, walk in list(alive.items()):
            if accountant is not None:
                accountant.running = rank.index
                accountant.action = rank.at
            before = rank.at
            try:
                next(walk)
            except StopIteration:
                del alive[rank]
                moved = True
            moved = moved or rank.at != before
        if not moved:
            raise RunError(f"the plan deadlocks: {', '.join(f'stage {r.index} waits in {r.at}' for r in alive)}")
