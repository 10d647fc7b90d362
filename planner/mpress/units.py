"""Units as types.  Bytes are integers, seconds and FLOPs floats; GiB = 2**30, GB = 1e9 and the two are never mixed."""

from __future__ import annotations

import re
from typing import NewType

from mpress.errors import InputError

Bytes = NewType("Bytes", int)
Seconds = NewType("Seconds", float)
Flops = NewType("Flops", float)
BytesPerSecond = NewType("BytesPerSecond", float)

GIB = 2**30
MIB = 2**20
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)\s*$")
_FACTOR = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> Bytes:
    """Read "40GiB", "512 MB" or "1024B"; raises InputError for anything else."""
    match = _SIZE.match(text)
    if match is None:
        raise InputError("size", f"'{text}' is not a size", hint="write a number with a unit, such as 40GiB or 512MB")
    return Bytes(int(float(match.group(1)) * _FACTOR[match.group(2)]))


def gib(size: int) -> str:
    """Print bytes as GiB with two decimals ("37.62 GiB"), or MiB / KiB / B when smaller than 0.1 of the unit."""
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if abs(size) >= 0.1 * factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"
