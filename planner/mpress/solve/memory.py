"""Rows of memory: what every stage is certain to hold at its peak, stage by stage.  Valid for every plan; exact where it matters most.

Two families of rows.  *Tail*: the last cell of a stage runs while everything before it is resident.  *Group*: the last cell of type t in
mode l runs while the cells before it are.  Both at every moment (problem.Moment) that is not dominated.
"""

from __future__ import annotations

from typing import Protocol

from mpress.problem import Moment, Problem, mode_order, moments, totals
from mpress.schedule import Word
from mpress.solve.backend import Linear, Model, total
from mpress.workload import Mode

FEW_CELLS = 12  # problems up to this size get a group row for every type; bigger ones only for types that occur once


class Columns(Protocol):
    """The part of the encoding these rows need."""

    model: Model
    byte: float
    cells: list[list[Linear]]
    last: list[list[Linear]]
    mode: list[list[dict[int, int]]]
    device: list[dict[int, int]]
    missing: list[int]

    @property
    def variant(self) -> Budget: ...

    def quantity(self, s: int, of: dict[tuple[int, int], float]) -> Linear: ...

    def per_cell(self, s: int, of: list[float]) -> Linear: ...

    def at_cut(self, s: int, of: list[float]) -> Linear: ...


class Budget(Protocol):
    @property
    def slack(self) -> bool: ...

    @property
    def reserve(self) -> tuple[int, ...]: ...


