"""The ground truth: one training step of the user's module really run on CPU, measured without a line of the recorder.

Three fresh builds of the model do the same step (same weights, same data, same draws), because measuring one thing would disturb another:
a plain run gives the values, a run under saved_tensors_hooks what autograd saves, a run under a dispatch mode the operators and the bytes.
The hooks and the mode hold no tensor: storages are followed by weak references.

What is counted.  A step is forward, loss and backward; of the forward's result only the loss is held on to, as in
`loss = criterion(model(x)); loss.backward()`.  State (parameters, buffers) and inputs are there before and are never counted.  The
peak is taken after each operator, so an operator's inputs count, a kernel's inner workspace does not.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Inputs = tuple[Any, ...] | dict[str, Any]
_ACCUMULATE = 2**64 - 1  # sequence number of the nodes that put a gradient in its parameter
_NOTHING = ("aten.detach.default", "aten._local_scalar_dense.default")
_SUMS = ("aten.add.Tensor", "aten.add_.Tensor")


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor autograd still holds when the backward begins.  place: equal for views of one storage; kind: whose storage it is."""

    shape: tuple[int, ...]
    dtype: str
    storage_bytes: int
    place: int
    kind: str  # "parameter", "buffer", "input", "loss" or "computed"


@dataclass(frozen=True, slots=True)
class RanOp:
    """One ATen call.  live: bytes of the step's own storages right after it; node: what the engine was running, "" in the forward.

    summing: the engine adds up gradients of one parameter (the sum that arrives there, or a part of it); accumulating: the engine puts
    a gradient into its parameter.
    """

    target: str
    backward: bool
    live: int
    node: str
    summing: bool
    accumulating: bool


