"""The forward as a chain of cells: the places a pipeline may be cut, and which cells are equal.

A cell is a run of forward ops (usually one block, `h.3`) with the backward ops that differentiate them.  Two cells are of one type
when structure, shapes, constants, relative parameter names and dataflow, forward and backward, are equal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """One link of the chain.  All tuples are in a canonical order, so equal cells correspond position by position.

    name: "h.3", "h.3/2" (second part of a block) or "wte..drop" for ops outside blocks; prefix: "h.3." or "".
    forward, backward: op ids in execution order (view ops included).
    inputs: tensor ids computed in earlier cells that this cell's forward uses (usually one).
    user_inputs: tensor ids of the module's inputs it uses.  parameters, buffers: canonical names it uses, in order of first use.
    outputs: tensor ids its forward makes that later cells use in their forward (the loss for the last cell).
    gradient_inputs: backward tensors made by later cells that its backward uses: exactly the gradients of its outputs
       (for the last cell: the seed), in the order of `outputs`, -1 where an output has no gradient.
    gradient_outputs: gradients of its `inputs`, in the order of `inputs`, -1 where an input has none.
    contributions: indices into Graph.contributions whose tensors this cell's backward makes.
    """

    index: int
    type: int
    name: str
    prefix: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    inputs: tuple[int, ...]
    user_inputs: tuple[int, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    outputs: tuple[int, ...]
    gradient_inputs: tuple[int, ...]
    gradient_outputs: tuple[int, ...]
    contributions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` repetitions of the types in `period`, e.g. one block type 75 times."""

    period: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Chain:
    """All cells in order; `representatives[t]` is the index of the first cell of type t."""

    cells: tuple[Cell, ...]
    representatives: tuple[int, ...]
    segments: tuple[Segment, ...]