class MemoryRows:
    """Adds the rows of one problem to one model."""

    def __init__(self, problem: Problem, code: Columns) -> None:
        self.problem, self.code, self.model = problem, code, code.model
        self.types = problem.workload.types
        self.order = tuple(mode_order(cost) for cost in self.types)
        self.counts = totals(problem.workload)
        self.few = len(problem.workload.cells) <= FEW_CELLS
        self.resident = {(t, m): mode.resident_bytes * code.byte for t, cost in enumerate(self.types) for m, mode in enumerate(cost.modes)}

    def add(self) -> None:
        for s in range(self.problem.stages):
            static = self._static(s)
            room = self.problem.machine.usable_bytes(s) - (self.code.variant.reserve[s] if self.code.variant.reserve else 0)
            slack = self.model.variable(f"slack[{s}]") if self.code.variant.slack else -1
            if slack >= 0:
                self.code.missing.append(slack)
                static.term(slack, -1.0)
            self._rows(s, static, room * self.code.byte)

    def _static(self, s: int) -> Linear:
        """Held during the whole step: parameters and buffers (tied ones once), user inputs of all micro-batches, lent pools, losses."""
        work, code, byte = self.problem.workload, self.code, self.code.byte
        m = self.problem.micro_batches
        each = [
            cost.trainable_elements * work.bytes_per_trainable
            + (cost.parameter_elements - cost.trainable_elements) * work.bytes_per_frozen
            + cost.trainable_tensors * work.bytes_per_tensor
            + cost.buffer_bytes
            + cost.input_bytes * m
            for cost in self.types
        ]
        held = code.per_cell(s, [value * byte for value in each])
        ties: dict[str, tuple[int, list[int]]] = {}
        for t, cost in enumerate(self.types):
            for tie, elements in cost.shared_parameters:
                ties.setdefault(str(tie), (elements * work.bytes_per_trainable + work.bytes_per_tensor, []))[1].append(t)
            for buffer, bytes_ in cost.shared_buffers:
                ties.setdefault(f"buffer {buffer}", (bytes_, []))[1].append(t)
        for name, (bytes_, kinds) in ties.items():
            size = bytes_ * byte
            present = self.model.variable(f"tie[{s},{name}]", upper=1.0, integer=any(self.counts[t] > 1 for t in kinds))
            for t in kinds:
                held.add(code.cells[s][t], -size)
                self.model.at_most(f"tie[{s},{name},{t}]", total((1.0, code.cells[s][t])).term(present, -float(self.counts[t])))
            held.term(present, size)
        for r, row in enumerate(code.device):
            if s in row:
                held.term(row[s], float(self.problem.in_flight(r)))
        if s == self.problem.stages - 1:
            held.constant += self.types[work.cells[-1]].output_bytes * m * byte
        return held

    def _boundary(self, s: int, moment: Moment) -> Linear:
        outputs = [cost.output_bytes * self.code.byte for cost in self.types]
        own = [(cost.output_bytes - cost.kept_bytes) * self.code.byte for cost in self.types]
        gradients = [cost.gradient_bytes * self.code.byte for cost in self.types]
        held = Linear()
        if s > 0:
            held.add(self.code.at_cut(s - 1, outputs), float(moment.receives_output))
            held.add(self.code.at_cut(s - 1, gradients), float(moment.sent_gradient))
        if s < self.problem.stages - 1:
            held.add(self.code.at_cut(s, gradients), float(moment.receives_gradient))
            held.add(self.code.at_cut(s, outputs if moment.sent_alone else own), float(moment.sent_output))
        return held

    def _carried(self, s: int) -> Linear:
        """What a stage holds for each micro-batch because cells before its first one save it too."""
        if s == 0:
            return Linear()
        return self.code.at_cut(s - 1, [cost.carried_bytes * self.code.byte for cost in self.types])

    def _rows(self, s: int, static: Linear, room: float) -> None:
        everything = self.code.quantity(s, self.resident)
        reach = self._reach(s)
        groups = [self._group(s, t, m) for t, order in enumerate(self.order) if self.few or self.counts[t] == 1 for m in order]
        for word in (Word.F, Word.B):
            tail = self._tail(s, word, reach)
            for number, moment in enumerate(moments(self.problem, s, word)):
                beside = total((1.0, static), (1.0, self._boundary(s, moment)), (float(moment.others), everything))
                beside.add(self._carried(s), float(moment.others + 1))
                self.model.at_most(f"memory {word.value}{number}[{s}]", total((1.0, beside), (1.0, everything), (1.0, tail)), room)
                for t, m, used, prefix in groups:
                    peak = _peak(self.types[t].modes[m], word) * self.code.byte
                    name = f"memory {word.value}{number}[{s},{t},{m}]"
                    self.model.at_most(name, total((1.0, beside), (1.0, prefix)).add(used, peak), room)

    def _reach(self, s: int) -> list[dict[int, int]]:
        """reach[s,t,l]: 1 only if stage s ends with type t and has a cell of it in mode l or one behind l in the order."""
        found: list[dict[int, int]] = []
        for t, order in enumerate(self.order):
            row: dict[int, int] = {}
            for place in range(1, len(order)):
                variable = self.model.variable(f"reach[{s},{t},{order[place]}]", upper=1.0)
                behind = Linear({self.code.mode[s][t][m]: -1.0 for m in order[place:]})
                self.model.at_most(f"reach[{s},{t},{order[place]}]", behind.term(variable, 1.0))
                self.model.at_most(f"reach at cut[{s},{t},{order[place]}]", total((-1.0, self.code.last[s][t])).term(variable, 1.0))
                row[order[place]] = variable
            found.append(row)
        return found

    def _tail(self, s: int, word: Word, reach: list[dict[int, int]]) -> Linear:
        """peak - resident of the last cell: that of its type's last mode in the order; made monotone, which only lowers it."""
        tail = Linear()
        for t, order in enumerate(self.order):
            lowest = 0.0
            for place, m in enumerate(order):
                mode = self.types[t].modes[m]
                excess = (_peak(mode, word) - mode.resident_bytes) * self.code.byte
                if place == 0:
                    lowest = excess
                    tail.add(self.code.last[s][t], excess)
                elif excess < lowest:
                    tail.term(reach[t][m], excess - lowest)
                    lowest = excess
        return tail

    def _group(self, s: int, t: int, m: int) -> tuple[int, int, Linear, Linear]:
        """(t, m, use[s,t,m], resident bytes before the last cell of type t in mode m, that cell's own taken off)."""
        variable = self.code.mode[s][t][m]
        if self.counts[t] == 1:
            used = Linear({variable: 1.0})
        else:
            flag = self.model.variable(f"use[{s},{t},{m}]", upper=1.0, integer=True)
            self.model.at_most(f"use[{s},{t},{m}]", Linear({variable: 1.0, flag: -float(self.counts[t])}))
            self.model.at_most(f"use only if any[{s},{t},{m}]", Linear({flag: 1.0, variable: -1.0}))
            used = Linear({flag: 1.0})
        order = self.order[t]
        ahead = order[: order.index(m) + 1]
        prefix = Linear({self.code.mode[s][t][k]: self.resident[t, k] for k in ahead}).add(used, -self.resident[t, m])
        count = Linear({self.code.mode[s][t][k]: 1.0 for k in ahead})
        for other in range(len(self.types)):
            if other != t:
                prefix.add(self._others_before(s, t, other, count))
        return t, m, used, prefix

    def _others_before(self, s: int, t: int, other: int, count: Linear) -> Linear:
        """Resident bytes of type `other` certain to lie before the count-th cell of type t of the stage."""
        segments = self.problem.workload.segments
        mine = [k for k, (period, _) in enumerate(segments) if t in period]
        theirs = [k for k, (period, _) in enumerate(segments) if other in period]
        row = self.code.mode[s][other]
        everything = Linear({variable: self.resident[other, m] for m, variable in row.items()})
        if max(theirs) < min(mine):
            return everything
        if mine == theirs and len(mine) == 1 and segments[mine[0]][0].count(t) == 1 and segments[mine[0]][0].count(other) == 1:
            # between two cells of t there is one of `other`: at least count - 1 come before; the rest hold at most the largest each
            most = max(self.resident[other, m] for m in row)
            behind = total((1.0, self.code.cells[s][other]), (-1.0, count))
            behind.constant += 1.0
            return everything.add(behind, -most)
        return Linear()


def _peak(mode: Mode, word: Word) -> int:
    return mode.forward_peak_bytes if word is Word.F else mode.backward_peak_bytes