@dataclass(frozen=True, slots=True)
class RealRun:
    """All that was measured.  gradients and buffers have their first (canonical) names; outputs are the forward's tensors, in order."""

    parameters: int
    trainable: int
    buffer_elements: int
    loss: Tensor
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    saved: tuple[Saved, ...]
    ops: tuple[RanOp, ...]
    held_bytes: int  # all that lives when the backward begins but the loss, whoever holds it

    @property
    def saved_bytes(self) -> int:
        """Bytes of the storages saved, each once; weights, buffers, inputs and the loss excluded."""
        return sum({item.place: item.storage_bytes for item in self.saved if item.kind == "computed"}.values())

    @property
    def saved_list(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """(shape, dtype) of all that is saved, in the order autograd saves it; state and inputs included."""
        return tuple((item.shape, item.dtype) for item in self.saved)

    @property
    def alias_partition(self) -> tuple[int, ...]:
        """For each saved tensor, the position of the first one on the same storage."""
        first: dict[int, int] = {}
        return tuple(first.setdefault(item.place, index) for index, item in enumerate(self.saved))

    @property
    def peak_bytes(self) -> int:
        return max((op.live for op in self.ops), default=0)

    @property
    def peak_op(self) -> int:
        """Index of the first op after which the peak is reached."""
        return max(range(len(self.ops)), key=lambda index: (self.ops[index].live, -index))

    def sequence(self, *, backward: bool) -> tuple[str, ...]:
        """Names of the calls in order, as the user's code and the formulas of autograd make them.

        Left out: `detach` (the same value under another Python object), `item` (a number for Python), sums of a
        parameter's gradients, AccumulateGrad.
        """
        return tuple(
            op.target for op in self.ops if op.backward is backward and not op.summing and not op.accumulating and op.target not in _NOTHING
        )


def real_run(
    build: Callable[[], nn.Module],
    inputs: Inputs,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    seed: int = 7,
    dtype: torch.dtype | None = None,
    hold_output: bool = False,
) -> RealRun:
    """Run one step of `build()` (in training mode) for real, three times, and measure it.

    loss: what makes one number of the result; None, or a result of one element: the result is the loss.  seed: the generator's state
    when the forward begins.  dtype: cast floating parameters, buffers and inputs.  hold_output: the caller keeps the result, too.
    """
    step = _Step(build, inputs, loss, seed, dtype, hold_output)
    return step.measure()


def load_case(
    path: str | Path, **model_args: Any
) -> tuple[Callable[[], nn.Module], Callable[[int], Inputs], Callable[[Any], Tensor] | None]:
    """A model file's (build, inputs of a batch, loss), loaded by plain import."""
    path = Path(path)
    spec = importlib.util.spec_from_file_location(f"real_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = module.build_model(**model_args)
            return model

    def inputs(batch: int) -> Inputs:
        accepted = module.example_inputs.__code__.co_varnames[: module.example_inputs.__code__.co_argcount]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = module.example_inputs(batch=batch, **{key: value for key, value in model_args.items() if key in accepted})
        if isinstance(made, Mapping):
            return dict(made)
        return (made,) if isinstance(made, Tensor) else tuple(made)

    return build, inputs, getattr(module, "loss", None)


@dataclass(frozen=True, slots=True)
class _Step:
    build: Callable[[], nn.Module]
    inputs: Inputs
    criterion: Callable[[Any], Tensor] | None
    seed: int
    dtype: torch.dtype | None
    hold_output: bool

    def measure(self) -> RealRun:
        model, inputs = self._fresh()
        with self._generator():
            result = self._forward(model, inputs)
            loss = self._loss(result)
            torch.autograd.backward(loss)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        outputs = tuple(t.detach().clone() for t in _tensors(result))
        saved = self._saved()
        ops, held = self._watched()
        return RealRun(
            parameters=sum(p.numel() for p in model.parameters()),
            trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
            buffer_elements=sum(b.numel() for b in model.buffers()),
            loss=loss.detach().clone(),
            outputs=outputs,
            gradients=gradients,
            buffers=buffers,
            saved=saved,
            ops=ops,
            held_bytes=held,
        )

    def _fresh(self) -> tuple[nn.Module, Inputs]:
        model = self.build().train()
        if self.dtype is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point() and tensor.dtype != self.dtype:
                    tensor.data = tensor.data.to(self.dtype)
        return model, copy.deepcopy(_cast(self.inputs, self.dtype))

    def _generator(self) -> Any:
        return _Seeded(self.seed)

    def _forward(self, model: nn.Module, inputs: Inputs) -> Any:
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)

    def _loss(self, result: Any) -> Tensor:
        if isinstance(result, Tensor) and result.numel() == 1:
            return result
        assert self.criterion is not None, "the model returns no single number and there is no loss"
        return self.criterion(result)

    def _saved(self) -> tuple[Saved, ...]:
        model, inputs = self._fresh()
        kinds = _kinds(model, inputs)
        places: dict[int, int] = {}
        counter = iter(range(1 << 40))
        packed: list[tuple[weakref.ref[_Held], Saved]] = []

        def pack(tensor: Tensor) -> _Held:
            storage = tensor.untyped_storage()
            place = places.get(storage._cdata)
            if place is None:
                place = places[storage._cdata] = next(counter)
                weakref.finalize(storage, places.pop, storage._cdata, None)  # the address may be given to another storage
            kind = kinds.get(storage._cdata, "computed")
            held = _Held(tensor.detach())  # a result still knows its node, and the node would keep it for ever
            item = Saved(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), storage.nbytes(), place, kind)
            packed.append((weakref.ref(held), item))
            return held

        with self._generator(), torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            result = self._forward(model, inputs)
            loss = self._loss(result)
            if not self.hold_output:
                del result
            last = places.get(loss.untyped_storage()._cdata, -1)
            found = [item for reference, item in packed if reference() is not None]
        return tuple(dataclasses.replace(item, kind="loss") if item.place == last and item.kind == "computed" else item for item in found)

    def _watched(self) -> tuple[tuple[RanOp, ...], int]:
        model, inputs = self._fresh()
        mode = _Watch(_kinds(model, inputs))
        trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
        arriving = [p.register_hook(mode.arrive) for p in trained]
        with self._generator(), torch.autograd.set_multithreading_enabled(False), mode:
            result = self._forward(model, inputs)
            loss = self._loss(result)
            if not self.hold_output:
                del result
            held = mode.live_bytes - mode.bytes_of(loss)
            mode.counting_only = True
            seed = torch.ones_like(loss)
            mode.counting_only = False
            mode.backward = True
            torch.autograd.backward(loss, seed)
        for handle in arriving:
            handle.remove()
        return mode.result(), held


