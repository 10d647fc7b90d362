"""What a user may ask of the planner.  Imports neither torch nor the solver, so the command line can build it before either is needed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mpress.plan import ScheduleKind
from mpress.recipe import Optimizer, Precision

DEFAULT_MICRO_BATCH = 1
DEFAULT_PRECISION = Precision.BF16


class Attention(Enum):
    """The kernel of scaled_dot_product_attention; AUTO is the one torch would choose on a GPU."""

    AUTO = "auto"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


class View(Enum):
    """Whose operators a trace shows: those of a GPU, or torch on a CPU exactly as the user would run it there."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Recording:
    """Which step to record: everything a graph depends on.  sequence: tokens, for a transformers configuration; 0 = its default."""

    model: str
    model_args: tuple[tuple[str, str], ...]
    micro_batch: int
    precision: Precision
    attention: Attention
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for.  model: "model.py", "model.py:factory", a transformers "config.json" or a graph file, "model.graph.json".

    micro_batch, precision: None where the user left it open (then 1 and bf16, or what the graph file was recorded with).
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
        )
