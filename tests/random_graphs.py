"""Hypothesis strategies for graphs as strange as the format allows: chains of made-up operators with every kind of argument."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from hypothesis import strategies as st

from mpress.graph import (
    ITEM_BYTES,
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
from mpress.units import Bytes, Flops

_LETTERS = st.characters(codec="utf-8", exclude_categories=["C", "Z"])
TEXTS = st.text(_LETTERS, min_size=1, max_size=12)
FILES = TEXTS.filter(lambda text: not text.startswith(".") and "/" not in text and "\\" not in text)
WORDS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
TARGETS = st.builds("{}.{}.{}".format, WORDS, WORDS, WORDS)
SIZES = st.integers(0, 2**50)
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
LITERALS: st.SearchStrategy[Argument] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.just(""),
    TEXTS,
    st.builds(Name, st.sampled_from(["dtype", "layout", "memory_format", "device"]), WORDS),
)
SOURCES = st.one_of(
    st.just(Source("", 0, "")), st.builds(Source, FILES, st.integers(0, 10**6), st.text(_LETTERS | st.sampled_from(" \t"), max_size=20))
)


class _Maker:
    """Grows a graph; storages are as large as the one tensor that is made with them."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.ops: list[Op] = []

    def tensor(
        self, kind: Kind, name: str = "", shape: tuple[int, ...] | None = None, dtype: str = "", differentiable: bool | None = None
    ) -> int:
        """A tensor on a storage of its own, laid out any way that has room."""
        draw = self.draw
        shape = draw(SHAPES) if shape is None else shape
        dtype = dtype or draw(st.sampled_from(sorted(ITEM_BYTES)))
        stride = tuple(draw(st.integers(0, 40)) for _ in shape)
        offset = draw(st.integers(0, 3))
        end = 0 if 0 in shape else (offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1) * ITEM_BYTES[dtype]
        self.storages.append(Storage(len(self.storages), Bytes(end), kind, draw(st.booleans()), draw(st.integers(-1, 0)), -1))
        flag = draw(st.booleans()) if differentiable is None else differentiable
        self.tensors.append(Tensor(len(self.tensors), len(self.storages) - 1, shape, stride, offset, dtype, flag, name))
        return len(self.tensors) - 1

    def op(self, known: list[int], outputs: tuple[int, ...], *, backward: bool, forwards: int, place: int = -1) -> Op:
        """An operator that reads some of what is known and makes `outputs`; some write what they read."""
        draw = self.draw
        refs = [Ref(draw(st.sampled_from(known))) for _ in range(draw(st.integers(0, 3)))] if known else []
        args: list[Argument] = [*refs, *draw(st.lists(LITERALS, max_size=2))]
        if draw(st.booleans()):
            args = [tuple(args), (), ((draw(LITERALS),),)]
        links = st.integers(-1, forwards - 1)
        return Op(
            id=len(self.ops) if place < 0 else place,
            target=draw(TARGETS),
            args=tuple(args),
            kwargs=tuple(draw(st.dictionaries(WORDS, LITERALS, max_size=2)).items()),
            outputs=outputs,
            multi=len(outputs) != 1 or draw(st.booleans()),
            phase=Phase.BACKWARD if backward else Phase.FORWARD,
            module=draw(st.one_of(st.just(""), TEXTS)),
            source=draw(SOURCES),
            forward_op=draw(links) if backward else -1,
            view=False,
            mutates=tuple(ref.tensor for ref in refs if draw(st.booleans())),
            random_key=draw(st.one_of(st.just(""), st.builds("{}#{}".format, TEXTS, st.integers(0, 99)))),
            flops=Flops(draw(st.floats(0, 1e24))),
            bytes_moved=Bytes(draw(SIZES)),
            repeats=draw(links) if backward else -1,
            atom=draw(st.one_of(st.just(""), TEXTS)),
        )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A graph that keeps every rule of docs/graph-format.md, and makes no sense."""
    make = _Maker(draw)
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    names = draw(st.lists(TEXTS, min_size=3, max_size=8, unique=True))
    trained = Parameter((names[0], *names[3:5]), make.tensor(Kind.PARAMETER, names[0], dtype=dtype), True, 0)
    frozen = Parameter((names[1],), make.tensor(Kind.PARAMETER, names[1], dtype=dtype), False, 0)
    buffer = Buffer((names[2],), make.tensor(Kind.BUFFER, names[2]), 0, draw(st.booleans()), -1)
    inputs = []
    for name in draw(st.lists(TEXTS, max_size=2, unique=True)):
        low, high = sorted(draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2)))
        inputs.append(Input(name, make.tensor(Kind.INPUT, name), low, high))
    known = list(range(len(make.tensors)))
    for _ in range(draw(st.integers(0, 4))):
        made = [make.tensor(Kind.COMPUTED) for _ in range(draw(st.integers(1, 2)))]
        make.ops.append(make.op(known, (*made, *([-1] if draw(st.booleans()) else [])), backward=False, forwards=0))
        known += made
    loss = make.tensor(Kind.COMPUTED, shape=(1,) * draw(st.integers(0, 2)), dtype="float32", differentiable=True)
    make.ops.append(make.op(known, (loss,), backward=False, forwards=0))
    forwards = len(make.ops)
    seed = make.tensor(Kind.COMPUTED, shape=make.tensors[loss].shape, dtype="float32")
    known += [loss, seed]
    gradients = []
    for _ in range(draw(st.integers(1, 3))):
        gradients.append(make.tensor(Kind.COMPUTED, shape=make.tensors[trained.tensor].shape))
        make.ops.append(make.op(known, (gradients[-1],), backward=True, forwards=forwards))
        known.append(gradients[-1])
    first = make.tensor(Kind.SETUP, shape=make.tensors[buffer.tensor].shape, dtype=make.tensors[buffer.tensor].dtype)
    setup = make.op([], (first,), backward=False, forwards=0, place=0)

    accumulations = []
    for after in sorted(draw(st.lists(st.integers(0, len(make.ops) - 1), max_size=3))):
        free = [number for number, storage in enumerate(make.storages) if storage.dies == -1]
        frees = draw(st.lists(st.sampled_from(free), max_size=2, unique=True))
        for number in frees:
            make.storages[number] = replace(make.storages[number], dies=after)
        accumulations.append(Accumulation(after, Bytes(draw(SIZES)), tuple(frees), ()))
    if len(accumulations) > 1 and draw(st.booleans()):
        accumulations[-1] = replace(accumulations[-1], drops=(0,))

    def elements(number: int) -> int:
        return prod(make.tensors[number].shape)

    return Graph(
        model=draw(FILES),
        micro_batch=draw(st.integers(1, 64)),
        ops=tuple(make.ops),
        tensors=tuple(make.tensors),
        storages=tuple(make.storages),
        parameters=tuple(Parameter(p.names, p.tensor, p.trainable, elements(p.tensor)) for p in (trained, frozen)),
        buffers=(Buffer(buffer.names, buffer.tensor, elements(buffer.tensor), buffer.persistent, first),),
        inputs=tuple(inputs),
        loss=loss,
        seed=seed,
        contributions=tuple(Contribution(trained.names[0], gradient) for gradient in gradients),
        setup=(setup,),
        checkpoints=draw(st.integers(0, 9)),
        assumptions=tuple(draw(st.lists(TEXTS, max_size=3))),
        accumulations=tuple(accumulations),
    )
