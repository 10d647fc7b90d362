"""Where the step recorded for a GPU may differ from a CPU's: dropout, attention, autocast, and the layouts that follow from them.

Operators are compared by site: the phase, the module and the line of the user's code they come from.  Copies, casts and views are left
out, because another kernel may lay its result out differently and the next `reshape` then copies or does not.
"""

from __future__ import annotations

from mpress.errors import InputError
from mpress.graph import Graph, Op, Phase

_Site = tuple[Phase, str, str, int]
_LAYOUT = frozenset({"clone", "_to_copy", "copy_", "_unsafe_view", "contiguous", "detach", "alias"})
_MARKS = ("native_dropout", "_scaled_dot_product", "_efficient_attention", "_flash_attention", "_cudnn_attention", "_fused_attention")


def check_substitutions(cuda: Graph, cpu: Graph) -> None:
    """Raise InputError("proof") at the first site where the views differ and no operator of a GPU was put in."""
    for view in ("parameters", "buffers", "inputs"):
        assert len(getattr(cuda, view)) == len(getattr(cpu, view)), f"the views have different {view}"
    ours, theirs = _sites(cuda), _sites(cpu)
    marked = {site[1:] for found in (ours, theirs) for site, ops in found.items() if any(_mark(op) for op in ops)}
    for site in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(site, []), theirs.get(site, [])
        if site[1:] in marked or [_words(cuda, op) for op in a] == [_words(cpu, op) for op in b]:
            continue
        op = (a or b)[0]
        message = (
            f"the step recorded for GPUs differs from the CPU's in more than dropout, attention and autocast: "
            f"{', '.join(o.name for o in a) or 'nothing'} for {', '.join(o.name for o in b) or 'nothing'} (`{op.source.code}`)"
        )
        place = ", ".join(word for word in (op.source.place(), f"module '{op.module}'" if op.module else "") if word)
        raise InputError("proof", message, place, "do not branch on what kind of operators run; --no-prove plans without this check")


def _sites(graph: Graph) -> dict[_Site, list[Op]]:
    found: dict[_Site, list[Op]] = {}
    for op in graph.ops:
        summing = op.phase is Phase.BACKWARD and op.forward_op < 0  # which branch comes last is not the user's line's doing
        if not op.view and op.name not in _LAYOUT and not summing:
            found.setdefault((op.phase, op.module, op.source.file, op.source.line), []).append(op)
    return found


def _mark(op: Op) -> bool:
    return op.name.startswith(_MARKS)


def _words(graph: Graph, op: Op) -> tuple[str, tuple[tuple[int, ...], ...]]:
    return op.target, tuple(graph.tensors[t].shape for t in op.outputs if t >= 0)
