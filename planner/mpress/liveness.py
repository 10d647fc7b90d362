"""The memory of a cell program, byte by byte, read off its lines.

Parameters, buffers, the module's inputs and gradient buffers are excluded (the stage holds them all step long); temporaries for
parameter gradients are included until their GRAD line.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpress.dataflow import Dataflow
from mpress.program import CellProgram, Verb
from mpress.units import Bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one cell and one micro-batch.  resident: kept between forward and backward; swapped: copied away in between.

    What the cell borrows (an earlier cell of the stage saves it, or the stage carries it) counts nowhere.
    """

    forward_peak: Bytes
    backward_peak: Bytes
    resident: Bytes
    swapped: Bytes


def footprint(flow: Dataflow, program: CellProgram) -> Footprint:
    """Walk both functions of the program; `flow` is the study of its cell."""
    borrowed = frozenset(flow.cell.borrowed)
    kept: set[int] = set()
    swapped: set[int] = set()
    for line in program.forward:
        if line.verb in (Verb.SAVE, Verb.SWAP_OUT):
            (kept if line.verb is Verb.SAVE else swapped).update(flow.tensors[t].storage for t in line.tensors)
    kept -= borrowed
    carried = kept | swapped
    arriving = {s for t in flow.cell.gradient_inputs if (s := flow.storage(t)) is not None}
    return Footprint(
        forward_peak=_peak(flow, program, Verb.COMPUTE, set(flow.inputs - borrowed), flow.inputs | carried),
        backward_peak=_peak(flow, program, Verb.RECOMPUTE, carried | arriving, arriving),
        resident=Bytes(sum(flow.sizes[s] for s in kept)),
        swapped=Bytes(sum(flow.sizes[s] for s in swapped)),
    )


def _peak(flow: Dataflow, program: CellProgram, phase: Verb, live: set[int], held: set[int] | frozenset[int]) -> Bytes:
    """The largest sum of live storages; a line allocates all its outputs before anything dies."""
    lines = program.forward if phase is Verb.COMPUTE else program.backward
    current = sum(flow.sizes[s] for s in live)
    peak = current
    saved = {flow.tensors[t].storage for t in program.saved}
    for line in lines:
        if line.verb in (Verb.COMPUTE, Verb.RECOMPUTE):
            made = flow.made_storages(flow.ops[line.op])
            fresh = [s for s in made if s not in live]
            # what is carried already is made twice: it lives for this line only
            double = [s for s in made if line.verb is Verb.RECOMPUTE and s in saved]
            fresh = [s for s in fresh if s not in double]
            live.update(fresh)
            current += sum(flow.sizes[s] for s in fresh)
            peak = max(peak, current + sum(flow.sizes[s] for s in double))
        elif line.verb is Verb.DELETE:
            dead = {flow.tensors[t].storage for t in line.tensors} & live - held
            live -= dead
            current -= sum(flow.sizes[s] for s in dead)
    return Bytes(peak)
