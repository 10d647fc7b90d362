"""What must hold in a graph that somebody else wrote, so that everything after it may take it for granted.

`check_graph` refuses the first thing that does not hold, by the key path a reader of the file finds it under ("ops[3].args in gpt.json").
It trusts the types of a Graph and that every integer in it is small; nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mpress.errors import InputError
from mpress.graph import ITEM_BYTES, Graph, Kind, Op, Phase, Tensor, reads

FORMAT_HINT = "docs/graph-format.md says what a graph file holds; `mpress-plan trace MODEL.py` writes one"
MOST_ELEMENTS = 2**62
PRECISIONS = ("float32", "float16", "bfloat16")  # what a recipe can count the state of
_REAL = {"complex64": "float32", "complex32": "float16"}  # a complex parameter is stepped as real numbers
_TRUSTED = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.INPUT})


def wrong(path: str, problem: str, origin: str, hint: str = FORMAT_HINT) -> InputError:
    """The refusal of a graph file: what is wrong with the value at a key path."""
    where = f"{path} in {origin}" if path else origin
    return InputError("graph-file", f"{origin} is not a graph to plan: {f'{path} ' if path else ''}{problem}", where, hint)


def parameter_dtype(graph: Graph) -> str:
    """The one dtype of the real numbers in all parameters: what precision the graph was recorded in."""
    return _real(graph.tensors[next(p.tensor for p in graph.parameters if p.trainable)].dtype)


def _real(dtype: str) -> str:
    return _REAL.get(dtype, dtype)


def extent(tensor: Tensor) -> int:
    """Bytes from the start of the storage to the end of the tensor's last element; 0 for a tensor without elements."""
    if 0 in tensor.shape:
        return 0
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
    return (last + 1) * ITEM_BYTES[tensor.dtype]


def check_graph(graph: Graph, origin: str) -> None:
    """Raise InputError("graph-file") unless the graph could have been recorded; `origin` names the file."""
    _Checker(graph, origin).check()


