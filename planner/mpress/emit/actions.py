"""What the plan does with saved tensors, counted by action and by the module and operator that make them.

Bytes and tensors count one micro-batch, summed over all stages; `held_bytes` multiplies by the micro-batches a stage keeps in flight,
which is what an action moves off (or leaves on) the GPUs at the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpress.cells import Cell, Chain
from mpress.costs import op_dtype, op_seconds
from mpress.dataflow import study
from mpress.graph import Graph, Op
from mpress.machine import Machine
from mpress.plan import HOST, Plan, in_flight
from mpress.program import CellProgram, Verb
from mpress.units import Bytes, Seconds
from mpress.workload import Workload

ACTIONS = ("keep", "recompute", "swap_host", "swap_d2d")


@dataclass(frozen=True, slots=True)
class ActionReport:
    """What happens to the tensors of one kind ("mlp.c_fc addmm"): an action of ACTIONS, how many, how much.

    seconds: compute time of a step spent on rebuilding them (recompute only; swaps cost the stall seconds of stages).
    """

    kind: str
    action: str
    tensors: int
    bytes: Bytes
    held_bytes: Bytes
    seconds: Seconds


def count_actions(
    graph: Graph, chain: Chain, workload: Workload, programs: tuple[tuple[CellProgram, ...], ...], machine: Machine, plan: Plan
) -> tuple[ActionReport, ...]:
    """One row a kind of tensor and action, by action, the biggest first."""
    kinds = [_Kinds(graph, chain.cells[index]) for index in chain.representatives]
    counts: dict[tuple[str, str], list[int]] = {}
    costs: dict[tuple[str, str], float] = {}
    for s, stage in enumerate(plan.stages):
        depth = in_flight(plan.schedule, len(plan.stages), s, plan.micro_batches)
        away = sum(share.bytes for share in stage.shares)
        peers = sum(share.bytes for share in stage.shares if share.pool != HOST)
        device = machine.devices[stage.device]
        for cell, index in zip(chain.cells[stage.first : stage.last], stage.modes, strict=True):
            mode, program, kind = workload.types[cell.type].modes[index], programs[cell.type][index], kinds[cell.type]
            saved = dict.fromkeys(graph.tensors[root].storage for root in program.saved)
            rows = [(storage, "keep", int(graph.storages[storage].bytes)) for storage in saved if storage not in mode.swap]
            rows += [(storage, "recompute", int(graph.storages[storage].bytes)) for storage in mode.recompute]
            for storage in mode.swap:
                size = int(graph.storages[storage].bytes)
                striped = size * peers // away if away else 0
                rows += [(storage, action, part) for action, part in (("swap_d2d", striped), ("swap_host", size - striped)) if part]
            for storage, action, size in rows:
                row = counts.setdefault((kind.of_storage(storage), action), [0, 0, 0])
                row[0] += 1
                row[1] += size
                row[2] += size * depth
            for line in program.backward:
                if line.verb is Verb.RECOMPUTE:
                    op = kind.flow.ops[line.op]
                    key = (kind.of_op(op), "recompute")
                    counts.setdefault(key, [0, 0, 0])  # rebuilt on the way to another tensor
                    costs[key] = costs.get(key, 0.0) + plan.micro_batches * op_seconds(op, device, op_dtype(op, kind.flow))
    order = sorted(counts.items(), key=lambda item: (ACTIONS.index(item[0][1]), -item[1][2], item[0][0]))
    return tuple(
        ActionReport(kind, action, row[0], Bytes(row[1]), Bytes(row[2]), Seconds(costs.get((kind, action), 0.0)))
        for (kind, action), row in order
    )


class _Kinds:
    """Names the tensors of one cell type in the user's words: the module that makes them, without its block's number, and the operator."""

    def __init__(self, graph: Graph, cell: Cell) -> None:
        self.flow = study(graph, cell)
        self._cell = cell
        self._makers: dict[int, Op] = {}
        for index in cell.forward:
            op = self.flow.ops[index]
            for output in op.outputs:
                if output >= 0 and not op.view:
                    self._makers.setdefault(graph.tensors[output].storage, op)

    def of_storage(self, storage: int) -> str:
        """ "mlp.c_fc addmm", or "mlp input" for what an earlier cell made."""
        op = self._makers.get(storage)
        return self.of_op(op) if op is not None else f"{self._cell.name.removeprefix(self._cell.prefix)} input"

    def of_op(self, op: Op) -> str:
        """ "mlp.c_fc addmm"."""
        return op_words(op, self._cell.prefix)


def op_words(op: Op, prefix: str = "") -> str:
    """ "mlp.c_fc addmm": the module, without a prefix such as "h.3.", and the operator; a Function of the user's own is named before it."""
    module = f"{op.module}.".removeprefix(prefix).rstrip(".")
    name = op.name.strip("_").removeprefix("scaled_dot_product_").removeprefix("native_").removesuffix("_for_cpu")
    return " ".join(word for word in (module, op.atom, name) if word)
