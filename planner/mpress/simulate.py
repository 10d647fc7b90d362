"""Replays a plan event by event: one compute stream per GPU, one copy engine per direction and link.  Knows no solver.

Memory is decided by the order of lines on each GPU, never by timing (frees wait for their copy), so the peak is exact.
Time is event-driven: every GPU walks its own steps; copies and boundary transfers occupy links, ports and host uplinks
first come, first served (`links`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from mpress.errors import BrokenPlanError
from mpress.holdings import foreign_bytes, state_bytes, tied_stages, trainable_elements
from mpress.links import LinkClock
from mpress.machine import Machine
from mpress.plan import Plan, in_flight
from mpress.rank_state import RankState, Transfer
from mpress.schedule import Action, Word, actions
from mpress.units import Bytes, Seconds
from mpress.workload import Workload


@dataclass(frozen=True, slots=True)
class StageReplay:
    """What one stage did.  causes: bytes of the peak by cause, in a fixed order, summing to peak_bytes.

    forward_seconds, backward_seconds: one micro-batch's compute (recompute excluded from backward); stall_seconds: compute time lost
    in the whole step waiting for its own swap copies; busy_seconds: compute of the whole step, optimizer included.
    """

    peak_bytes: Bytes
    peak_action: str
    causes: tuple[tuple[str, Bytes], ...]
    in_flight: int
    forward_seconds: Seconds
    backward_seconds: Seconds
    recompute_seconds: Seconds
    stall_seconds: Seconds
    busy_seconds: Seconds


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain of events that made the step as long as it is: step_seconds =
    sum_s forwards[s] x (forward compute of stage s) + backwards[s] x (backward compute, recompute included) + constant_seconds.
    constant_seconds holds everything else on the way: transfers, stalls, the tied all-reduce, the optimizer.  Any plan of the same
    schedule, stage count and M has a path with the same counts, so the sum without the constant bounds its step from below.
    """

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    constant_seconds: Seconds


@dataclass(frozen=True, slots=True)
class Replay:
    """step_seconds: one optimizer step of M micro-batches.  bubble: idle share of all GPUs' time in the step.
    link_bytes: (source, target, bytes per step); HOST = -1 as source or target.  memory: per stage (seconds, bytes) of every compute line.
    """

    step_seconds: Seconds
    bubble: float
    stages: tuple[StageReplay, ...]
    path: CriticalPath
    link_bytes: tuple[tuple[int, int, Bytes], ...]
    memory: tuple[tuple[tuple[Seconds, Bytes], ...], ...]


def simulate(workload: Workload, machine: Machine, plan: Plan) -> Replay:
    """Replay one optimizer step.  Raises BrokenPlanError("deadlock") if the order of steps can never finish."""
    return _Replayer(workload, machine, plan).run()


