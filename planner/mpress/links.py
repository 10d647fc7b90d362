"""When a transfer ends: links, ports and host uplinks as first-come, first-served resources with a clock each.

A transfer occupies every resource on its way for bytes / bandwidth of that resource and ends when the slowest of them is done
(cut-through, not store-and-forward).  Resources: the directed link, the sender's and the receiver's port (all links of a GPU together),
and for host memory the GPU's own host link and the uplink its group shares.  Pairs without a link go through host memory.
"""

from __future__ import annotations

from mpress.machine import Machine
from mpress.plan import HOST
from mpress.units import Bytes

_Key = tuple[str, int, int]


class LinkClock:
    """Free time of every resource, and the bytes each pair has carried."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free: dict[_Key, float] = {}
        self._carried: dict[tuple[int, int], float] = {}
        self._ways: dict[tuple[int, int], tuple[tuple[_Key, float], ...]] = {}

    def occupy(self, source: int, target: int, size: float, now: float) -> float:
        """Send `size` bytes from source to target (HOST allowed) asked for at `now`; returns the end in seconds."""
        pair = (source, target)
        way = self._ways.get(pair)
        if way is None:
            way = self._ways[pair] = self._way(source, target)
        self._carried[pair] = self._carried.get(pair, 0.0) + size
        end = now
        for key, bandwidth in way:
            done = max(now, self._free.get(key, 0.0)) + size / bandwidth
            self._free[key] = done
            end = max(end, done)
        return end

    def carried(self) -> tuple[tuple[int, int, Bytes], ...]:
        """(source, target, bytes) of everything sent so far, sorted."""
        return tuple((a, b, Bytes(round(size))) for (a, b), size in sorted(self._carried.items()) if size > 0)

    def _way(self, source: int, target: int) -> tuple[tuple[_Key, float], ...]:
        if source == HOST:
            return self._host(target, "from host")
        if target == HOST:
            return self._host(source, "to host")
        link = self._machine.links[source][target]
        if link <= 0:
            return self._host(source, "to host") + self._host(target, "from host")
        port = self._machine.port
        return ((("link", source, target), link), (("out", source, -1), port), (("in", target, -1), port))

    def _host(self, device: int, direction: str) -> tuple[tuple[_Key, float], ...]:
        way: list[tuple[_Key, float]] = [((direction, device, -1), self._machine.host_bandwidth[device])]
        for group, (members, bandwidth) in enumerate(self._machine.uplinks):
            if device in members:
                way.append(((f"uplink {direction}", group, -1), bandwidth))
        return tuple(way)
