"""Refuses buffers that a pipeline would not keep as the user's own module does.

Micro-batches are in flight together: the forward of a later one has written a buffer before the backward of an earlier one runs.
That everything which uses a written buffer stays on one stage is the matter of mpress.cuts; a buffer nobody writes is a constant.
"""

from __future__ import annotations

from mpress.errors import InputError
from mpress.graph import Graph, Op, Phase, reads


def check_buffers(graph: Graph) -> None:
    """Raise InputError("buffer") for a buffer that is written in the backward, or whose later value a backward would see."""
    names = {graph.tensors[buffer.tensor].storage: buffer.names[0] for buffer in graph.buffers}
    written: dict[str, Op] = {}
    for op in graph.ops:
        for tensor in op.mutates:
            name = names.get(graph.tensors[tensor].storage)
            if name is None or op.repeats >= 0:
                continue
            if op.phase is Phase.BACKWARD:
                message = f"buffer '{name}' is written while the backward runs{_line(op)}"
                raise InputError("buffer", message, op.source.place(name), "write it in the forward")
            written.setdefault(name, op)
    needed: dict[str, Op] = {}
    for op in graph.ops:
        # running statistics are arguments of this operator, but in training it does not look at them
        if op.phase is Phase.BACKWARD and op.repeats < 0 and not op.name.endswith("batch_norm_backward"):
            for tensor in reads(op):
                needed.setdefault(names.get(graph.tensors[tensor].storage, ""), op)
    for name, op in written.items():
        if name in needed:
            message = f"buffer '{name}' is written in the forward{_line(op)} and needed in the backward, for {needed[name].name}"
            hint = "several micro-batches are in flight: compute with a copy, buffer.clone()"
            raise InputError("buffer", message, op.source.place(name), hint)


def _line(op: Op) -> str:
    return f" (`{op.source.code}`)" if op.source.code else ""
