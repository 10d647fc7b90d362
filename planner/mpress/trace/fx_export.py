"""The recorded step as a torch.fx graph, the form other tools read (`--dump-fx` prints it)."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from mpress.graph import Argument, Graph, Name, Phase, Ref
from mpress.trace.literals import TARGET, literal


def to_fx(graph: Graph) -> fx.GraphModule:
    """One placeholder a parameter, buffer, input and the loss gradient; one call_function an op; returns the loss and the contributions.

    node.meta holds "phase", "module" and "source" ("file:line").
    """
    export = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    for holder in graph.holders:
        nodes[holder.tensor] = export.placeholder(_identifier(holder.names[0]))
    for item in graph.inputs:
        nodes[item.tensor] = export.placeholder(_identifier(item.name))
    nodes[graph.seed] = export.placeholder("loss_gradient")
    for op in graph.ops:
        kwargs = {key: _value(argument, nodes) for key, argument in op.kwargs}
        node = export.call_function(_function(op.target), tuple(_value(a, nodes) for a in op.args), kwargs)
        backward = op.phase is Phase.BACKWARD
        node.meta.update(phase="backward" if backward else "forward", module=op.module, source=f"{op.source.file}:{op.source.line}")
        if not op.multi:
            if op.outputs and op.outputs[0] >= 0:
                nodes[op.outputs[0]] = node
            continue
        for index, tensor in enumerate(op.outputs):
            if tensor >= 0:
                nodes[tensor] = export.call_function(operator.getitem, (node, index))
    export.output((nodes[graph.loss], tuple(nodes[c.tensor] for c in graph.contributions)))
    return fx.GraphModule(torch.nn.Module(), export)


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _function(target: str) -> Any:
    if target == TARGET:
        return literal
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def _value(argument: Argument, nodes: dict[int, fx.Node]) -> Any:
    if isinstance(argument, Ref):
        return nodes[argument.tensor]
    if isinstance(argument, Name):
        return torch.device(argument.value) if argument.group == "device" else getattr(torch, argument.value)
    if isinstance(argument, tuple):
        return [_value(item, nodes) for item in argument]
    return argument
