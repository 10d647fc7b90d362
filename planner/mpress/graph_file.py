"""A Graph as a file: JSON, one row a line, the same bytes for the same graph.  docs/graph-format.md lists every key.

Reading executes nothing.  A file that is not a graph is refused (InputError, code `graph-file`) with the key path of what is wrong;
`read_graph(write_graph(g), name) == g` for every graph that can be recorded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from mpress.errors import InputError
from mpress.graph import (
    Accumulation,
    Argument,
    Buffer,
    Contribution,
    Graph,
    Input,
    Kind,
    Name,
    Op,
    Parameter,
    Phase,
    Ref,
    Source,
    Storage,
    Tensor,
)
from mpress.graph_check import check_graph, wrong
from mpress.graph_rows import MOST_SIZE, Json, Row, kind_of, parse, quoted
from mpress.units import Bytes, Flops

FORMAT, VERSION = "mpress-graph", 1
SUFFIX = ".json"
MOST_CHARACTERS = 64 * 2**20  # some 200,000 operators
LEAST_INTEGER, MOST_INTEGER = -(2**63), 2**63 - 1
MOST_LINE = 10**7
MOST_FLOPS = 1e24
MOST_DIMENSIONS = 64
MOST_NESTING = 16
_GROUPS = ("dtype", "layout", "memory_format", "device")
_ODD_FLOATS = ("inf", "-inf", "nan")
_NOWHERE = Source("", 0, "")
_KINDS = {kind.value: kind for kind in Kind}
_PHASES = {phase.value: phase for phase in Phase}
_RANDOM_KEY = re.compile(r".*#\d{1,9}", re.ASCII)


def is_graph_file(model: str) -> bool:
    """Whether what the user calls a model is a graph file: a .json that says so, in its name (gpt.graph.json) or in its text."""
    name = model.lower()
    if not name.endswith(SUFFIX):
        return False
    if name.endswith(f".graph{SUFFIX}"):
        return True
    try:
        path = Path(model)
        return path.is_file() and (path.stat().st_size > MOST_CHARACTERS or f'"{FORMAT}"'.encode() in path.read_bytes())
    except OSError:
        return False


# -- writing ---------------------------------------------------------------------------------------------------------------------


def write_graph(graph: Graph) -> str:
    """The text of a graph file.  What follows from something else, or is what most rows have, is left out."""
    sources = list(dict.fromkeys(op.source for op in (*graph.ops, *graph.setup) if op.source != _NOWHERE))
    lines = {source: number for number, source in enumerate(sources)}
    scalars: dict[str, Json] = {
        "format": FORMAT,
        "version": VERSION,
        "model": graph.model,
        "micro_batch": graph.micro_batch,
        "loss": graph.loss,
        "seed": graph.seed,
        "checkpoints": graph.checkpoints,
    }
    tables: dict[str, Iterable[Json]] = {
        "assumptions": graph.assumptions,
        "parameters": ({"names": list(p.names), "tensor": p.tensor, "trainable": p.trainable} for p in graph.parameters),
        "buffers": (
            {"names": list(b.names), "tensor": b.tensor, "persistent": b.persistent, **_unless(-1, initial=b.initial)}
            for b in graph.buffers
        ),
        "inputs": ({"name": i.name, "tensor": i.tensor, **_unless(0, low=i.low, high=i.high)} for i in graph.inputs),
        "contributions": ({"parameter": c.parameter, "tensor": c.tensor} for c in graph.contributions),
        "accumulations": (
            {
                "after": a.after,
                **_unless(0, bytes=a.bytes),
                **({"frees": list(a.frees)} if a.frees else {}),
                **({"drops": list(a.drops)} if a.drops else {}),
            }
            for a in graph.accumulations
        ),
        "storages": (
            {"id": s.id, "bytes": s.bytes, "kind": s.kind.value, **_unless(False, saved=s.saved), **_unless(-1, born=s.born, dies=s.dies)}
            for s in graph.storages
        ),
        "tensors": (_tensor_row(tensor) for tensor in graph.tensors),
        "sources": ([source.file, source.line, source.code] for source in sources),
        "setup": (_op_row(op, lines) for op in graph.setup),
        "ops": (_op_row(op, lines) for op in graph.ops),
    }
    parts = [f' "{key}": {_text(value)}' for key, value in scalars.items()]
    for key, rows in tables.items():
        body = ",".join(f"\n  {_text(row)}" for row in rows)
        parts.append(f' "{key}": [{body}{chr(10) + " " if body else ""}]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _text(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _unless(default: int | str | float, **values: int | str | float) -> dict[str, Json]:
    return {key: value for key, value in values.items() if value != default}


def _tensor_row(tensor: Tensor) -> Json:
    stride: dict[str, Json] = {} if tensor.stride == contiguous(tensor.shape) else {"stride": list(tensor.stride)}
    return {
        "id": tensor.id,
        "storage": tensor.storage,
        "shape": list(tensor.shape),
        **stride,
        **_unless(0, offset=tensor.offset),
        "dtype": tensor.dtype,
        **_unless(False, differentiable=tensor.differentiable),
    }


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor laid out row by row, as torch gives them to one without elements too."""
    return tuple(accumulate((max(size, 1) for size in reversed(shape[1:])), lambda a, b: a * b, initial=1))[::-1] if shape else ()


