"""Proves a trace: the user's step is really run on CPU, three times, and the recorded one is run on the same weights, data and draws.

Every operator must agree: its name and order, the shape, layout and memory of each result, and each result bit by bit; then the loss, every
gradient, every buffer after the step, what autograd saves, and the peak of live bytes.  ATen tags no operator of the CPU as
nondeterministic, so nothing is compared with a tolerance.  What memory holds before anything is written there (`empty`) is not compared.
The first two real runs are observed; the second finds steps that depend on Python state.  The third is plain: its loss, gradients and
buffers must be the same.

Autograd differentiates a view of a written tensor by `as_strided`, of a fake one by replaying the views.  The observed runs replay, too;
where the graph writes into views the plain run, which does not, may round sums in another order and is compared to 6 digits.

The recording held against the CPU is the one of the CPU view; `substitution` then says that the CUDA view of the same model differs
only where a GPU is known to run other operators.  oneDNN is off, as in the CUDA view, so that recurrent layers are the same operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from mpress.graph import Graph, Kind
from mpress.options import View
from mpress.trace.agreement import (
    Walk,
    same_again,
    same_calls,
    same_first_values,
    same_outcome,
    same_peak,
    same_saved,
    same_state,
    same_unwatched,
    writes_views,
)
from mpress.trace.interpret import interpret
from mpress.trace.model_file import ModelFile, shrunken
from mpress.trace.real_model import SEED, NoKernel, RealModel
from mpress.trace.record import PRECISIONS, trace_file
from mpress.trace.semantics import Semantics
from mpress.trace.substitution import check_substitutions

# What a proof may cost, in fixed numbers so that the same model is always treated alike: a few seconds and about a gigabyte.
MOST_BYTES = 1 << 30
MOST_FLOPS = 2e10
MOST_MOVED = 4e9
MOST_OPERATORS = 10_000
_C: Any = torch._C


class Verdict(Enum):
    """PROVEN: the model itself; TWIN: the same model at the sizes of the file's twin()."""

    PROVEN = "proven"
    TWIN = "twin"
    NOT_PROVEN = "not proven"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proven; why: one line, what was run or why nothing was."""

    verdict: Verdict
    why: str


def prove(model_file: ModelFile, graph: Graph, *, micro_batch: int, precision: str, semantics: Semantics) -> Proof:
    """Prove `graph`, recorded from this model file, or the file's twin if the model is too large to run here.

    Raises InputError("proof"), naming the first operator that differs.
    """
    too_large = excess(graph)
    if not too_large:
        with without_onednn():
            return _proven(model_file, graph, Verdict.PROVEN, micro_batch, precision, semantics)
    twin = shrunken(model_file)
    if twin is None:
        hint = f"; define twin() in {model_file.file}" if model_file.file.endswith(".py") else ""
        return Proof(Verdict.NOT_PROVEN, f"{too_large}{hint}")
    with without_onednn():
        small = trace_file(twin, micro_batch=micro_batch, precision=precision, semantics=semantics)
        too_large = excess(small)
        if too_large:
            return Proof(Verdict.NOT_PROVEN, f"its twin is {too_large}")
        return _proven(twin, small, Verdict.TWIN, micro_batch, precision, semantics)


def excess(graph: Graph) -> str:
    """Why running this step a few times on a CPU is too much, "" if it is not."""
    state = sum(s.bytes for s in graph.storages if s.kind in (Kind.PARAMETER, Kind.BUFFER))
    saved = sum(s.bytes for s in graph.storages if s.saved and s.kind is Kind.COMPUTED)
    largest = max((op.bytes_moved for op in graph.ops), default=0)
    for amount, most, words in (
        (4 * state + 2 * saved + largest, MOST_BYTES, "too large to run here ({:.2g} bytes)"),  # weights twice, gradients twice
        (sum(op.flops for op in graph.ops), MOST_FLOPS, "too much to compute here ({:.2g} FLOPs)"),
        (sum(op.bytes_moved for op in graph.ops), MOST_MOVED, "too much to move here ({:.2g} bytes)"),
        (len(graph.ops), MOST_OPERATORS, "too long to run here ({:,} operators)"),
    ):
        if amount > most:
            return words.format(amount)
    return ""


@contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN off, as on a GPU."""
    before = _C._get_mkldnn_enabled()
    _C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        _C._set_mkldnn_enabled(before)


def _proven(model_file: ModelFile, graph: Graph, verdict: Verdict, micro_batch: int, precision: str, semantics: Semantics) -> Proof:
    same = graph
    if semantics.view is not View.CPU:
        same = trace_file(model_file, micro_batch=micro_batch, precision=precision, semantics=Semantics(view=View.CPU))
    try:
        hold(model_file, same, micro_batch=micro_batch, precision=precision)
    except NoKernel as error:
        return Proof(Verdict.NOT_PROVEN, f"the CPU has no {precision} kernel: {error}")
    if same is not graph:
        check_substitutions(graph, same)
    return Proof(
        verdict, f"{len(same.ops)} operators, loss and {sum(p.trainable for p in same.parameters)} gradients bit-equal to a real run"
    )


def hold(model_file: ModelFile, graph: Graph, *, micro_batch: int, precision: str) -> None:
    """Hold a graph of the CPU view against the user's model, really built and run.  Raises InputError("proof")."""
    model = RealModel(model_file, micro_batch, PRECISIONS[precision])
    same_state(graph, model.module)
    same_first_values(graph, model.buffers())
    seen, real = model.observed()
    same_calls(graph, seen)
    same_again(seen, model.observed()[0])
    same_unwatched(real, model.plain(), exact=not writes_views(graph))
    found = interpret(graph, model.parameters(), model.buffers(), model.inputs(), SEED, Walk(seen).watch)
    same_outcome(graph, found, real)
    same_saved(graph, seen)
    same_peak(graph, seen)
