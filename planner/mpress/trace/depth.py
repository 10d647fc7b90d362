"""Records a model whose layers repeat at a cost that hardly depends on how many there are: few layers, twice, then unrolled.

The result is the recording of all layers, or the reason why it must be made by recording all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from mpress.errors import InputError, MpressError
from mpress.graph import Graph
from mpress.options import Depth
from mpress.trace.rehearse import Over, Rehearsal
from mpress.trace.stacks import FEWEST, DepthError, Stack, find_stacks, truncated, unchanged
from mpress.trace.unroll import unroll
from mpress.trace.visits import Visit, Visits, Watcher

Record = Callable[[Watcher], Graph]
ENDS = (1, 2)  # how many repetitions at each end may look different: the first is cheaper and nearly always enough


@dataclass(frozen=True, slots=True)
class Recorded:
    """graph: None if all layers must be recorded.  note: how many were recorded, or why all.  tried: the model's forward has run."""

    graph: Graph | None
    note: str
    tried: bool


def record_few(model: nn.Module, record: Record, depth: Depth = Depth.FAST) -> Recorded:
    """Record `model` (as `record` does) with few layers of each stack; the model is the same afterwards.

    Two recordings must agree on what one more repetition adds.  If they do not, more repetitions at the ends may be special.
    """
    if depth is Depth.FULL:
        return Recorded(None, "all layers recorded, as asked", tried=False)
    stacks = find_stacks(model)
    if not stacks:
        return Recorded(None, f"all layers recorded, none repeat {FEWEST} times", tried=False)
    reason = ""
    for ends in ENDS:
        try:
            graph = _recorded(model, record, stacks, ends)
        except MpressError as error:
            where = f" ({error.where})" if error.where else ""
            reason = f"{error.message}{where}"
        else:
            return Recorded(graph, f"recorded {2 * ends + 2} of {', '.join(_words(stack) for stack in stacks)}", tried=True)
    return Recorded(None, f"all layers recorded: {reason}", tried=True)


def _recorded(model: nn.Module, record: Record, stacks: Sequence[Stack], ends: int) -> Graph:
    """The graph of all layers; raises DepthError, or whatever the recording refuses."""
    kept = 2 * ends + 2
    small, visits = _watched(model, record, stacks, kept)
    more = [stack.count - kept for stack in stacks]
    graph, all_visits = unroll(small, visits, stacks, ends, more)
    smaller, fewer_visits = _watched(model, record, stacks, kept - 1)
    checkpoints = small.checkpoints - smaller.checkpoints
    if checkpoints and len(set(more)) > 1:
        raise DepthError("several stacks of different depths are checkpointed")
    less, fewer = unroll(replace(small, checkpoints=smaller.checkpoints), visits, stacks, ends, [-1] * len(stacks))
    if (less, fewer) != (smaller, fewer_visits):
        raise DepthError(f"the recordings of {kept - 1} and of {kept} repetitions do not agree")
    rehearsal = Rehearsal(model, stacks, graph, all_visits)
    try:
        with rehearsal.standing_in(), unchanged(model):
            record(rehearsal)
    except InputError as error:
        raise DepthError(f"the forward reaches into its layers from outside of them: {error.message}", error.where) from None
    except Over:
        return replace(graph, checkpoints=small.checkpoints + checkpoints * more[0])
    raise DepthError("the forward of all layers did not end")


def _watched(model: nn.Module, record: Record, stacks: Sequence[Stack], kept: int) -> tuple[Graph, tuple[Visit, ...]]:
    """Record with few repetitions, and note how the layers are called."""
    with truncated(model, stacks, kept):
        watcher = Visits(model, stacks)
        with watcher.watching():
            return record(watcher), watcher.visits


def _words(stack: Stack) -> str:
    unit = "" if stack.period == 1 else f" times {stack.period}"
    return f"{stack.count}{unit} layers in '{stack.container}'"