class _Replayer:
    """Compiles every stage to single steps, then always advances the GPU with the earliest clock."""

    def __init__(self, workload: Workload, machine: Machine, plan: Plan) -> None:
        self.workload, self.machine, self.plan = workload, machine, plan
        self.links = LinkClock(machine)
        self.transfers: dict[tuple[str, int, int], Transfer] = {}
        self.trail: list[tuple[str, int, int]] = []  # (F|B, stage, previous compute action)
        self.count = len(plan.stages)
        self.ties = tied_stages(workload, plan)
        self.arrivals: dict[int, list[RankState]] = {}
        self.ranks = [self._rank(s) for s in range(self.count)]

    def _rank(self, s: int) -> RankState:
        work, stage = self.workload, self.plan.stages[s]
        types = [work.types[work.cells[i]] for i in range(stage.first, stage.last)]
        modes = tuple(cost.modes[m] for cost, m in zip(types, stage.modes, strict=True))
        rank = RankState(
            stage=s,
            device=stage.device,
            modes=modes,
            forward=tuple(float(cost.forward_seconds) for cost in types),
            backward=tuple(float(cost.backward_seconds + mode.recompute_seconds) for cost, mode in zip(types, modes, strict=True)),
            shares=tuple((share.pool, int(share.bytes)) for share in stage.shares),
            swapped_total=sum(mode.swapped_bytes for mode in modes),
            lag=stage.drain_lag,
            lead=stage.prefetch_lead,
            outputs=int(types[-1].output_bytes),
            input_gradient=int(work.types[work.cells[stage.first - 1]].gradient_bytes) if stage.first else 0,
            kept=int(types[-1].kept_bytes) if s < self.count - 1 else 0,
            carried=int(work.types[work.cells[stage.first - 1]].carried_bytes) if stage.first else 0,
        )
        rank.static = state_bytes(work, self.plan, s)
        rank.inputs = sum(cost.input_bytes for cost in types) * self.plan.micro_batches
        if s == self.count - 1:  # the losses of the step stay until it ends
            rank.inputs += rank.outputs * self.plan.micro_batches
        rank.foreign = foreign_bytes(self.plan, stage.device)
        kind, m = self.plan.schedule, self.plan.micro_batches
        for action in actions(kind, self.count, s, m, tied=any(s in group for group, _ in self.ties)):
            rank.steps += self._steps(rank, action)
        return rank

    def _steps(self, rank: RankState, action: Action) -> list[tuple[str, int, int]]:
        """Single steps of an action: (verb, micro-batch, cell)."""
        k, n = action.micro_batch, len(rank.modes)
        swaps = [mode.swapped_bytes > 0 for mode in rank.modes]
        if action.word is Word.F:
            steps = [("begin F", k, 0)]
            for i in range(n):
                steps.append(("F", k, i))
                if swaps[i]:
                    steps.append(("out", k, i))
                if i - rank.lag >= 0 and swaps[i - rank.lag]:
                    steps.append(("free", k, i - rank.lag))
            steps += [("free", k, i) for i in range(max(n - rank.lag, 0), n) if swaps[i]]
            return steps
        if action.word is Word.B:
            steps = [("begin B", k, 0)]
            steps += [("fetch", k, i) for i in range(n - 1, max(n - 1 - rank.lead, 0) - 1, -1) if swaps[i]]
            for i in range(n - 1, -1, -1):
                if i < n - 1 and i - rank.lead >= 0 and swaps[i - rank.lead]:
                    steps.append(("fetch", k, i - rank.lead))
                if swaps[i]:
                    steps.append(("load", k, i))
                steps.append(("B", k, i))
            return steps
        if action.word is Word.TIED:
            return [("TIED", g, 0) for g, (stages, _) in enumerate(self.ties) if rank.stage in stages]
        return [(action.word.value, k, 0)]

    def run(self) -> Replay:
        heap = [(0.0, rank.stage) for rank in self.ranks]
        while heap:
            _, s = heapq.heappop(heap)
            rank = self.ranks[s]
            if rank.position == len(rank.steps):
                continue
            woken = self._advance(rank)
            for other in woken:
                heapq.heappush(heap, (max(other.now, other.wake), other.stage))
        stuck = [r for r in self.ranks if r.position < len(r.steps)]
        if stuck:
            words = ", ".join(f"stage {r.stage} at {r.steps[r.position][0]}{r.steps[r.position][1]}" for r in stuck)
            raise BrokenPlanError("deadlock", f"the schedule can never finish: {words}")
        return self._result()

    def _advance(self, rank: RankState) -> list[RankState]:
        """Run one step of `rank`; returns the ranks that can go on (itself, unless it must wait for another)."""
        verb, k, i = rank.steps[rank.position]
        if verb in ("F", "B"):
            self._compute(rank, verb, k, i)
        elif verb in ("out", "fetch"):
            rank.copies[(k, i)] = self._copy(rank, i, outward=verb == "out")
            rank.swapping += rank.modes[i].swapped_bytes
        elif verb in ("free", "load"):
            done = rank.copies.pop((k, i))
            if done > rank.now:
                rank.stall += done - rank.now
                rank.now = done
            rank.swapping -= rank.modes[i].swapped_bytes
        elif verb.startswith("begin"):
            return self._begin(rank, verb[-1], k)
        elif verb.startswith(("SEND", "RECV")):
            return self._message(rank, verb, k)
        elif verb == "TIED":
            return self._tied(rank, k)
        else:
            self._step(rank)
        rank.position += 1
        return [rank]

    def _compute(self, rank: RankState, verb: str, k: int, i: int) -> None:
        mode = rank.modes[i]
        if verb == "F":
            rank.charge("F", k, mode.forward_peak_bytes, mode.resident_bytes)
            seconds = rank.forward[i]
            rank.resident += mode.resident_bytes
        else:
            rank.resident -= mode.resident_bytes
            rank.charge("B", k, mode.backward_peak_bytes, mode.resident_bytes + mode.swapped_bytes)
            seconds = rank.backward[i]
            if i == 0:
                rank.resident -= rank.carried
        rank.now += seconds
        rank.busy += seconds

    def _copy(self, rank: RankState, i: int, outward: bool) -> float:
        """Copy cell i's swapped bytes to or from all pools at once, in the stage's proportions; returns when the last stripe is done."""
        done = rank.now
        for pool, share in rank.shares:
            size = rank.modes[i].swapped_bytes * share / rank.swapped_total
            ends = (rank.device, pool) if outward else (pool, rank.device)
            done = max(done, self.links.occupy(*ends, size, rank.now))
        return done

    def _begin(self, rank: RankState, word: str, k: int) -> list[RankState]:
        """Start of a compute action: wait for its boundary tensor, whose buffer the first cell then owns."""
        first, last = rank.stage == 0, rank.stage == self.count - 1
        if (word == "F" and first) or (word == "B" and last):
            size = 0
        else:
            transfer = self._transfer(word, rank.stage - 1 if word == "F" else rank.stage + 1, k)
            if transfer.end is None:
                transfer.waiting.append(rank)
                return []
            if transfer.end > rank.now:
                rank.now, rank.origin = transfer.end, transfer.origin
            size = self._message_bytes(word, rank.stage - 1 if word == "F" else rank.stage + 1)
        rank.receiving -= size
        rank.resident += rank.carried if word == "F" else 0
        if word == "B" and k == rank.sent and not rank.alone:
            rank.sending, rank.alone = rank.sending + rank.kept, True
        self.trail.append((word, rank.stage, rank.origin))
        rank.origin = len(self.trail) - 1
        rank.position += 1
        return [rank]

    def _transfer(self, word: str, sender: int, k: int) -> Transfer:
        return self.transfers.setdefault((word, sender, k), Transfer())

    def _message_bytes(self, word: str, sender: int) -> int:
        """What a stage sends over its edge: its output forward, the gradient of its input back."""
        return self.ranks[sender].outputs if word == "F" else self.ranks[sender].input_gradient

    def _message(self, rank: RankState, verb: str, k: int) -> list[RankState]:
        word = verb[-1]
        woken = [rank]
        if verb.startswith("RECV"):
            sender = rank.stage - 1 if word == "F" else rank.stage + 1
            transfer = self._transfer(word, sender, k)
            transfer.posted = (rank.now, rank.origin)
            rank.receiving += self._message_bytes(word, sender)
        else:
            sender = rank.stage
            if k > 0:
                previous = self._transfer(word, sender, k - 1)
                if previous.end is None:
                    previous.waiting.append(rank)
                    return []
                if previous.end > rank.now:
                    rank.now, rank.origin = previous.end, previous.origin
            if k == 0:
                rank.sending += self._message_bytes(word, sender)  # later messages replace the buffer of the one before
            if word == "F":
                rank.sending -= rank.kept if k == 0 or rank.alone else 0
                rank.sent, rank.alone = k, False
            transfer = self._transfer(word, sender, k)
            transfer.sent = (rank.now, rank.origin)
        if transfer.sent is not None and transfer.posted is not None:
            receiver = self.ranks[sender + 1 if word == "F" else sender - 1]
            start, transfer.origin = max(transfer.sent, transfer.posted)
            end = self.links.occupy(self.ranks[sender].device, receiver.device, self._message_bytes(word, sender), start)
            transfer.end = end + self.machine.latency_seconds
            woken += transfer.waiting
            for other in transfer.waiting:  # `now` stays: the step it repeats must see that it was the message that made it wait
                other.wake = max(other.now, start)
            transfer.waiting = []
        rank.position += 1
        return woken

    def _tied(self, rank: RankState, group: int) -> list[RankState]:
        """All-reduce of one group of tied gradients: starts when every stage of the group has come, a ring over its stages."""
        rank.sending = 0
        stages, size = self.ties[group]
        arrived = self.arrivals.setdefault(group, [])
        arrived.append(rank)
        rank.charge("TIED", -1, 0, 0)
        if len(arrived) < len(stages):
            return []
        late = max(arrived, key=lambda r: (r.now, r.stage))
        start, origin, end = late.now, late.origin, late.now
        for a in arrived:
            for b in arrived:
                if a is not b:
                    end = max(end, self.links.occupy(a.device, b.device, 2.0 * size / len(stages), start))
        for member in arrived:
            member.now, member.origin = end + self.machine.latency_seconds, origin
            member.position += 1
        return list(arrived)

    def _step(self, rank: RankState) -> None:
        rank.sending = 0
        stage = self.plan.stages[rank.stage]
        types = [self.workload.types[self.workload.cells[i]] for i in range(stage.first, stage.last)]
        largest = max(cost.largest_trainable_elements for cost in types)
        rank.charge("STEP", -1, largest * self.workload.step_bytes_per_element, 0)
        seconds = trainable_elements(self.workload, self.plan, rank.stage) * self.workload.optimizer_seconds_per_element
        rank.now += seconds
        rank.busy += seconds

    def _result(self) -> Replay:
        last = max(self.ranks, key=lambda r: (r.now, -r.stage))
        step, plan = last.now, self.plan
        forwards, backwards = [0] * self.count, [0] * self.count
        at = last.origin
        while at >= 0:
            word, s, at = self.trail[at]
            (forwards if word == "F" else backwards)[s] += 1
        stages = []
        for r in self.ranks:
            kept, swapping, boundary, workspace = r.peak_parts
            causes = (
                ("state", Bytes(r.static)),
                ("inputs", Bytes(r.inputs)),
                ("activations", Bytes(kept)),
                ("swap buffers", Bytes(swapping)),
                ("boundary", Bytes(boundary)),
                ("foreign stripes", Bytes(r.foreign)),
                ("workspace", Bytes(workspace)),
            )
            recompute = sum(mode.recompute_seconds for mode in r.modes)
            stages.append(
                StageReplay(
                    peak_bytes=Bytes(r.peak),
                    peak_action=r.peak_action,
                    causes=causes,
                    in_flight=in_flight(plan.schedule, self.count, r.stage, plan.micro_batches),
                    forward_seconds=Seconds(sum(r.forward)),
                    backward_seconds=Seconds(sum(r.backward) - recompute),
                    recompute_seconds=Seconds(recompute),
                    stall_seconds=Seconds(r.stall),
                    busy_seconds=Seconds(r.busy),
                )
            )
        compute = sum(f * sum(r.forward) + b * sum(r.backward) for f, b, r in zip(forwards, backwards, self.ranks, strict=True))
        return Replay(
            step_seconds=Seconds(step),
            bubble=1.0 - sum(r.busy for r in self.ranks) / (step * self.count) if step > 0 else 0.0,
            stages=tuple(stages),
            path=CriticalPath(tuple(forwards), tuple(backwards), Seconds(step - compute)),
            link_bytes=self.links.carried(),
            memory=tuple(tuple(r.curve) for r in self.ranks),
        )
