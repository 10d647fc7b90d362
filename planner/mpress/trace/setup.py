"""Adds to a Graph how its buffers get their first values: Graph.setup, Buffer.initial and Buffer.persistent, from the watched constructor.

Refuses buffers that no program could keep as the user's module does: without a value, or written while something else sees the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mpress.errors import InputError
from mpress.graph import Argument, Buffer, Graph, Kind, Name, Op, Phase, Ref, Source, Storage, Tensor, reads
from mpress.trace.construction import LITERAL, Construction, Layout, Step, UnknownValueError
from mpress.units import Bytes, Flops

_PLACES = frozenset({"device", "pin_memory", "layout"})  # keywords that say where a tensor lies; a program decides that itself
_GROUPS: Mapping[type, str] = {torch.dtype: "dtype", torch.memory_format: "memory_format", torch.layout: "layout"}


@dataclass(frozen=True, slots=True)
class Made:
    """What building the model says about buffers, by each of their names.

    steps: numbers of the steps that make the value.  unknown: why there is no value, as the end of "it is ...".
    shared: name -> another buffer or parameter that sees the same memory as another tensor.
    """

    construction: Construction
    layouts: Mapping[str, Layout]
    steps: Mapping[str, tuple[int, ...]]
    unknown: Mapping[str, str]
    persistent: frozenset[str]
    shared: Mapping[str, str]


def first_values(model: nn.Module, construction: Construction) -> Made:
    """Look up all buffers of a model that `construction` watched being built."""
    made = Made(construction, layouts := {}, steps := {}, unknown := {}, frozenset(_persistent(model)), _shared(model))
    for name, tensor in model.named_buffers(remove_duplicate=False):
        try:
            layout = construction.layout(tensor) if tensor.is_meta else construction.literal(tensor)
            steps[name] = construction.closure(layout)
            layouts[name] = layout
        except UnknownValueError as error:
            unknown[name] = str(error)
    return made


def _persistent(model: nn.Module) -> list[str]:
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


def _shared(model: nn.Module) -> dict[str, str]:
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    found: dict[str, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        other, first = seen.setdefault(tensor.untyped_storage()._cdata, (name, tensor))
        if first is not tensor:
            found[name] = other
            found.setdefault(other, name)
    return found


def with_setup(graph: Graph, made: Made) -> Graph:
    """The graph with setup operators and what they make for its buffers.  Raises InputError("buffer")."""
    used = {graph.tensors[t].storage for op in graph.ops for t in reads(op)}
    written = {graph.tensors[t].storage: op for op in graph.ops for t in op.mutates}
    writer = _Writer(graph, made.construction)
    chosen: dict[str, Layout] = {}
    for buffer in graph.buffers:
        name = buffer.names[0]
        storage = graph.tensors[buffer.tensor].storage
        if storage in written:
            _check_sharing(buffer, made, written[storage])
        if any(one in made.layouts for one in buffer.names):
            chosen[name] = next(made.layouts[one] for one in buffer.names if one in made.layouts)
        elif storage in used and made.persistent.isdisjoint(buffer.names):
            reason = next((made.unknown[one] for one in buffer.names if one in made.unknown), "not made by the constructor")
            message = f"buffer '{name}' is not part of the state_dict (persistent=False), and its value is {reason}"
            raise InputError("buffer", message, name, "register it with persistent=True, or compute it with torch operators")
    for number in sorted({n for name in chosen for n in made.steps[name]}):
        writer.step(made.construction.steps[number])
    buffers = tuple(
        replace(
            buffer,
            persistent=not made.persistent.isdisjoint(buffer.names),
            initial=writer.cast(chosen[buffer.names[0]], graph.tensors[buffer.tensor].dtype) if buffer.names[0] in chosen else -1,
        )
        for buffer in graph.buffers
    )
    return replace(
        graph,
        buffers=buffers,
        tensors=(*graph.tensors, *writer.tensors),
        storages=(*graph.storages, *writer.storages),
        setup=tuple(writer.ops),
        assumptions=(*graph.assumptions, *_batch_statistics(graph)),
    )


def _check_sharing(buffer: Buffer, made: Made, op: Op) -> None:
    for name in buffer.names:
        if name in made.shared:
            message = f"buffer '{name}' is written in the forward and shares its memory with '{made.shared[name]}'"
            raise InputError("buffer", message, op.source.place(name), "give each its own memory (.clone() in the constructor)")


def _batch_statistics(graph: Graph) -> list[str]:
    """One sentence where batch normalisation sees micro-batches instead of whole batches."""
    storages = {graph.tensors[buffer.tensor].storage for buffer in graph.buffers}
    norms = [op for op in graph.ops if "batch_norm" in op.name and any(graph.tensors[t].storage in storages for t in op.mutates)]
    if not norms:
        return []
    return [
        f"batch normalisation ('{norms[0].module}', {len(norms)} in all) takes its statistics from micro-batches of {graph.micro_batch} "
        "samples: training differs from that of a full batch, as gradient accumulation does"
    ]


class _Writer:
    """Setup operators, with tensor and storage ids that continue those of the graph."""

    def __init__(self, graph: Graph, construction: Construction) -> None:
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self._first_tensor, self._first_storage = len(graph.tensors), len(graph.storages)
        self._construction = construction
        self._tensor_ids: dict[Layout, int] = {}
        self._storage_ids: dict[int, int] = {}
        self._cast: dict[tuple[Layout, str], int] = {}

    def step(self, step: Step) -> None:
        """Write one step of the constructor."""
        kwargs = tuple((key, self._argument(step.kwargs[key])) for key in sorted(step.kwargs) if key not in _PLACES)
        args = tuple(self._argument(a) for a in step.args)
        target = str(step.func) if step.func is not None else LITERAL
        writes = tuple(self._tensor(layout) for layout in step.writes)
        outputs = tuple(self._tensor(layout) for layout in step.outputs)
        self._op(target, args, kwargs, outputs, step.multi, step.view, writes, step.source)

    def cast(self, layout: Layout, dtype: str) -> int:
        """The tensor of a value in the precision of the graph (`model.to(bf16)` casts floating buffers too)."""
        made = self._tensor(layout)
        if _last(layout.dtype) == dtype:
            return made
        if (layout, dtype) not in self._cast:
            stride = torch.empty(layout.shape, device="meta").stride()
            other = Layout(-1 - len(self._cast), layout.shape, stride, 0, getattr(torch, dtype))
            output = self._cast[(layout, dtype)] = self._tensor(other)
            source = next((op.source for op in reversed(self.ops) if made in op.outputs), Source("", 0, ""))
            kwargs: tuple[tuple[str, Argument], ...] = (("dtype", Name("dtype", dtype)),)
            self._op("aten._to_copy.default", (Ref(made),), kwargs, (output,), False, False, (), source)
        return self._cast[(layout, dtype)]

    def _op(
        self,
        target: str,
        args: tuple[Argument, ...],
        kwargs: tuple[tuple[str, Argument], ...],
        outputs: tuple[int, ...],
        multi: bool,
        view: bool,
        mutates: tuple[int, ...],
        source: Source,
    ) -> None:
        self.ops.append(
            Op(
                id=len(self.ops), target=target, args=args, kwargs=kwargs, outputs=outputs, multi=multi, phase=Phase.FORWARD, module="",
                source=source, forward_op=-1, view=view, mutates=mutates, random_key="", flops=Flops(0), bytes_moved=Bytes(0),
            )
        )  # fmt: skip

    def _tensor(self, layout: Layout) -> int:
        known = self._tensor_ids.get(layout)
        if known is not None:
            return known
        storage = self._storage_ids.get(layout.storage)
        if storage is None:
            root = self._construction.root(layout)
            span = 1 + sum((n - 1) * s for n, s in zip(root.shape, root.stride, strict=True)) if 0 not in root.shape else 0
            storage = self._storage_ids[layout.storage] = self._first_storage + len(self.storages)
            self.storages.append(Storage(storage, Bytes(span * root.dtype.itemsize), Kind.SETUP, False))
        number = self._tensor_ids[layout] = self._first_tensor + len(self.tensors)
        self.tensors.append(Tensor(number, storage, layout.shape, layout.stride, layout.offset, _last(layout.dtype), False, ""))
        return number

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, Layout):
            return Ref(self._tensor(value))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return tuple(self._argument(item) for item in value)
        group = _GROUPS.get(type(value))
        if group is None:
            kind = type(value).__name__
            raise InputError(
                "trace", f"the constructor calls an operator with an argument of type {kind}", "", "compute the buffer otherwise"
            )
        return Name(group, _last(value))


def _last(value: Any) -> str:
    return str(value).rpartition(".")[2]
