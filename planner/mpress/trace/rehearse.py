"""What happens around repeated layers, for all of them: the forward runs with every layer, but no layer runs.

Few recorded layers stand for all, so a recording never sees code around them that treats another one differently (`if i == 20`).
Here the model's own forward goes through all layers; each call of a layer only checks what it is given and returns tensors of the right
shapes.  Whatever else is called must be, operator by operator, what the unrolled Graph says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpress.errors import MpressError
from mpress.graph import Graph, Kind, Op, Phase, Ref
from mpress.trace.calls import Call
from mpress.trace.recorder import Recorder
from mpress.trace.stacks import DepthError, Stack
from mpress.trace.visits import Given, Made, Visit, layers_of, mapped, noted, plain


class Over(MpressError):
    """The forward is over, and nothing after it is wanted."""

    def __init__(self) -> None:
        super().__init__("depth", "the forward is over")


class Rehearsal:
    """Follows a forward in which no layer runs.  Use: `standing_in`, and in it a recording with this watcher, which ends in Over."""

    def __init__(self, model: nn.Module, stacks: Sequence[Stack], graph: Graph, visits: Sequence[Visit]) -> None:
        self._layers = list(layers_of(model, stacks))
        self._graph, self._visits = graph, visits
        self._next = 0
        self._op = 0  # the operator of the graph that comes next
        self._calls = 0  # how many calls of the recorder are matched with operators
        self._matched: list[tuple[Call, Op]] = []
        self._tokens: dict[int, Made | Given] = {}
        self._tensors: dict[Made | Given, torch.Tensor] = {}
        self._recorder: Recorder | None = None
        self._anchor = torch.Tensor()

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """No layer has parameters or a forward of its own in this block."""
        before = [dict(layer.__dict__) for _, layer in self._layers]
        try:
            for path, layer in self._layers:
                layer.__dict__.update(_modules={}, _parameters={}, _buffers={}, forward=self._forward(path))
            yield
        finally:
            for (_, layer), attributes in zip(self._layers, before, strict=True):
                layer.__dict__.clear()
                layer.__dict__.update(attributes)

    def begins(self, recorder: Recorder) -> None:
        """The forward is about to begin."""
        self._recorder = recorder
        with recorder.paused():
            self._anchor = torch.empty((), requires_grad=True)

    def forward_ends(self, recorder: Recorder) -> None:
        """Compare everything around the layers; raises Over if it is what the graph says, else DepthError."""
        self._match(recorder)
        forward = sum(op.phase is Phase.FORWARD for op in self._graph.ops)
        if self._next != len(self._visits) or self._op != forward:
            raise DepthError("the forward does not go through all layers as through the first of them")
        makers = {tensor: Made(op.id, position) for op in self._graph.ops for position, tensor in enumerate(op.outputs)}
        for call, op in self._matched:
            if self._called(call) != self._said(op, makers):
                raise DepthError("code around the layers does not treat all of them alike", op.source.place(op.module))
        raise Over

    def _forward(self, path: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            assert recorder is not None
            self._match(recorder)
            visit = self._visits[self._next] if self._next < len(self._visits) else None
            if visit is None or visit.path != path or visit.first != self._op:
                raise DepthError(f"'{path}' is not called as the first layers are")
            given = plain((args, kwargs))
            if mapped(noted(given, recorder), self._token) != visit.inputs:
                raise DepthError(f"'{path}' is not given what the first layers are given")
            mapped(given, lambda tensor: self._tensors.setdefault(self._token(recorder.find(tensor)), tensor), torch.Tensor)
            self._next, self._op = self._next + 1, visit.end
            with recorder.paused():
                return self._result(visit.outputs, recorder)

        return forward

    def _match(self, recorder: Recorder) -> None:
        """The calls since the last layer are the next operators of the graph."""
        for call in recorder.calls[self._calls :]:
            self._tokens.update((value, Made(self._op, position)) for position, value in enumerate(call.outputs))
            if self._op >= len(self._graph.ops):
                raise DepthError("the forward of all layers calls more operators than few layers explain")
            self._matched.append((call, self._graph.ops[self._op]))
            self._op += 1
        self._calls = len(recorder.calls)

    def _token(self, value: int) -> Made | Given:
        recorder = self._recorder
        assert recorder is not None
        return self._tokens[value] if value in self._tokens else Given(recorder.values[value].name)

    def _result(self, outputs: Any, recorder: Recorder) -> Any:
        """What the layer returns, with new tensors where it made them."""
        if isinstance(outputs, Made | Given):
            known = self._tensors.get(outputs)
            if known is None:
                if isinstance(outputs, Given):
                    raise DepthError(f"a layer returns '{outputs.name}'")
                known = self._tensors[outputs] = self._tensor(outputs)
                self._tokens[recorder.adopt(known, Kind.COMPUTED, "")] = outputs
            return known
        if not isinstance(outputs, tuple):
            return outputs
        kind, items = outputs[0], outputs[1:]
        if issubclass(kind, tuple | list):
            parts = [self._result(item, recorder) for item in items]
            return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
        return kind(**{key: self._result(item, recorder) for key, item in items})

    def _tensor(self, made: Made) -> torch.Tensor:
        said = self._graph.tensors[self._graph.ops[made.op].outputs[made.position]]
        empty = torch.empty_strided(said.shape, said.stride, dtype=getattr(torch, said.dtype))
        result: torch.Tensor = _Layer.apply(self._anchor, empty) if said.differentiable else empty  # type: ignore[no-untyped-call]
        return result

    def _called(self, call: Call) -> tuple[Any, ...]:
        """What the recorder saw, with tensors by where they come from."""

        def argument(value: Any) -> Any:
            if isinstance(value, Ref):
                return self._token(value.tensor)
            return tuple([argument(item) for item in value]) if isinstance(value, tuple) else value

        mutates = tuple([self._token(value) for value in call.mutates])
        return (
            call.target, argument(call.args), argument(call.kwargs), mutates, call.multi, call.module, call.source, call.view,
            call.random_key, call.flops, call.bytes_moved, call.atom,
        )  # fmt: skip

    def _said(self, op: Op, makers: dict[int, Made]) -> tuple[Any, ...]:
        """What the graph says, in the same form."""

        def token(tensor: int) -> Made | Given:
            return makers[tensor] if tensor in makers else Given(self._graph.tensors[tensor].name)

        def argument(value: Any) -> Any:
            if isinstance(value, Ref):
                return token(value.tensor)
            return tuple([argument(item) for item in value]) if isinstance(value, tuple) else value

        mutates = tuple([token(tensor) for tensor in op.mutates])
        return (
            op.target, argument(op.args), argument(op.kwargs), mutates, op.multi, op.module, op.source, op.view,
            op.random_key, op.flops, op.bytes_moved, op.atom,
        )  # fmt: skip


class _Layer(torch.autograd.Function):
    """Gives a tensor a history, as the result of a layer has one."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """The result itself."""
        return result
