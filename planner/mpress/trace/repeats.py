"""Numbers that count things along a recording (ops, tensors, storages, ...) and where repetitions make such a sequence longer.

A recording of few repetitions of a stack has two in the middle, called the twins, that look alike: along every sequence, a region for one
and a region of equal length for the next (those at the ends may look different).  In a recording of more repetitions, these two regions
are replaced by more regions of that length.  The forward goes up through the repetitions, the backward goes down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mpress.trace.stacks import DepthError


@dataclass(frozen=True, slots=True)
class Region:
    """`length` numbers from `first` on belong to one twin of stack number `stack`, as many after them to the other.

    falling: the later twin comes first.
    """

    first: int
    length: int
    stack: int
    falling: bool = False

    @property
    def end(self) -> int:
        """One past the twins."""
        return self.first + 2 * self.length

    @property
    def template(self) -> int:
        """Where the earlier twin starts."""
        return self.first + self.length if self.falling else self.first

    @property
    def step(self) -> int:
        """How far from the earlier twin to the later one."""
        return -self.length if self.falling else self.length


@dataclass(frozen=True, slots=True)
class Line:
    """The number of a thing in the c-th repetition from the earlier twin on, in the long recording: at + c * step."""

    at: int
    step: int


class Axis:
    """One sequence, its regions, and how many repetitions more (-1: one less) each stack is to have."""

    def __init__(self, name: str, regions: Iterable[Region], more: Sequence[int]) -> None:
        self.regions = sorted((r for r in regions if r.length), key=lambda region: region.first)
        self._name = name
        self._more = more
        self._starts = [region.first for region in self.regions]
        self._before = [0]  # how much longer the sequence is before each region
        for region in self.regions:
            self._before.append(self._before[-1] + more[region.stack] * region.length)
        for left, right in pairwise(self.regions):
            if left.end > right.first:
                raise DepthError(f"the {name} of two stacks interleave")

    def outside(self, number: int) -> int:
        """The number, in the long recording, of something that is not repeated."""
        if number < 0 or not self.regions:
            return number
        index = bisect_right(self._starts, number) - 1
        if index < 0:
            return number
        region = self.regions[index]
        if number >= region.first + region.length:  # what belongs to a twin is at the ends of what replaces them
            return number + self._before[index + 1]
        return number + self._before[index]

    def line(self, one: int, two: int) -> Line:
        """Where the twins say `one` and `two`: the same number in all repetitions, or a neighbour's."""
        if one == two:
            return Line(self.outside(one), 0)
        for number in (one, two):
            index = bisect_right(self._starts, number) - 1
            if index >= 0 and number < self.regions[index].end and two - one == self.regions[index].step:
                region = self.regions[index]
                longer = self._more[region.stack] * region.length if region.falling else 0
                return Line(one + self._before[index] + longer, region.step)
        raise DepthError(f"two repetitions differ in their {self._name}")

    def walk(self, size: int) -> Iterator[tuple[int, Region | None]]:
        """Numbers outside of the regions with None, and each region once, as (where the earlier twin starts, region)."""
        number = 0
        for region in self.regions:
            for outside in range(number, region.first):
                yield outside, None
            yield region.template, region
            number = region.end
        for outside in range(number, size):
            yield outside, None

    def rounds(self, region: Region) -> range:
        """The values of c, for what replaces the twins, in the order of the sequence."""
        count = self._more[region.stack] + 2
        return range(count - 1, -1, -1) if region.falling else range(count)
