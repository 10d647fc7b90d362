"""What a model costs on a machine, cell type by cell type and mode by mode: the only numbers planner and simulator see.

A mode of a cell type says for each storage saved between its forward and its backward: keep, recompute or swap.
Mode 0 keeps everything.  Memory is additive along a stage.  For the cells 0..n-1 of a stage and one micro-batch:

- while cell i runs forward the stage holds   sum(resident[j], j < i) + swapped[j] of earlier cells not yet freed + forward_peak[i];
- between its forward and its backward a micro-batch holds   sum(resident[j]);
- while cell i runs backward it holds   sum(resident[j], j < i) + swapped[j] of cells j < i being fetched + backward_peak[i].

forward_peak and backward_peak count everything the cell itself touches, parameters and gradient buffers excluded: its input (its
incoming gradient), what it saves, its resident and swapped bytes (all of them in the backward) and its temporaries.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpress.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Mode:
    """One useful way to treat a cell type's saved storages.

    recompute, swap: storage ids of the type's representative cell, sorted; everything else saved is kept.
    forward_seconds excludes copies; backward_seconds excludes recompute_seconds.
    """

    recompute: tuple[int, ...]
    swap: tuple[int, ...]
    resident_bytes: Bytes
    swapped_bytes: Bytes
    forward_peak_bytes: Bytes
    backward_peak_bytes: Bytes
    recompute_seconds: Seconds


@dataclass(frozen=True, slots=True)
class CellCost:
    """A cell type.  output_bytes: what crosses a cut right after it (forward); gradient_bytes: what comes back over that cut.
    carried_bytes: what a stage that begins right after it keeps for each micro-batch beside its cells' resident bytes: storages that cells
    on both sides save (an encoder's output); the cells' modes count such a storage in the first cell that saves it only.
    kept_bytes: the part of output_bytes that any stage ending with the cell keeps for its backward as well: while that micro-batch is in
    flight, a sent buffer of it takes no memory of its own.
    input_bytes: the module's own inputs (token ids, targets) the cell reads, per micro-batch; a stage holds them for all M
    micro-batches during the whole step, so modes never count them.

    shared_parameters: ids of parameters also used by cells of other types (tied weights), as (tie id, elements); these elements
    are included in parameter_elements.  buffer_bytes: the model's buffers the cell uses; shared_buffers: those of them that other cells use
    too, as (buffer id, bytes); a stage holds each once.
    """

    name: str
    forward_seconds: Seconds
    backward_seconds: Seconds
    output_bytes: Bytes
    gradient_bytes: Bytes
    carried_bytes: Bytes
    kept_bytes: Bytes
    input_bytes: Bytes
    parameter_elements: int
    trainable_elements: int
    trainable_tensors: int
    largest_trainable_elements: int
    shared_parameters: tuple[tuple[int, int], ...]
    modes: tuple[Mode, ...]
    buffer_bytes: Bytes = Bytes(0)  # noqa: RUF009  # an integer
    shared_buffers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """The chain as numbers.  cells[i] is the type of cell i; segments fold it: (period of types, count).

    bytes_per_trainable / _per_frozen: recipe bytes per parameter element (weight, gradient, optimizer, master), resident all step.
    bytes_per_tensor: optimizer bytes per trainable tensor whatever its size (Adam's step counter).
    step_bytes_per_element: temporary bytes per element of the one parameter being stepped (fp32 copy of a 16-bit gradient).
    gradient_element_bytes: size of one gradient element (for the all-reduce of tied weights).
    optimizer_seconds_per_element: seconds the optimizer step takes per trainable element.
    """

    types: tuple[CellCost, ...]
    cells: tuple[int, ...]
    segments: tuple[tuple[tuple[int, ...], int], ...]
    bytes_per_trainable: int
    bytes_per_frozen: int
    bytes_per_tensor: int
    step_bytes_per_element: int
    gradient_element_bytes: int
    optimizer_seconds_per_element: float
