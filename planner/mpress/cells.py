"""The forward as a chain of cells: the places a pipeline may be cut, and which cells are equal.

A cell is a run of forward ops (usually one block, `h.3`) with the backward ops that differentiate them.  Two cells are of one type
when structure, shapes, constants, relative parameter names and dataflow, forward and backward, are equal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """One link of the chain.  All tuples are in a canonical order, so equal cells correspond position by position.

    What a later cell needs of an earlier one passes through all cells between: it is an input and an output of each of them.

    name: "h.3", "h.3/2" (second part of a block) or "wte..drop" for ops outside blocks; prefix: "h.3." or "".
    forward, backward: op ids in execution order (view ops included; views of what enters come first and are in several cells).
    inputs: tensor ids computed in earlier cells that this cell or a later one uses, newest first (usually one).
    user_inputs: tensor ids of the module's inputs it uses.  parameters, buffers: canonical names it uses, in order of first use.
    outputs: tensor ids that later cells use: the next cell's inputs (the loss for the last cell).
    gradient_inputs: backward tensors made by later cells that this cell's backward or an earlier one's uses (for the last cell: the seed).
    gradient_outputs: those made by this cell or a later one that earlier cells' backwards use: the gradient_inputs of the cell before.
    contributions: indices into Graph.contributions: gradients of the parameters its forward uses.
    shared: storages this cell and another one save for their backwards.  borrowed: those an earlier cell saves too, so that in one stage
       they are there already.  carried: storages a stage that begins behind this cell holds for each micro-batch because cells of it save
       what cells before it saved too.
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
    shared: tuple[int, ...]
    borrowed: tuple[int, ...]
    carried: tuple[int, ...]


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
