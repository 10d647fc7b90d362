"""A server: devices, links, host memory.  Read from a TOML profile whose every number names its source."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpress.errors import InputError
from mpress.profiles import Table, known_machines, read_profile
from mpress.units import GIB, Bytes, BytesPerSecond

__all__ = ["Device", "Machine", "known_machines", "load_machine"]


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU.  peak_flops: dense FLOP/s by dtype ("float32", "float16", "bfloat16"); memory_bandwidth of its HBM.

    flash_attention: torch has a flash kernel for it.
    """

    capacity_bytes: Bytes
    peak_flops: tuple[tuple[str, float], ...]
    memory_bandwidth: BytesPerSecond
    efficiency: float
    launch_seconds: float
    flash_attention: bool = True


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

    def boundary_bandwidth(self, source: int, target: int) -> BytesPerSecond:
        """Bytes/s one message gets on a quiet machine: that of the pair, but over a link never more than a port carries."""
        pair = self.pair_bandwidth(source, target)
        return min(pair, self.port) if self.links[source][target] > 0 else pair

    def placed(self, order: tuple[int, ...]) -> Machine:
        """The machine as stages see it: its GPU s is GPU order[s] of this one; GPUs that `order` leaves out are not there.

        Uplinks are listed by their first stage, so that orders which differ by a symmetry of the machine give equal machines.
        """
        stage = {gpu: s for s, gpu in enumerate(order)}
        groups = ((tuple(sorted(stage[g] for g in group if g in stage)), rate) for group, rate in self.uplinks)
        return replace(
            self,
            devices=tuple(self.devices[g] for g in order),
            links=tuple(tuple(self.links[a][b] for b in order) for a in order),
            host_bandwidth=tuple(self.host_bandwidth[g] for g in order),
            uplinks=tuple(sorted((group, rate) for group, rate in groups if group)),
        )


def load_machine(name_or_path: str, *, gpus: int, reserve: float = 0.05, whole: bool = False) -> Machine:
    """The first `gpus` devices of a profile: a known machine (see known_machines) or a path that ends in .toml.

    `whole`: all its devices, at least `gpus`, so that a plan can choose among them.
    `reserve` is the share of each GPU's capacity left alone (context, communication libraries, fragmentation).
    """
    if not 0.0 <= reserve < 1.0:
        raise InputError(
            "reserve", f"a reserve of {reserve} is not a share of the capacity", "--reserve", "give a number from 0 to below 1"
        )
    profile = read_profile(name_or_path)
    name, count = profile.text("name"), profile.integer("devices")
    if gpus < 1 or gpus > count:
        raise InputError("gpus", f"{gpus} GPUs asked for, {name} has {count}", "--gpus", f"give a number from 1 to {count}")
    gpus = count if whole else gpus
    device = _device(profile.table("device"))
    links, port = _links(profile.table("links"), count)
    host = profile.table("host")
    bandwidth = BytesPerSecond(host.number("bandwidth"))
    uplinks = _uplinks(host, count, gpus)
    memory = Bytes(int(host.number("memory_gib") * GIB))
    latency = profile.number("latency_seconds", positive=False)
    profile.finish()
    return Machine(
        name=name,
        devices=(device,) * gpus,
        links=tuple(row[:gpus] for row in links[:gpus]),
        port=port,
        host_bandwidth=(bandwidth,) * gpus,
        uplinks=uplinks,
        host_memory=memory,
        latency_seconds=latency,
        reserve=reserve,
    )


def _device(table: Table) -> Device:
    peaks = table.table("peak_flops")
    efficiency = table.number("efficiency")
    if efficiency > 1.0:
        raise table.wrong("efficiency", f"is {efficiency}, a share of the peak is at most 1")
    return Device(
        capacity_bytes=Bytes(int(table.number("capacity_gib") * GIB)),
        peak_flops=tuple((dtype, peaks.number(dtype)) for dtype in peaks.names()),
        memory_bandwidth=BytesPerSecond(table.number("memory_bandwidth")),
        efficiency=efficiency,
        launch_seconds=table.number("launch_seconds", positive=False),
        flash_attention=table.truth("flash_attention") if table.has("flash_attention") else True,
    )


def _links(table: Table, count: int) -> tuple[tuple[tuple[BytesPerSecond, ...], ...], BytesPerSecond]:
    """Either `pair` (a switch: every pair has the same bandwidth) or `counts` (links per pair) with `by_count` (their bandwidth)."""
    port = BytesPerSecond(table.number("port"))
    if table.has("pair"):
        pair = table.number("pair")
        return tuple(tuple(BytesPerSecond(0.0 if a == b else pair) for b in range(count)) for a in range(count)), port
    counts = table.rows("counts")
    table.text("counts_source")
    if len(counts) != count or any(len(row) != count for row in counts):
        raise table.wrong("counts", f"is not a matrix of {count} x {count}")
    if any(counts[a][b] != counts[b][a] or counts[a][a] for a in range(count) for b in range(count)):
        raise table.wrong("counts", "is not symmetric with a diagonal of 0")
    by_count = table.table("by_count")
    speed = {0: 0.0} | {n: by_count.number(str(n)) for n in sorted({n for row in counts for n in row if n})}
    return tuple(tuple(BytesPerSecond(speed[n]) for n in row) for row in counts), port


def _uplinks(host: Table, count: int, gpus: int) -> tuple[tuple[tuple[int, ...], BytesPerSecond], ...]:
    """Groups that share a host uplink; a group keeps only the GPUs in use."""
    if not (host.has("uplink_groups") or host.has("uplink")):
        return ()
    groups = host.rows("uplink_groups")
    host.text("uplink_groups_source")
    bandwidth = BytesPerSecond(host.number("uplink"))
    members = [gpu for group in groups for gpu in group]
    if len(set(members)) != len(members) or any(gpu >= count for gpu in members):
        raise host.wrong("uplink_groups", f"must name each of the GPUs 0..{count - 1} at most once")
    used = (tuple(gpu for gpu in group if gpu < gpus) for group in groups)
    return tuple((group, bandwidth) for group in used if group)
