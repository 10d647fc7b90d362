"""What the replay of a plan knows of one stage, and of one message between two, at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpress.units import Bytes, Seconds
from mpress.workload import Mode


@dataclass(slots=True)
class Transfer:
    """One boundary message: it starts when both ends have called, `origin` is the compute action that was late."""

    sent: tuple[float, int] | None = None
    posted: tuple[float, int] | None = None
    end: float | None = None
    origin: int = -1
    waiting: list[RankState] = field(default_factory=list)


@dataclass(slots=True)
class RankState:
    """State of one stage while it runs.  `origin` indexes the compute action that determines `now`."""

    stage: int
    device: int
    modes: tuple[Mode, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    shares: tuple[tuple[int, int], ...]
    swapped_total: int
    lag: int
    lead: int
    outputs: int
    input_gradient: int
    carried: int
    kept: int
    steps: list[tuple[str, int, int]] = field(default_factory=list)
    position: int = 0
    now: float = 0.0
    wake: float = 0.0
    origin: int = -1
    static: int = 0
    inputs: int = 0
    foreign: int = 0
    resident: int = 0
    swapping: int = 0
    sending: int = 0
    sent: int = -1  # the micro-batch whose output was sent last
    alone: bool = False  # its backward has begun: the sent buffer is all that holds it
    receiving: int = 0
    peak: int = -1
    peak_action: str = ""
    peak_parts: tuple[int, int, int, int] = (0, 0, 0, 0)
    stall: float = 0.0
    busy: float = 0.0
    copies: dict[tuple[int, int], float] = field(default_factory=dict)
    curve: list[tuple[Seconds, Bytes]] = field(default_factory=list)

    def charge(self, action: str, index: int, cell_peak: int, kept: int) -> None:
        """Note the memory while a line runs; `kept` of cell_peak are activations (resident or swapped in), the rest workspace."""
        boundary = self.sending + self.receiving
        total = self.static + self.inputs + self.foreign + self.resident + self.swapping + boundary + cell_peak
        self.curve.append((Seconds(self.now), Bytes(total)))
        if total > self.peak:
            self.peak, self.peak_action = total, f"{self.stage}{action}{index if index >= 0 else ''}"
            self.peak_parts = (self.resident + kept, self.swapping, boundary, cell_peak - kept)
