"""One id for one view of one memory: an operator that writes in place returns the tensor it wrote, not a new one.

The recorder gives every result an id.  After this pass the result of `relu_(x)` is `x` itself where both have one layout, so that whoever
asks where a tensor comes from finds the operator that allocated it, and a tensor that crosses a cut has one name on both sides.
"""

from __future__ import annotations

from dataclasses import replace

from mpress.graph import Argument, Graph, Op, Ref, Tensor


def merge_in_place(graph: Graph) -> Graph:
    """The same graph with dense ids in the old order, results of in-place operators merged with what they wrote."""
    same: dict[int, int] = {}

    def found(tensor: int) -> int:
        while tensor in same:
            tensor = same[tensor]
        return tensor

    for op in (*graph.setup, *graph.ops):
        for output in op.outputs if op.mutates else ():
            for written in op.mutates:
                if output >= 0 and found(output) != found(written) and _layout(graph.tensors[output]) == _layout(graph.tensors[written]):
                    same[found(output)] = found(written)
                    break
    if not same:
        return graph
    grown = {found(t) for t in same if graph.tensors[t].differentiable}
    ids: dict[int, int] = {}
    tensors: list[Tensor] = []
    for tensor in graph.tensors:
        if tensor.id not in same:
            ids[tensor.id] = len(tensors)
            tensors.append(replace(tensor, id=len(tensors), differentiable=tensor.differentiable or tensor.id in grown))

    def new(tensor: int) -> int:
        return ids[found(tensor)] if tensor >= 0 else tensor

    def argument(value: Argument) -> Argument:
        if isinstance(value, Ref):
            return Ref(new(value.tensor))
        return tuple(argument(item) for item in value) if isinstance(value, tuple) else value

    def rewritten(op: Op) -> Op:
        return replace(
            op,
            args=tuple(argument(a) for a in op.args),
            kwargs=tuple((key, argument(a)) for key, a in op.kwargs),
            outputs=tuple(new(t) for t in op.outputs),
            mutates=tuple(new(t) for t in op.mutates),
        )

    return replace(
        graph,
        ops=tuple(rewritten(op) for op in graph.ops),
        setup=tuple(rewritten(op) for op in graph.setup),
        tensors=tuple(tensors),
        parameters=tuple(replace(p, tensor=new(p.tensor)) for p in graph.parameters),
        buffers=tuple(replace(b, tensor=new(b.tensor), initial=new(b.initial)) for b in graph.buffers),
        inputs=tuple(replace(i, tensor=new(i.tensor)) for i in graph.inputs),
        loss=new(graph.loss),
        seed=new(graph.seed),
        contributions=tuple(replace(c, tensor=new(c.tensor)) for c in graph.contributions),
    )


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.storage, tensor.shape, tensor.stride, tensor.offset, tensor.dtype)