def _op_row(op: Op, lines: Mapping[Source, int]) -> Json:
    kwargs: dict[str, Json] = {key: _argument_text(value) for key, value in op.kwargs}
    row: dict[str, Json] = {"id": op.id, "target": op.target, "args": [_argument_text(value) for value in op.args]}
    if kwargs:
        row["kwargs"] = kwargs
    row |= {"outputs": list(op.outputs), **_unless(False, multi=op.multi), **_unless(Phase.FORWARD.value, phase=op.phase.value)}
    row |= {**_unless("", module=op.module), **_unless(-1, source=lines.get(op.source, -1), forward_op=op.forward_op, repeats=op.repeats)}
    row |= _unless(False, view=op.view)
    if op.mutates:
        row["mutates"] = list(op.mutates)
    return row | {
        **_unless("", random_key=op.random_key),
        **_unless(0, flops=op.flops, bytes_moved=op.bytes_moved),
        **_unless("", atom=op.atom),
    }


def _argument_text(argument: Argument) -> Json:
    if isinstance(argument, Ref):
        return {"tensor": argument.tensor}
    if isinstance(argument, Name):
        return {argument.group: argument.value}
    if isinstance(argument, tuple):
        return [_argument_text(item) for item in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    return argument


# -- reading ---------------------------------------------------------------------------------------------------------------------


def load_graph(path: Path) -> Graph:
    """Read a graph file; raises InputError("graph-file")."""
    name = path.name
    if not path.is_file():
        raise InputError(
            "graph-file", f"there is no file '{path}'", str(path), "check the path; `mpress-plan trace MODEL.py` writes a graph"
        )
    try:
        if path.stat().st_size > MOST_CHARACTERS:
            raise _too_long(name)
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError("graph-file", f"{name} cannot be read: {error.strerror}", str(path), "check who may read the file") from None
    except UnicodeDecodeError as error:
        raise wrong("", f"has a byte at {error.start} that is not UTF-8", name) from None
    return read_graph(text, name)


def read_graph(text: str, name: str) -> Graph:
    """The graph a text holds; `name` is what refusals call it.  Raises InputError("graph-file")."""
    if len(text) > MOST_CHARACTERS:
        raise _too_long(name)
    top = Row(parse(text, name), "", name)
    _check_version(top)
    storages = tuple([_storage(row) for row in top.rows("storages")])
    parameters = [(row.texts("names"), row.whole("tensor"), row.flag("trainable", True)) for row in top.rows("parameters")]
    buffers = [
        (row.texts("names"), row.whole("tensor"), row.flag("persistent", True), row.identity("initial", -1))
        for row in top.rows("buffers", optional=True)
    ]
    inputs = tuple([_input(row) for row in top.rows("inputs", optional=True)])
    names = {item.tensor: item.name for item in inputs}
    names |= {tensor: called[0] for called, tensor, _ in parameters if called}
    names |= {tensor: called[0] for called, tensor, _, _ in buffers if called}
    tensors = tuple([_tensor(row, names) for row in top.rows("tensors")])
    sources = [_source(top, value, f"sources[{place}]") for place, value in enumerate(top.items("sources", optional=True))]

    def elements(number: int) -> int:
        return math.prod(tensors[number].shape) if number < len(tensors) else 0  # check_graph refuses the number

    graph = Graph(
        model=top.file_name("model"),
        micro_batch=top.whole("micro_batch", 1),
        ops=tuple([_op(row, sources) for row in top.rows("ops")]),
        tensors=tensors,
        storages=storages,
        parameters=tuple([Parameter(called, tensor, trainable, elements(tensor)) for called, tensor, trainable in parameters]),
        buffers=tuple([Buffer(called, tensor, elements(tensor), persistent, initial) for called, tensor, persistent, initial in buffers]),
        inputs=inputs,
        loss=top.whole("loss"),
        seed=top.whole("seed"),
        contributions=tuple([Contribution(row.text("parameter"), row.whole("tensor")) for row in top.rows("contributions")]),
        setup=tuple([_op(row, sources) for row in top.rows("setup", optional=True)]),
        checkpoints=top.whole("checkpoints", default=0),
        assumptions=top.texts("assumptions", optional=True),
        accumulations=tuple([_accumulation(row) for row in top.rows("accumulations", optional=True)]),
    )
    top.finish()
    check_graph(graph, name)
    return graph


def _too_long(name: str) -> InputError:
    return wrong("", f"has more than {MOST_CHARACTERS // 2**20} MiB", name, "record fewer layers, or a smaller part of the model")


def _check_version(top: Row) -> None:
    """The two keys that say what the rest means; of a newer version nothing else is read."""
    known = top.take("format") if top.has("format") else None
    if known != FORMAT:
        problem = "is missing" if known is None else f"is {quoted(known)}, not {quoted(FORMAT)}"
        raise top.wrong("format", problem, "give a model file (.py), or a graph that `mpress-plan trace MODEL.py` has written")
    version = top.whole("version", 1)
    if version != VERSION:
        hint = "update mpress-plan, or trace the model again with this one"
        raise top.wrong("version", f"is {version}; this mpress-plan reads version {VERSION}", hint)


def _accumulation(row: Row) -> Accumulation:
    return Accumulation(
        after=row.identity("after"),
        bytes=Bytes(row.whole("bytes", default=0)),
        frees=row.wholes("frees", optional=True),
        drops=row.wholes("drops", optional=True),
    )


def _storage(row: Row) -> Storage:
    return Storage(
        id=row.whole("id"),
        bytes=Bytes(row.whole("bytes")),
        kind=row.choice("kind", _KINDS),
        saved=row.flag("saved", False),
        born=row.identity("born", -1),
        dies=row.identity("dies", -1),
    )


def _tensor(row: Row, names: Mapping[int, str]) -> Tensor:
    number = row.whole("id")
    shape = row.wholes("shape")
    if len(shape) > MOST_DIMENSIONS:
        raise row.wrong("shape", f"has {len(shape)} dimensions, not at most {MOST_DIMENSIONS}")
    return Tensor(
        id=number,
        storage=row.whole("storage"),
        shape=shape,
        stride=row.wholes("stride") if row.has("stride") else contiguous(shape),
        offset=row.whole("offset", default=0),
        dtype=row.text("dtype"),
        differentiable=row.flag("differentiable", False),
        name=names.get(number, ""),
    )


def _input(row: Row) -> Input:
    low = row.whole("low", LEAST_INTEGER, MOST_INTEGER, 0)
    return Input(row.text("name"), row.whole("tensor"), low, row.whole("high", LEAST_INTEGER, MOST_INTEGER, 0))


def _source(top: Row, value: object, path: str) -> Source:
    """[file, line, code]; the code is shown in refusals, so only tabs may be in it beside what is printable."""
    if type(value) is not list or len(value) != 3:
        raise top.wrong(path, "is not [file, line, code]")
    file, line, code = value
    if type(line) is not int or not 0 <= line <= MOST_LINE:
        raise top.wrong(path, "has no line number as its second item")
    if type(code) is not str or not code.replace("\t", "").isprintable():
        raise top.wrong(path, "has no line of code as its third item")
    return Source(top.bare(file, path), line, code)


def _op(row: Row, sources: Sequence[Source]) -> Op:
    target = row.text("target")
    if target.count(".") != 2 or not all(part.isascii() and part.isidentifier() for part in target.split(".")):
        raise row.wrong("target", f"is {quoted(target)}, not like aten.addmm.default")
    source = row.identity("source", -1)
    if source >= len(sources):
        raise row.wrong("source", f"is {source}, but sources are 0 to {len(sources) - 1}")
    return Op(
        id=row.whole("id"),
        target=target,
        args=tuple([_argument(row, value, f"args[{place}]", 0) for place, value in enumerate(row.items("args", optional=True))]),
        kwargs=_keywords(row),
        outputs=row.wholes("outputs", -1),
        multi=row.flag("multi", False),
        phase=row.choice("phase", _PHASES, Phase.FORWARD),
        module=row.text("module", ""),
        source=sources[source] if source >= 0 else _NOWHERE,
        forward_op=row.identity("forward_op", -1),
        view=row.flag("view", False),
        mutates=row.wholes("mutates", optional=True),
        random_key=_random_key(row),
        flops=Flops(row.number("flops", MOST_FLOPS, 0.0)),
        bytes_moved=Bytes(row.whole("bytes_moved", default=0)),
        repeats=row.identity("repeats", -1),
        atom=row.text("atom", ""),
    )


def _keywords(row: Row) -> tuple[tuple[str, Argument], ...]:
    if not row.has("kwargs"):
        return ()
    value = row.take("kwargs")
    if type(value) is not dict:
        raise row.wrong("kwargs", f"is {kind_of(value)}, not an object")
    for key in value:
        if not (key.isascii() and key.isidentifier()):
            raise row.wrong("kwargs", f"has the key {quoted(key)}, which is no name of an argument")
    return tuple([(key, _argument(row, item, f"kwargs.{key}", 0)) for key, item in value.items()])


def _random_key(row: Row) -> str:
    key = row.text("random_key", "")
    if key and not _RANDOM_KEY.fullmatch(key):
        raise row.wrong("random_key", f"is {quoted(key)}, not like h.0.drop#0")
    return key


def _argument(row: Row, value: object, path: str, depth: int) -> Argument:
    """A literal, {"tensor": id}, {"dtype": name} and its like, {"float": "inf"}, or a list of these."""
    if value is None or type(value) in (bool, float):
        return value  # type: ignore[return-value]  # None, bool or float by now
    if type(value) is int:
        if not LEAST_INTEGER <= value <= MOST_INTEGER:
            raise row.wrong(path, f"is {value}, which is no 64-bit integer")
        return value
    if type(value) is str:
        return row.printable(value, path) if value else ""
    if type(value) is list:
        if depth == MOST_NESTING:
            raise row.wrong(path, f"has lists nested more than {MOST_NESTING} deep")
        return tuple([_argument(row, item, f"{path}[{place}]", depth + 1) for place, item in enumerate(value)])
    if type(value) is dict and len(value) == 1:
        ((key, item),) = value.items()
        if key == "tensor" and type(item) is int and 0 <= item <= MOST_SIZE:
            return Ref(item)
        if key == "float" and item in _ODD_FLOATS:
            return float(item)
        if key in _GROUPS and type(item) is str and item.isascii() and item.isidentifier():
            return Name(key, item)
    words = ", ".join(f'{{"{group}": ...}}' for group in ("tensor", *_GROUPS, "float"))
    raise row.wrong(path, f"is {quoted(value)}; an object is one of {words}")
