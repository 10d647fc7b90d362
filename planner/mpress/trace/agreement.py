"""Holds a recorded step against the real one: each function compares one thing and raises InputError("proof") at the first difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpress.errors import InputError
from mpress.graph import Graph, Kind, Op, Phase
from mpress.peak import step_peak
from mpress.trace.interpret import Interpreted, Results, contradiction, first_buffers
from mpress.trace.literals import TARGET as LITERAL
from mpress.trace.real_model import HINT, Outcome
from mpress.trace.real_step import Maker, Observed, Ran, digest, ran_at

_DIGITS = 1e-6
_REBUILD = "build_model must build the same model on the device 'meta' as on a CPU"


def same_state(graph: Graph, module: nn.Module) -> None:
    """Names, shapes and types of parameters and buffers."""
    tables: tuple[tuple[str, Any, Any], ...] = (
        ("parameter", graph.parameters, module.named_parameters(remove_duplicate=False)),
        ("buffer", graph.buffers, module.named_buffers(remove_duplicate=False)),
    )
    for kind, holders, named in tables:
        real = {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in named}
        tensors = {name: graph.tensors[holder.tensor] for holder in holders for name in holder.names}
        said = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for name in sorted(real.keys() | said.keys()):
            if real.get(name) != said.get(name):
                message = f"{kind} '{name}' is {said.get(name, 'missing')} in the recorded model, expected {real.get(name, 'nothing')}"
                raise InputError("proof", message, name, _REBUILD)


def same_first_values(graph: Graph, buffers: dict[str, torch.Tensor]) -> None:
    """The values that building the model gives its buffers."""
    for name, value in first_buffers(graph).items():
        if digest(value.to(buffers[name].dtype)) != digest(buffers[name]):
            message = f"the recorded construction gives buffer '{name}' another first value than build_model on a CPU"
            raise InputError("proof", message, name, _REBUILD)


def same_again(first: Observed, second: Observed) -> None:
    """Python state must not change what the step does."""
    for number in range(max(len(first.ran), len(second.ran))):
        a = first.ran[number] if number < len(first.ran) else None
        b = second.ran[number] if number < len(second.ran) else None
        if a is not None and b is not None and a.target == b.target and a.digests == b.digests:
            continue
        shown = b or a
        assert shown is not None
        what = (
            f"runs {b.target if b else 'nothing'} where the first ran {a.target if a else 'nothing'}"
            if a is None or b is None or a.target != b.target
            else f"computes other values in {a.target}"
        )
        message = f"the same step run a second time does something else: operator {number} {what}{_code(shown)}"
        raise InputError("proof", message, ran_at(shown), HINT)


def same_calls(graph: Graph, seen: Observed) -> None:
    """The operators' names, in order."""
    for number in range(max(len(graph.ops), len(seen.ran))):
        op = graph.ops[number] if number < len(graph.ops) else None
        ran = seen.ran[number] if number < len(seen.ran) else None
        if op is not None and ran is not None and (_called(op), op.phase is Phase.BACKWARD) == (ran.target, ran.backward):
            continue
        found = f"{_called(op)} ({op.phase.value})" if op is not None else "no more operator"
        if ran is None:
            assert op is not None
            raise contradiction(op, number, "is recorded, but the real step is over before it")
        expected = f"{ran.target} ({'backward' if ran.backward else 'forward'})"
        message = f"the recorded step is not the real one: operator {number} is really {expected}{_code(ran)}, but {found} was recorded"
        raise InputError("proof", message, ran_at(ran), HINT)


class Walk:
    """Compares the results of each op while the graph runs."""

    def __init__(self, seen: Observed) -> None:
        self._seen = seen

    def watch(self, op: Op, results: Results) -> None:
        """See `interpret`."""
        ran = self._seen.ran[op.id]
        for place, (tensor, value) in enumerate(zip(op.outputs, results, strict=True)):
            expected = ran.digests[place] if place < len(ran.digests) else b""
            if tensor >= 0 and value is not None and expected and digest(value) != expected:
                which = f" in result {place}" if op.multi else ""
                raise contradiction(op, op.id, f"computes other values{which} than the real step")


