"""One model at several micro-batch sizes: few are recorded, the others follow from the law, unless it does not hold; then all are recorded.

The law is fixed by sizes 2 and 3 and held against the largest size asked for, so that it only ever fills in between recordings.  Size 1 is
always recorded: there, dimensions broadcast and strides are contiguous that are not at other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from mpress.errors import InputError
from mpress.graph import Graph
from mpress.options import Depth
from mpress.scale import Law, NoLaw, Ranges, fit
from mpress.trace.model_file import ModelFile, example_inputs
from mpress.trace.record import trace_file, value_range
from mpress.trace.semantics import Semantics

BASE = (2, 3)


@dataclass(frozen=True, slots=True)
class TracedSizes:
    """graphs: one for each size that can be traced; recorded: which of them are recordings; refusals: of the other sizes.

    note: how the graphs were made, in words.
    """

    graphs: Mapping[int, Graph]
    recorded: frozenset[int]
    refusals: Mapping[int, InputError]
    note: str


def trace_sizes(
    model_file: ModelFile, sizes: Sequence[int], *, precision: str, semantics: Semantics, depth: Depth = Depth.FAST
) -> TracedSizes:
    """The graphs of all sizes; raises the first InputError if none can be traced."""
    return fill(
        sizes,
        lambda size: trace_file(model_file, micro_batch=size, precision=precision, semantics=semantics, depth=depth),
        lambda size: example_ranges(model_file, size),
    )


def example_ranges(model_file: ModelFile, size: int) -> Ranges:
    """What Graph.inputs says about the values of the example inputs, without recording anything."""
    positional, keyword = example_inputs(model_file, size)
    return tuple(value_range(leaf) for leaf in tree_leaves((positional, tuple(keyword.values()))) if isinstance(leaf, torch.Tensor))


def fill(sizes: Sequence[int], record: Callable[[int], Graph], ranges: Callable[[int], Ranges]) -> TracedSizes:
    """`trace_sizes` with any way to record.  Each size is recorded at most once."""
    wanted = sorted(set(sizes))
    ends = {*BASE, wanted[-1]}
    between = [size for size in wanted if size > BASE[1] and size not in ends]
    known = _Recordings(record)
    note = ""
    law: Law | None = None
    if len(between) > len(ends.difference(wanted)):  # else the law saves no recording
        law, note = _law(known, wanted[-1])
    graphs: dict[int, Graph] = {}
    refusals: dict[int, InputError] = {}
    for size in wanted:
        try:
            graphs[size] = law.at(size, ranges(size)) if law is not None and size in between else known.at(size)
        except InputError as error:
            refusals[size] = error
    if not graphs:
        raise refusals[wanted[0]]
    recorded = frozenset(size for size in graphs if law is None or size not in between)
    return TracedSizes(graphs, recorded, refusals, note)


def _law(known: _Recordings, largest: int) -> tuple[Law | None, str]:
    """The law if it holds, and a note."""
    try:
        first, second, third = (known.at(size) for size in (*BASE, largest))
    except InputError as error:
        return None, f"each size is traced, as not every size can be: {error.message}"
    found = fit(first, second)
    why = found.why if isinstance(found, NoLaw) else found.contradiction(third)
    if isinstance(found, NoLaw) or why:
        return None, f"each size is traced, as the operators do not grow evenly with it: {why}"
    return found, f"sizes between {BASE[1]} and {largest} by a law that {BASE[0]}, {BASE[1]} and {largest} confirm"


class _Recordings:
    """Recordings made so far."""

    def __init__(self, record: Callable[[int], Graph]) -> None:
        self._record = record
        self._made: dict[int, Graph | InputError] = {}

    def at(self, size: int) -> Graph:
        """The recording at a size; raises the refusal again where it was refused."""
        if size not in self._made:
            try:
                self._made[size] = self._record(size)
            except InputError as error:
                self._made[size] = error
        made = self._made[size]
        if isinstance(made, InputError):
            raise made
        return made
