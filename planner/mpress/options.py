"""What a user may ask of the planner.  Imports neither torch nor the solver, so the command line can build it before either is needed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mpress.plan import ScheduleKind
from mpress.recipe import Optimizer, Precision


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
class Options:
    """What the user asked for.  model: "model.py" or "model.py:factory"; work_limit: deterministic units of solver work, 0 = default."""

    model: str
    gpus: int
    machine: str
    micro_batch: int
    micro_batches: int
    schedule: ScheduleKind
    precision: Precision
    optimizer: Optimizer
    gap: float
    reserve: float
    work_limit: float
    model_args: tuple[tuple[str, str], ...]
    out: Path
    dry_run: bool
    attention: Attention = Attention.AUTO
