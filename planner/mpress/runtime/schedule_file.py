"""Reads `<model>.schedule.json`: what this process has to know of the plan."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = -1  # pool id of host memory, beside ranks


class RunError(Exception):
    """A refusal before or during a run; `str()` is one line with a way out."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """`bytes` of a tensor at `offset + slot * bytes` of a pool."""

    pool: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Swapped:
    """Where one swapped tensor of one stage goes.  Slot = micro-batch modulo `slots`."""

    bytes: int
    slots: int
    stripes: tuple[Stripe, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that crosses a cut."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Step:
    """One action word of a stage, such as SEND_F of micro-batch 3; micro_batch is -1 for TIED and STEP."""

    word: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.word}{self.micro_batch if self.micro_batch >= 0 else ''}"


@dataclass(frozen=True, slots=True)
class StageFile:
    """What one rank does.  forward/gradients: tensors over the cut *after* this stage: forward, and gradients that come back."""

    index: int
    peak_bytes: int
    steps: tuple[Step, ...]
    forward: tuple[Boundary, ...]
    gradients: tuple[Boundary, ...]
    swapped: dict[tuple[str, str], Swapped]


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter with copies on several stages: (stage, its name there)."""

    parameter: str
    copies: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class ScheduleFile:
    """devices: GPU index by rank; pools: bytes lent by rank; host: bytes of host memory used by rank."""

    fingerprint: str
    micro_batches: int
    optimizer: str
    stages: tuple[StageFile, ...]
    devices: tuple[int, ...]
    pools: tuple[int, ...]
    host: tuple[int, ...]
    tied: tuple[Tied, ...]


_STEP = re.compile(r"^(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|TIED|STEP|F|B)(\d*)$")
FORMAT = "mpress.schedule/1"


def read_schedule(path: Path) -> ScheduleFile:
    """Raises RunError when the file is missing, is no JSON or has another format."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise RunError(f"cannot read the schedule {path}: {error.strerror}; pass --schedule FILE") from error
    except ValueError as error:
        raise RunError(f"{path} is not a schedule: {error}; write it again with mpress-plan") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunError(f"{path} is not of format {FORMAT}; write it again with this version of mpress-plan")
    try:
        return _parse(document)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RunError(f"{path} is damaged ({type(error).__name__}: {error}); write it again with mpress-plan") from error


def _parse(document: dict[str, Any]) -> ScheduleFile:
    pipeline = document["pipeline"]
    count = int(pipeline["stages"])
    rank_of = {int(device): rank for rank, device in enumerate(pipeline["devices"])}
    rank_of[HOST] = HOST
    swapped: list[dict[tuple[str, str], Swapped]] = [{} for _ in range(count)]
    for row in document["tensors"]:
        stripes = tuple(Stripe(rank_of[int(pool)], int(offset), int(size)) for pool, offset, size in row["stripes"])
        if sum(stripe.bytes for stripe in stripes) != int(row["bytes"]):
            raise ValueError(f"the stripes of {row['cell']} {row['name']} do not add up to its size")
        swapped[int(row["stage"])][(row["cell"], row["name"])] = Swapped(int(row["bytes"]), int(row["slots"]), stripes)
    stages = []
    for index in range(count):
        after = document["edges"][index] if index < count - 1 else {"forward": [], "gradients": []}
        forward = tuple(_boundary(row) for row in after["forward"])
        gradients = tuple(_boundary(row) for row in after["gradients"])
        lines = document["actions"][str(index)]
        steps = tuple(_step(word, index) for line in lines for word in line.split())
        stages.append(StageFile(index, int(document["stages"][index]["peak_bytes"]), steps, forward, gradients, swapped[index]))
    pools = [0] * count
    for device, size in document["pools"]["devices"].items():
        pools[rank_of[int(device)]] = int(size)
    host = [int(document["pools"]["host"].get(str(device), 0)) for device in pipeline["devices"]]
    tied = tuple(
        Tied(str(group["parameter"]), tuple((int(copy["stage"]), str(copy["parameter"])) for copy in group["copies"]))
        for group in pipeline["tied"]
    )
    return ScheduleFile(
        fingerprint=document["model"]["graph_sha256"],
        micro_batches=int(pipeline["micro_batches"]),
        optimizer=document["recipe"]["optimizer"],
        stages=tuple(stages),
        devices=tuple(int(device) for device in pipeline["devices"]),
        pools=tuple(pools),
        host=tuple(host),
        tied=tied,
    )


def _boundary(row: dict[str, Any]) -> Boundary:
    return Boundary(tuple(row["shape"]), tuple(row["stride"]), row["dtype"])


def _step(text: str, stage: int) -> Step:
    match = _STEP.match(text)
    if match is None or int(match.group(1)) != stage:
        raise ValueError(f"'{text}' is not an action of stage {stage}")
    return Step(match.group(2), int(match.group(3)) if match.group(3) else -1)