def same_outcome(graph: Graph, found: Interpreted, real: Outcome) -> None:
    """Loss, gradients and buffers of the graph, once all its operators agree."""
    if digest(found.loss) != digest(real.loss):
        raise contradiction(graph.ops[-1], len(graph.ops) - 1, f"ends a step of loss {found.loss.item()}, expected {real.loss.item()}")
    wanted = {p.names[0] for p in graph.parameters} & real.gradients.keys()
    for name in sorted(found.gradients.keys() | wanted):
        if name not in found.gradients or name not in wanted:
            message = (
                f"parameter '{name}' gets {'a' if name in found.gradients else 'no'} gradient in the recorded step, unlike the real one"
            )
            raise InputError("proof", message, name, HINT)
        if digest(found.gradients[name]) != digest(real.gradients[name]):
            parts = {c.tensor for c in graph.contributions if c.parameter == name}
            op = next(op for op in reversed(graph.ops) if parts & set(op.outputs))
            raise contradiction(op, op.id, f"ends a gradient of parameter '{name}' that is not the real step's")
    for buffer in graph.buffers:
        name = buffer.names[0]
        if digest(found.buffers[name]) != digest(real.buffers[name]):
            message = f"the recorded step leaves another value in buffer '{name}' than the real one"
            raise InputError(
                "proof", message, name, "write into a buffer in place (self.x.copy_(y)); a new tensor under its name is not seen"
            )


def same_unwatched(watched: Outcome, plain: Outcome, exact: bool) -> None:
    """Watching must change nothing; exact: bit by bit, else to six digits."""
    pairs = [("the loss", watched.loss, plain.loss)]
    for words, a, b in (("gradient", watched.gradients, plain.gradients), ("buffer", watched.buffers, plain.buffers)):
        if a.keys() != b.keys():
            raise InputError("proof", f"the step gives other {words}s when it is watched", str(sorted(a.keys() ^ b.keys())[0]), HINT)
        pairs += [(f"{words} '{name}'", a[name], b[name]) for name in a]
    for words, one, other in pairs:
        if digest(one) == digest(other):
            continue
        if exact or not torch.allclose(one, other, rtol=_DIGITS, atol=_DIGITS * float(other.abs().max()), equal_nan=True):
            raise InputError("proof", f"the step gives another value of {words} when it is watched", words, HINT)


def writes_views(graph: Graph) -> bool:
    """Whether an operator writes into part of a tensor, so that autograd has to differentiate views."""
    views = {tensor for op in graph.ops if op.view for tensor in op.outputs}
    return any(tensor in views for op in graph.ops for tensor in op.mutates)


def same_saved(graph: Graph, seen: Observed) -> None:
    """What autograd saves, storage by storage; what Python alone keeps for the backward must at least be alive."""
    loss = graph.tensors[graph.loss].storage
    makers: dict[int, Maker] = {}
    for op in graph.ops:
        made = 0
        for tensor in op.outputs:
            storage = graph.tensors[tensor].storage if tensor >= 0 else -1
            if storage >= 0 and storage not in makers and graph.storages[storage].kind is Kind.COMPUTED:
                makers[storage] = (op.id, made)
                made += 1
    said = {makers[s.id]: s.bytes for s in graph.storages if s.saved and s.kind is Kind.COMPUTED and s.id != loss and s.id in makers}
    for maker in sorted(said.keys() | seen.saved.keys()):
        op = graph.ops[maker[0]]
        if maker not in said:
            raise contradiction(op, op.id, f"makes {seen.saved[maker]} bytes that autograd saves, but they were not recorded as saved")
        if maker not in seen.held:
            raise contradiction(
                op, op.id, f"makes {said[maker]} bytes recorded as saved, but the real step has freed them before the backward"
            )
        if said[maker] != seen.held[maker]:
            raise contradiction(op, op.id, f"makes {said[maker]} bytes that are saved, expected {seen.held[maker]}")


def same_peak(graph: Graph, seen: Observed) -> None:
    """The most bytes that live after an operator, as the lifetimes in the graph tell it."""
    said = step_peak(graph)
    if said.bytes != seen.peak:
        op = graph.ops[max(said.op, 0)]
        raise contradiction(op, op.id, f"is where {said.bytes} bytes live at the peak, expected {seen.peak}")


def _called(op: Op) -> str:
    return "aten.lift_fresh.default" if op.target == LITERAL else op.target


def _code(ran: Ran) -> str:
    return f" at `{ran.source.code}`" if ran.source.code else ""