class _Checker:
    def __init__(self, graph: Graph, origin: str) -> None:
        self._graph, self._origin = graph, origin
        self._names: dict[int, str] = {}
        self._given: dict[int, str] = {}  # tensors that are there before the step -> the key path that says so

    def _require(self, condition: bool, path: str, problem: str) -> None:
        if not condition:
            raise wrong(path, problem, self._origin)

    def _tensor(self, number: int, path: str) -> Tensor:
        self._require(0 <= number < len(self._graph.tensors), path, f"is {number}, but tensors are 0 to {len(self._graph.tensors) - 1}")
        return self._graph.tensors[number]

    def check(self) -> None:
        graph = self._graph
        for key, rows in (("storages", graph.storages), ("tensors", graph.tensors), ("ops", graph.ops), ("setup", graph.setup)):
            self._ids(key, [row.id for row in rows])
        self._memory()
        self._holders()
        made_once = self._setup()
        self._ops(made_once)
        self._ends()

    def _ids(self, key: str, ids: Sequence[int]) -> None:
        for place, number in enumerate(ids):
            self._require(number == place, f"{key}[{place}].id", f"is {number}; ids count from 0 in the order of the rows")

    # -- storages and tensors ----------------------------------------------------------------------------------------------------

    def _memory(self) -> None:
        graph = self._graph
        needed: dict[int, int] = {}
        for tensor in graph.tensors:
            path = f"tensors[{tensor.id}]"
            count = len(graph.storages)
            self._require(0 <= tensor.storage < count, f"{path}.storage", f"is {tensor.storage}, but storages are 0 to {count - 1}")
            self._require(tensor.dtype in ITEM_BYTES, f"{path}.dtype", f"is '{tensor.dtype}', which is no dtype that can be planned")
            self._require(len(tensor.stride) == len(tensor.shape), f"{path}.stride", "has another length than shape")
            self._require(prod(tensor.shape) <= MOST_ELEMENTS, f"{path}.shape", "has more elements than any tensor")
            size, end = int(graph.storages[tensor.storage].bytes), extent(tensor)
            self._require(end <= size, path, f"reaches byte {end} of storage {tensor.storage}, which has {size}")
            needed[tensor.storage] = max(end, needed.get(tensor.storage, 0))
        for storage in graph.storages:
            path = f"storages[{storage.id}]"
            self._require(storage.id in needed, path, "has no tensor on it")
            self._require(
                storage.bytes == needed[storage.id], f"{path}.bytes", f"is {storage.bytes}; its tensors need {needed[storage.id]}"
            )
            for key, op in (("born", storage.born), ("dies", storage.dies)):
                self._require(-1 <= op < len(graph.ops), f"{path}.{key}", f"is {op}, but ops are 0 to {len(graph.ops) - 1}")

    def _holders(self) -> None:
        graph = self._graph
        rows = [(f"parameters[{i}]", Kind.PARAMETER, p.names, p.tensor) for i, p in enumerate(graph.parameters)]
        rows += [(f"buffers[{i}]", Kind.BUFFER, b.names, b.tensor) for i, b in enumerate(graph.buffers)]
        names: set[str] = set()
        owners: dict[int, str] = {}
        for path, kind, called, number in rows:
            self._require(len(called) > 0, f"{path}.names", "is empty")
            for name in called:
                self._require(name not in names, f"{path}.names", f"has '{name}', which is there already")
                names.add(name)
            self._give(path, kind, called[0], number, owners)
        inputs: set[str] = set()
        for i, item in enumerate(graph.inputs):
            self._require(item.name not in inputs, f"inputs[{i}].name", f"is '{item.name}', which is there already")
            inputs.add(item.name)
            self._require(item.low <= item.high, f"inputs[{i}].high", "is below low")
            self._give(f"inputs[{i}]", Kind.INPUT, item.name, item.tensor, owners)
        for storage in graph.storages:
            if storage.kind in _TRUSTED:
                self._require(
                    storage.id in owners, f"storages[{storage.id}].kind", f"is {storage.kind.value}, but no {storage.kind.value} is on it"
                )
        for tensor in graph.tensors:
            self._require(
                tensor.name == self._names.get(tensor.id, ""), f"tensors[{tensor.id}].name", "belongs to no parameter, buffer or input"
            )
        self._recipe()

    def _give(self, path: str, kind: Kind, name: str, number: int, owners: dict[int, str]) -> None:
        """Note a parameter, buffer or input; each has a storage of its own."""
        tensor = self._tensor(number, f"{path}.tensor")
        found = self._graph.storages[tensor.storage].kind
        self._require(
            found is kind, f"{path}.tensor", f"lies on storage {tensor.storage}, which is of kind {found.value}, not {kind.value}"
        )
        self._require(tensor.storage not in owners, f"{path}.tensor", f"lies on the storage of {owners.get(tensor.storage)}")
        self._names[number] = name
        owners[tensor.storage] = self._given[number] = path

    def _recipe(self) -> None:
        """One floating-point dtype for all parameters: the recipe counts the bytes of one."""
        graph = self._graph
        self._require(any(p.trainable for p in graph.parameters), "parameters", "has none that is trained")
        first = parameter_dtype(graph)
        for i, parameter in enumerate(graph.parameters):
            tensor = graph.tensors[parameter.tensor]
            self._require(parameter.elements == prod(tensor.shape), f"parameters[{i}]", "has another number of elements than its tensor")
            self._require(
                _real(tensor.dtype) in PRECISIONS, f"parameters[{i}].tensor", f"is {tensor.dtype}, not one of {', '.join(PRECISIONS)}"
            )
            self._require(
                _real(tensor.dtype) == first, f"parameters[{i}].tensor", f"is {tensor.dtype}, others are {first}: one precision is planned"
            )
        for i, buffer in enumerate(graph.buffers):
            elements = prod(graph.tensors[buffer.tensor].shape)
            self._require(buffer.elements == elements, f"buffers[{i}]", "has another number of elements than its tensor")

    # -- operators ---------------------------------------------------------------------------------------------------------------

    def _setup(self) -> dict[int, str]:
        """Operators that fill buffers: they know only each other's results.  Returns what they make."""
        graph, made = self._graph, dict[int, str]()
        born: set[int] = set()
        for place, op in enumerate(graph.setup):
            path = f"setup[{place}]"
            self._require(op.forward_op == op.repeats == -1 and op.phase is Phase.FORWARD, path, "differentiates or repeats another op")
            self._reads(op, path, made, readable=frozenset())
            self._outputs(op, path, made, born, Kind.SETUP)
        for i, buffer in enumerate(graph.buffers):
            if buffer.initial >= 0:
                path = f"buffers[{i}].initial"
                first, mine = self._tensor(buffer.initial, path), graph.tensors[buffer.tensor]
                self._require(buffer.initial in made, path, f"is tensor {buffer.initial}, which setup does not make")
                self._require((first.shape, first.dtype) == (mine.shape, mine.dtype), path, "has another shape or dtype than the buffer")
            self._require(buffer.initial >= -1, f"buffers[{i}].initial", "is below -1, which stands for none")
        return made

    def _ops(self, made: dict[int, str]) -> None:
        graph = self._graph
        self._tensor(graph.seed, "seed")
        self._require(graph.seed not in self._given and graph.seed not in made, "seed", "is a parameter, buffer, input or of setup")
        born = {graph.tensors[graph.seed].storage}
        self._require(
            graph.storages[graph.tensors[graph.seed].storage].kind is Kind.COMPUTED, "seed", "lies on a storage that is not computed"
        )
        given = frozenset(self._given)
        backward = False
        for op in graph.ops:
            path = f"ops[{op.id}]"
            self._require(not backward or op.phase is Phase.BACKWARD, f"{path}.phase", "is forward, after the backward began")
            backward = op.phase is Phase.BACKWARD
            self._links(op, path)
            self._reads(op, path, made, given | {graph.seed} if backward else given)
            self._outputs(op, path, made, born, Kind.COMPUTED)
        for tensor in graph.tensors:
            known = tensor.id in made or tensor.id in self._given or tensor.id == graph.seed
            self._require(known, f"tensors[{tensor.id}]", "is made by no op and is no parameter, buffer or input")

    def _links(self, op: Op, path: str) -> None:
        """forward_op and repeats point from the backward to forward ops."""
        for key, number in (("forward_op", op.forward_op), ("repeats", op.repeats)):
            if number == -1:
                continue
            self._require(op.phase is Phase.BACKWARD, f"{path}.{key}", "is only for ops of the backward")
            self._require(0 <= number < op.id, f"{path}.{key}", f"is {number}, which is no earlier op")
            self._require(self._graph.ops[number].phase is Phase.FORWARD, f"{path}.{key}", f"is {number}, which is no op of the forward")

    def _reads(self, op: Op, path: str, made: dict[int, str], readable: frozenset[int]) -> None:
        found = reads(op)
        for number in found:
            self._tensor(number, f"{path}.args")
            known = number in made or number in readable
            self._require(known, f"{path}.args", f"reads tensor {number} before anything makes it")
            if readable:
                kind = self._graph.storages[self._graph.tensors[number].storage].kind
                self._require(kind is not Kind.SETUP, f"{path}.args", f"reads tensor {number}, which setup makes")
        for number in op.mutates:
            self._require(number in found, f"{path}.mutates", f"has tensor {number}, which is no argument")

    def _outputs(self, op: Op, path: str, made: dict[int, str], born: set[int], kind: Kind) -> None:
        """Every tensor is made once, a write in place makes none; a view makes no storage, any other op makes one or writes one."""
        graph = self._graph
        self._require(op.multi or len(op.outputs) == 1, f"{path}.outputs", "has not exactly one item, and multi is not set")
        old = {graph.tensors[t].storage for t in reads(op)}
        fresh: set[int] = set()
        made_here = [number for number in op.outputs if number != -1]
        for number in made_here:
            tensor = self._tensor(number, f"{path}.outputs")
            if number in op.mutates:  # what is written in place is returned under the id it has
                continue
            self._require(number not in made, f"{path}.outputs", f"makes tensor {number}, as {made.get(number)} does")
            self._require(
                number not in self._given, f"{path}.outputs", f"makes tensor {number}, which is given by {self._given.get(number)}"
            )
            self._require(number != graph.seed, f"{path}.outputs", f"makes tensor {number}, which is the seed")
            made[number] = path
            if tensor.storage in old or tensor.storage in fresh:
                continue
            problem = f"puts tensor {number} on storage {tensor.storage}, which it does not read"
            self._require(tensor.storage not in born, f"{path}.outputs", problem)
            found = graph.storages[tensor.storage].kind
            self._require(found is kind, f"{path}.outputs", f"allocates storage {tensor.storage}, which is of kind {found.value}")
            fresh.add(tensor.storage)
        born |= fresh
        if op.view:
            self._require(
                bool(made_here) and not fresh and not op.mutates, f"{path}.view", "is true, but the op does not only look at an argument"
            )
        elif made_here and not op.mutates:
            self._require(bool(fresh), f"{path}.view", "is false, but the op neither allocates nor writes anything")

    # -- loss and gradients ------------------------------------------------------------------------------------------------------

    def _ends(self) -> None:
        graph = self._graph
        loss, seed = self._tensor(graph.loss, "loss"), graph.tensors[graph.seed]
        maker = next((op for op in graph.ops if graph.loss in op.outputs), None)
        self._require(maker is not None and maker.phase is Phase.FORWARD, "loss", "is made by no op of the forward")
        self._require(prod(loss.shape) == 1 and loss.differentiable, "loss", "is not one number that can be differentiated")
        self._require((seed.shape, seed.dtype) == (loss.shape, loss.dtype), "seed", "has another shape or dtype than the loss")
        shapes = {p.names[0]: graph.tensors[p.tensor].shape for p in graph.parameters if p.trainable}
        back = {t for op in graph.ops if op.phase is Phase.BACKWARD for t in op.outputs} | {graph.seed}
        forward = {graph.tensors[t].storage for op in graph.ops if op.phase is Phase.FORWARD for t in op.outputs if t >= 0}
        reached: set[str] = set()
        for i, part in enumerate(graph.contributions):
            path = f"contributions[{i}]"
            self._require(
                part.parameter in shapes, f"{path}.parameter", f"is '{part.parameter}', which is the first name of no trained parameter"
            )
            tensor = self._tensor(part.tensor, f"{path}.tensor")
            own = graph.storages[tensor.storage].kind is Kind.COMPUTED and tensor.storage not in forward
            self._require(part.tensor in back and own, f"{path}.tensor", f"is tensor {part.tensor}, which the backward does not make")
            self._require(tensor.shape == shapes[part.parameter], f"{path}.tensor", "has another shape than the parameter")
            reached.add(part.parameter)
        self._accumulations()
        for i, parameter in enumerate(graph.parameters):
            self._require(
                not parameter.trainable or parameter.names[0] in reached, f"parameters[{i}]", "is trained, but gets no contribution"
            )

    def _accumulations(self) -> None:
        """Memory of gradients follows the ops in order and is freed once."""
        graph = self._graph
        before, gone, freed = 0, set[int](), set[int]()
        for i, item in enumerate(graph.accumulations):
            path = f"accumulations[{i}]"
            self._require(
                before <= item.after < len(graph.ops), f"{path}.after", f"is {item.after}, not in {before} to {len(graph.ops) - 1}"
            )
            before = item.after
            for number in item.frees:
                known = number < len(graph.storages) and graph.storages[number].dies == item.after and number not in freed
                self._require(known, f"{path}.frees", f"has {number}, which is no storage that dies once, after op {item.after}")
                freed.add(number)
            for number in item.drops:
                self._require(
                    number <= i and number not in gone, f"{path}.drops", f"has {number}, which is no earlier one that still lives"
                )
                gone.add(number)
