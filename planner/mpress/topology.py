"""Which orders of a machine's GPUs differ at all, and what no order can exceed.  Knows no model.

An order names the GPU of every stage.  Two orders are the same choice when the machine looks the same from both (`Machine.placed`), that
is, when a symmetry of the machine - one that keeps links, capacities, host links and uplinks - takes one to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mpress.machine import Machine
from mpress.units import BytesPerSecond

Order = tuple[int, ...]
_WIDTH = 10_080  # beginnings kept of one length: all, for up to seven GPUs and for the hybrid cube mesh with pairs behind host switches


@dataclass(frozen=True, slots=True)
class Orders:
    """all: one order of each class, the smallest, sorted.  complete: none was left out."""

    all: tuple[Order, ...]
    complete: bool


def different_orders(machine: Machine, stages: int, worth: Callable[[Order], float] | None = None) -> Orders:
    """Every choice of a GPU for each of `stages` stages, but for symmetry.

    Where there are too many, those whose beginnings are `worth` least (smallest first) are kept.
    """
    symmetry = _Symmetry(machine)
    level: list[tuple[Order, bool]] = [((), False)]
    complete = True
    for _ in range(stages):
        longer: list[tuple[Order, bool]] = []
        for prefix, rigid in level:
            free = [g for g in range(len(machine.devices)) if g not in prefix]
            found = free if rigid else symmetry.representatives(prefix, free)
            longer += [((*prefix, g), rigid or len(found) == len(free)) for g in found]
        if len(longer) > _WIDTH:
            complete = False
            key = worth or (lambda _: 0.0)
            longer = sorted(longer, key=lambda row: (key(row[0]), look(machine.placed(row[0])), row[0]))[:_WIDTH]
        level = longer
    orders = sorted(order for order, _ in level)
    if stages < len(machine.devices):  # what is left out no longer tells GPUs apart
        orders = sorted({look(machine.placed(order)): order for order in reversed(orders)}.values())
    return Orders(tuple(orders), complete)


def look(machine: Machine) -> tuple[object, ...]:
    """What a machine is to a plan, as a value that sorts: two orders with the same look are the same choice."""
    capacities = tuple(int(machine.usable_bytes(g)) for g in range(len(machine.devices)))
    return machine.links, capacities, machine.host_bandwidth, machine.uplinks


class _Symmetry:
    """Symmetries of a machine, looked for one GPU at a time (the machine is small; equal-looking GPUs nearly always are equal)."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._count = machine, len(machine.devices)
        self._whole = look(machine.placed(tuple(range(self._count))))
        every = range(self._count)
        self._relation = [[self._between(a, b) for b in every] for a in every]

    def _between(self, a: int, b: int) -> tuple[object, ...]:
        machine = self._machine
        shared = tuple(sorted((rate, len(group)) for group, rate in machine.uplinks if a in group and b in group))
        own = (machine.usable_bytes(a), machine.host_bandwidth[a]) if a == b else ()
        return machine.links[a][b], machine.links[b][a], shared, own

    def representatives(self, fixed: Order, free: list[int]) -> list[int]:
        """The smallest GPU of each set that symmetries which leave `fixed` in place take to each other."""
        found: list[int] = []
        for g in free:
            if not any(self._maps([*fixed, known], [*fixed, g]) for known in found):
                found.append(g)
        return found

    def _maps(self, source: list[int], image: list[int]) -> bool:
        """Whether some symmetry takes `source` to `image`, GPU by GPU."""
        if any(self._relation[source[-1]][a] != self._relation[image[-1]][b] for a, b in zip(source, image, strict=True)):
            return False
        if len(source) == self._count:
            order = [0] * self._count
            for a, b in zip(source, image, strict=True):
                order[a] = b
            return look(self._machine.placed(tuple(order))) == self._whole
        following = min(g for g in range(self._count) if g not in source)
        return any(self._maps([*source, following], [*image, g]) for g in range(self._count) if g not in image)


def optimistic(machine: Machine, stages: int) -> Machine:
    """A machine of `stages` GPUs on which every plan is at least as fast and fits at least as well as on `machine`, in any order.

    Every GPU has the largest capacity and host link, every pair the best link of any pair, every port at most what some GPU's best
    stages - 1 links carry, and all share one uplink as wide as the best choice of GPUs has together.
    """
    every = range(len(machine.devices))
    pairs = [(a, b) for a in every for b in every if a != b]
    linked = any(machine.links[a][b] > 0 for a, b in pairs)
    host = max(machine.host_bandwidth)
    message = max((machine.boundary_bandwidth(a, b) for a, b in pairs), default=0.0)
    pair = max(message, max((machine.links[a][b] for a, b in pairs), default=0.0)) if linked else 0.0
    together = max(
        (sum(sorted((rates[a][b] for b in every), reverse=True)[: stages - 1]) for rates in (machine.links, _back(machine)) for a in every),
        default=0.0,
    )
    best = max(every, key=lambda g: (machine.usable_bytes(g), -g))
    return replace(
        machine,
        devices=(machine.devices[best],) * stages,
        links=tuple(tuple(BytesPerSecond(0.0 if a == b else pair) for b in range(stages)) for a in range(stages)),
        port=BytesPerSecond(max(min(machine.port, together), message)) if linked else machine.port,
        host_bandwidth=(host,) * stages,
        uplinks=shared_uplink(machine, stages),
    )


def _back(machine: Machine) -> tuple[tuple[BytesPerSecond, ...], ...]:
    return tuple(zip(*machine.links, strict=True))


def shared_uplink(machine: Machine, stages: int) -> tuple[tuple[Order, BytesPerSecond], ...]:
    """One uplink for all stages, as wide as the way to host memory of the best choice of GPUs; none where no uplink is shared."""
    if not machine.uplinks:
        return ()
    home = {g: number for number, (group, _) in reversed(list(enumerate(machine.uplinks))) for g in group}
    gains: list[float] = []
    used = dict.fromkeys(range(len(machine.uplinks)), 0.0)
    for g in sorted(range(len(machine.devices)), key=lambda g: (-machine.host_bandwidth[g], g)):
        gain = float(machine.host_bandwidth[g])
        if g in home:  # the widest first: what one more GPU adds to its uplink only falls
            gain = min(gain, machine.uplinks[home[g]][1] - used[home[g]])
            used[home[g]] += gain
        gains.append(gain)
    total = sum(sorted(gains, reverse=True)[:stages])
    return ((tuple(range(stages)), BytesPerSecond(total)),) if total > 0 else ()