class _Held:
    """What a saved-tensor hook leaves with autograd: alive as long as autograd keeps it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Seeded:
    """The generator set to a seed inside, left as it was outside."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.before = torch.get_rng_state()
        torch.manual_seed(self.seed)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.before)


@dataclass(slots=True)
class _Written:
    """Who made a living storage: the op, and the ops whose results it added up (for sums of gradients)."""

    bytes: int
    op: int
    parts: tuple[int, ...] = ()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the calls and follows the bytes of storages that are neither state nor inputs."""

    def __init__(self, known: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.live: dict[int, _Written] = {}
        self.live_bytes = 0
        self.backward = False
        self.counting_only = False
        self.ops: list[RanOp] = []
        self.summing: dict[int, tuple[int, ...]] = {}  # engine's sums: op -> ops that made what it adds
        self.sums: set[int] = set()

    def bytes_of(self, tensor: Tensor) -> int:
        entry = self.live.get(tensor.untyped_storage()._cdata)
        return entry.bytes if entry is not None else 0

    def arrive(self, gradient: Tensor) -> None:
        """Hook of a parameter: the sum that arrives, and the sums it consists of, add up one parameter's gradients."""
        entry = self.live.get(gradient.untyped_storage()._cdata)
        waiting = [entry.op] if entry is not None else []
        while waiting:
            op = waiting.pop()
            if op in self.summing and op not in self.sums:
                self.sums.add(op)
                waiting += self.summing[op]

    def _freed(self, address: int) -> None:
        self.live_bytes -= self.live.pop(address).bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        number = len(self.ops)
        parts: tuple[int, ...] = ()
        if self.backward and str(func) in _SUMS and len(args) == 2 and not kwargs and all(isinstance(a, Tensor) for a in args):
            entries = [self.live.get(a.untyped_storage()._cdata) for a in args]
            if all(entry is not None and entry.op >= 0 and self.ops[entry.op].backward for entry in entries):
                parts = tuple(entry.op for entry in entries if entry is not None)
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self._follow(item, -1 if self.counting_only else number)
        if self.counting_only:
            return result
        node = torch._C._current_autograd_node() if self.backward else None
        accumulating = node is not None and node._sequence_nr() == _ACCUMULATE
        if parts:
            self.summing[number] = parts
        self.ops.append(RanOp(str(func), self.backward, self.live_bytes, node.name() if node is not None else "", False, accumulating))
        return result

    def _follow(self, tensor: Tensor, op: int) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.known:
            return
        entry = self.live.get(address)
        if entry is None:
            self.live[address] = _Written(storage.nbytes(), op)
            self.live_bytes += storage.nbytes()
            weakref.finalize(storage, self._freed, address)
        elif storage.nbytes() != entry.bytes:  # resized
            self.live_bytes += storage.nbytes() - entry.bytes
            entry.bytes = storage.nbytes()

    def result(self) -> tuple[RanOp, ...]:
        return tuple(dataclasses.replace(op, summing=index in self.sums) for index, op in enumerate(self.ops))


def _kinds(model: nn.Module, inputs: Inputs) -> dict[int, str]:
    """Storages that are there before the step."""
    found: dict[int, str] = {}
    tables: tuple[tuple[str, Iterable[Tensor]], ...] = (
        ("parameter", model.parameters()),
        ("buffer", model.buffers()),
        ("input", _tensors(inputs)),
    )
    for kind, tensors in tables:
        for tensor in tensors:
            found.setdefault(tensor.untyped_storage()._cdata, kind)
    return found


def _tensors(value: Any) -> list[Tensor]:
    """Tensors inside tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for field in dataclasses.fields(value) for t in _tensors(getattr(value, field.name))]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, tuple | list):
        return [t for item in value for t in _tensors(item)]
    return []


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype) for item in value)
    return value
