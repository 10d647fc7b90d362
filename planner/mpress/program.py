"""A cell in a mode as a list of lines: exactly what the emitter prints and what the memory of a cell is computed from.

Liveness rules, which emitted code obeys and `workload` coefficients are measured on:
- a line allocates its new storages before anything dies; after the line, every local whose storage (with all views of it) has no later
  use in the function is deleted (`del`), except values still held by the caller;
- the caller of a cell function holds its inputs (forward: `inputs`; backward: the incoming gradients) until the function returns;
- views are never lines of their own when they can be written inside the expression that uses them; they own no memory;
- SAVE puts a storage's root in the context (kept until the cell's backward loads it); SWAP_OUT starts its copy away: the storage stays
  allocated until the stage frees it (drain_lag);
- in the backward, kept and swapped-in storages leave the context when loaded (LOAD, right before first use; a swapped storage is allocated
  by the prefetch before the function starts) and die after their last use;
- RECOMPUTE lines run forward ops again in the backward right before first use; random ops use the same key, so the draw is equal;
- GRAD adds a tensor into the gradient buffer of a parameter (`grad += value`) and the value dies after it if unused later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verb(Enum):
    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    SAVE = "save"
    SWAP_OUT = "swap_out"
    LOAD = "load"
    GRAD = "grad"
    DELETE = "del"


@dataclass(frozen=True, slots=True)
class Line:
    """op: op id for COMPUTE/RECOMPUTE, contribution index for GRAD, else -1.
    tensors: for SAVE/SWAP_OUT/LOAD the root tensor of each storage; for DELETE the tensors whose storages die; else empty.
    """

    verb: Verb
    op: int
    tensors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CellProgram:
    """Lines of one cell type in one mode, in the ids of the type's representative cell.

    saved: root tensor of every storage that passes from forward to backward (kept or swapped), in order of SAVE/SWAP_OUT.
    """

    type: int
    recompute: tuple[int, ...]
    swap: tuple[int, ...]
    forward: tuple[Line, ...]
    backward: tuple[Line, ...]
    saved: tuple[int, ...]
