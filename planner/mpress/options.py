"""What a user may ask of the planner.  Imports neither torch nor the solver, so the command line can build it before either is needed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mpress.errors import InputError
from mpress.plan import ScheduleKind
from mpress.recipe import Optimizer, Precision

DEFAULT_MICRO_BATCH = 1
DEFAULT_MICRO_BATCHES = 32
DEFAULT_PRECISION = Precision.BF16


class Attention(Enum):
    """The kernel of scaled_dot_product_attention; AUTO is the one torch would choose on the machine's GPUs."""

    AUTO = "auto"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


class View(Enum):
    """Whose operators a trace shows: those of a GPU, or torch on a CPU exactly as the user would run it there."""

    CPU = "cpu"
    CUDA = "cuda"


class Depth(Enum):
    """How layers that repeat are recorded: a few that stand for all of them where that is exact (FAST), or every one (FULL)."""

    FAST = "fast"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Recording:
    """Which step to record: everything a graph depends on, and how (depth changes the time it takes only).

    sequence: tokens, for a transformers configuration; 0 = its default.  flash: the GPUs it is recorded for have a flash attention kernel.
    """

    model: str
    model_args: tuple[tuple[str, str], ...]
    micro_batch: int
    precision: Precision
    attention: Attention
    sequence: int = 0
    depth: Depth = Depth.FAST
    flash: bool = True


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for.  model: "model.py", "model.py:factory", a transformers "config.json" or a graph file, "model.graph.json".

    micro_batch, precision: None where the user left it open (then 1 and bf16, or what the graph file was recorded with).
    sizes: micro-batch sizes to choose from in place of `micro_batch`, () to try powers of two; None where there is one size.
    global_batch: samples of an optimizer step; None where `micro_batches` says how many micro-batches it has.
    work_limit: deterministic units of solver work, 0 = default.  schedule_only: write no module, so operators need no form in one.
    prove: hold the recorded step against real runs on this CPU, where the model or its twin is small enough.
    """

    model: str
    gpus: int
    machine: str
    micro_batch: int | None
    micro_batches: int
    schedule: ScheduleKind
    precision: Precision | None
    optimizer: Optimizer
    gap: float
    reserve: float
    work_limit: float
    model_args: tuple[tuple[str, str], ...]
    out: Path
    dry_run: bool
    attention: Attention = Attention.AUTO
    schedule_only: bool = False
    sequence: int = 0
    prove: bool = True
    sizes: tuple[int, ...] | None = None
    global_batch: int | None = None
    depth: Depth = Depth.FAST

    @property
    def recording(self) -> Recording:
        """What to record of a model file, where the user left something open with the usual."""
        return Recording(
            self.model,
            self.model_args,
            DEFAULT_MICRO_BATCH if self.micro_batch is None else self.micro_batch,
            self.precision or DEFAULT_PRECISION,
            self.attention,
            self.sequence,
            self.depth,
        )


def parse_micro_batch(text: str) -> tuple[int, ...]:
    """Sizes of "4", "1,2,4" or "auto" (none: the planner tries powers of two); raises InputError."""
    hint = "give a number, several such as 1,2,4, or auto"
    if text.strip() == "auto":
        return ()
    sizes: list[int] = []
    for word in text.split(","):
        digits = word.strip()
        if not (digits.isascii() and digits.isdecimal()):
            raise InputError("micro-batch", f"'{text}' is not a list of micro-batch sizes: '{digits}' is no number", "--micro-batch", hint)
        if int(digits) < 1:
            raise InputError("micro-batch", f"a micro-batch of {int(digits)} samples is empty", "--micro-batch", "use 1 or more")
        if int(digits) in sizes:
            raise InputError("micro-batch", f"'{text}' names the size {int(digits)} twice", "--micro-batch", hint)
        sizes.append(int(digits))
    return tuple(sizes)
