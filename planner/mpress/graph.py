"""The recorded training step: frozen, torch-free, ids instead of references.

A Graph is one micro-batch of forward, loss and backward as eager autograd runs it.  Operators are in execution order.
A Tensor is a view on a Storage (shape, stride, offset in elements); memory belongs to storages only.
A tensor made from Python values, or used in the forward without being state or an input, is the output of an operator
`mpress.literal.default` with args (shape, flat values, Name of the dtype); a complex number is two values, real and imaginary part.
Arguments are literals, `Ref(tensor_id)`, or (nested) tuples of these; dtypes, layouts and devices are `Name`s such as "float32".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mpress.units import Bytes, Flops


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Kind(Enum):
    """Where a storage comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    COMPUTED = "computed"
    SETUP = "setup"  # made once while the model was built, to fill a buffer


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as an argument."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Name:
    """A torch constant as an argument: dtype ("float32"), layout, memory format, device ("cpu"); or a complex number ("(1+2j)")."""

    group: str
    value: str


Literal = int | float | bool | str | None
Argument = Literal | Ref | Name | tuple["Argument", ...]

# bytes of an element, by the name of its dtype
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes in memory.  `saved` = autograd saves it from forward to backward (parameters may be saved too).

    born, dies: the ops that allocate it and after which the eager step frees it (Python names and autograd let go); -1 where it is
    there before the step, outlives it, or is not known.
    """

    id: int
    bytes: Bytes
    kind: Kind
    saved: bool
    born: int = -1
    dies: int = -1


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view on a storage.  `name` is the user's parameter, buffer or input name, "" for computed tensors."""

    id: int
    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    differentiable: bool
    name: str


@dataclass(frozen=True, slots=True)
class Source:
    """The line of the user's code an operator comes from.  `file` is a base name, never an absolute path."""

    file: str
    line: int
    code: str

    def place(self, fallback: str = "") -> str:
        """ "gpt.py:22", or the fallback where no line is known."""
        return f"{self.file}:{self.line}" if self.file else fallback


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen call.  `target` is "aten.addmm.default".

    outputs: tensor ids in the order of the flattened result, -1 for an undefined tensor (None).
    multi: the call returns a tuple/list (so outputs are its items), otherwise one tensor.
    view: every output aliases an input and nothing is computed.
    mutates: tensor ids written in place.
    random: the draw depends on the generator; `random_key` is "<module path>#<n-th draw of that module in the forward>".
    forward_op: for backward ops, the id of the forward op it differentiates, -1 if it has none (sums of gradients).
    repeats: for ops the user's own checkpoint runs again in the backward, the forward op that is repeated; -1 for all others.
       What differentiates a repeated op has the forward op as its forward_op.
    atom: the name of the user's autograd.Function whose forward or backward the op belongs to, "" outside of any.
    """

    id: int
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[int, ...]
    multi: bool
    phase: Phase
    module: str
    source: Source
    forward_op: int
    view: bool
    mutates: tuple[int, ...]
    random_key: str
    flops: Flops
    bytes_moved: Bytes
    repeats: int = -1
    atom: str = ""

    @property
    def name(self) -> str:
        """ "addmm" of "aten.addmm.default"."""
        return self.target.split(".")[1]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable or frozen parameter.  `names` holds every name it has in the module (ties), the first is canonical."""

    names: tuple[str, ...]
    tensor: int
    trainable: bool
    elements: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of the module.  persistent: it is part of the state_dict.

    initial: the tensor that Graph.setup makes its first value, -1 where building the model does not tell (then a state_dict must).
    """

    names: tuple[str, ...]
    tensor: int
    elements: int
    persistent: bool
    initial: int


@dataclass(frozen=True, slots=True)
class Contribution:
    """Backward tensor `tensor` is (one addend of) the gradient of parameter `parameter` (canonical name).

    Where autograd sums several contributions of one parameter, the sum is taken apart: one entry an addend, and the `add`
    operators that summed them are left out of the graph.
    """

    parameter: str
    tensor: int


@dataclass(frozen=True, slots=True)
class Accumulation:
    """What eager autograd does to gradients of parameters between two ops of the graph: it adds up two that were taken apart here, or
    copies one.  Only memory is told, so that the live bytes of the eager step can be replayed exactly (see mpress.peak).

    after: the op it follows.  bytes: new memory it takes, 0 if none.  frees: storages that die only now, not right after op `after`.
    drops: indices of earlier accumulations whose memory dies with this one.  Memory nobody drops is the gradient that stays.
    """

    after: int
    bytes: Bytes
    frees: tuple[int, ...]
    drops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Input:
    """An example input of the module.  low..high (inclusive) is the range of an integer input (0, 0 for floats), for made-up data."""

    name: str
    tensor: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Graph:
    """One recorded micro-batch.  `seed` is the backward tensor autograd starts from (gradient of the loss, a ones_like).

    setup: operators run once, before training, that give buffers their first values (their ids are indices into `setup`).
    checkpoints: regions the user's own code recomputes.  assumptions: what was taken from the example inputs or for granted, in words.
    accumulations: in order, what happens between ops to the memory of gradients.
    """

    model: str
    micro_batch: int
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[Input, ...]
    loss: int
    seed: int
    contributions: tuple[Contribution, ...]
    setup: tuple[Op, ...] = ()
    checkpoints: int = 0
    assumptions: tuple[str, ...] = ()
    accumulations: tuple[Accumulation, ...] = ()

    @property
    def holders(self) -> tuple[Parameter | Buffer, ...]:
        """Everything of the module's state: parameters, then buffers."""
        return (*self.parameters, *self.buffers)


def references(argument: Argument) -> tuple[int, ...]:
    """Tensor ids inside an argument, in order."""
    found: list[int] = []
    _collect((argument,), found)
    return tuple(found)


def reads(op: Op) -> tuple[int, ...]:
    """Tensor ids an op reads, in argument order, repeated as often as they occur."""
    found: list[int] = []
    _collect(op.args, found)
    for _, value in op.kwargs:
        _collect((value,), found)
    return tuple(found)


def _collect(arguments: tuple[Argument, ...], found: list[int]) -> None:
    for argument in arguments:  # no generators: planning a deep model asks a hundred thousand times
        if isinstance(argument, Ref):
            found.append(argument.tensor)
        elif isinstance(argument, tuple):
            _collect(argument, found)
