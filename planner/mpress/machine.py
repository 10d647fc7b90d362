"""A server: devices, links, host memory.  Read from a TOML profile whose every number names its source."""

from __future__ import annotations

from dataclasses import dataclass

from mpress.units import Bytes, BytesPerSecond


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU.  peak_flops: dense FLOP/s by dtype ("float32", "float16", "bfloat16"); memory_bandwidth of its HBM."""

    capacity_bytes: Bytes
    peak_flops: tuple[tuple[str, float], ...]
    memory_bandwidth: BytesPerSecond
    efficiency: float
    launch_seconds: float


@dataclass(frozen=True, slots=True)
class Machine:
    """links[a][b]: bytes/s from GPU a to GPU b in one direction, 0 where there is no direct link (never the diagonal).
    port: bytes/s one GPU can send (and, separately, receive) over all its links together (the NVSwitch port, or the sum of links).
    host_bandwidth[g]: bytes/s between GPU g and host memory per direction, alone.
    uplinks: groups of GPUs that share one host uplink, with its bytes/s per direction.
    pair_bandwidth(a, b) below falls back to the host path where no link exists.
    usable_bytes = capacity x (1 - reserve).
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[tuple[BytesPerSecond, ...], ...]
    port: BytesPerSecond
    host_bandwidth: tuple[BytesPerSecond, ...]
    uplinks: tuple[tuple[tuple[int, ...], BytesPerSecond], ...]
    host_memory: Bytes
    latency_seconds: float
    reserve: float

    def usable_bytes(self, device: int) -> Bytes:
        """Capacity less the reserve for context, communication libraries and fragmentation."""
        return Bytes(int(self.devices[device].capacity_bytes * (1.0 - self.reserve)))

    def pair_bandwidth(self, source: int, target: int) -> BytesPerSecond:
        """Bytes/s of a boundary transfer: the link, or the slower host path where the pair has none."""
        link = self.links[source][target]
        return link if link > 0 else min(self.host_bandwidth[source], self.host_bandwidth[target])
