"""Stripes meet every storage and every share to the byte, and no two of them overlap in a pool."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpress.plan import HOST, Plan, ScheduleKind, Share, StagePlan
from mpress.stripes import Stripe, Swapped, cut, layout
from mpress.units import Bytes

SIZES = st.lists(st.integers(1, 10**9), min_size=1, max_size=8)


def shares_of(total: int, weights: list[int]) -> tuple[Share, ...]:
    """`total` bytes over pools HOST, 0, 1, ..., roughly by weight."""
    parts, left = [], total
    for weight in weights[:-1]:
        parts.append(min(left, total * weight // max(sum(weights), 1)))
        left -= parts[-1]
    return tuple(Share(pool, Bytes(part)) for pool, part in enumerate([*parts, left], start=HOST) if part)


@given(SIZES, st.lists(st.integers(0, 100), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_margins_are_exact(sizes: list[int], weights: list[int]) -> None:
    storages = tuple(Swapped(i, i, Bytes(size)) for i, size in enumerate(sizes))
    shares = shares_of(sum(sizes), weights)
    pieces = cut(storages, shares)
    used = dict.fromkeys((share.pool for share in shares), 0)
    for storage, stripes in zip(storages, pieces, strict=True):
        assert sum(stripe.bytes for stripe in stripes) == storage.bytes
        for stripe in stripes:
            assert stripe.bytes > 0 and stripe.offset == used[stripe.pool]
            used[stripe.pool] += stripe.bytes
            share = next(share.bytes for share in shares if share.pool == stripe.pool)
            assert abs(stripe.bytes - storage.bytes * share / sum(sizes)) <= len(sizes) + 1
    assert used == {share.pool: share.bytes for share in shares}


def test_regions_of_several_owners_do_not_overlap() -> None:
    def stage(device: int, *shares: Share) -> StagePlan:
        return StagePlan(device, device, device + 1, (0,), shares, 1, 1)

    plan = Plan(
        ScheduleKind.ONE_F_ONE_B,
        8,
        (stage(0, Share(HOST, Bytes(5)), Share(2, Bytes(7))), stage(1, Share(2, Bytes(3))), stage(2)),
    )
    swapped = ((Swapped(0, 4, Bytes(8)), Swapped(0, 9, Bytes(4))), (Swapped(1, 5, Bytes(3)),), ())
    found = layout(plan, swapped)
    assert found.pools == ((2, Bytes(3 * 7 + 2 * 3)),)
    busy: set[int] = set()
    for owner, slots in ((0, 3), (1, 2)):
        lay = found.stages[owner]
        assert lay.region(2).slots == slots
        for micro_batch in range(slots):
            for stripe in (s for stripes in lay.stripes for s in stripes if s.pool == 2):
                start = lay.region(2).address(micro_batch, stripe)
                here = set(range(start, start + stripe.bytes))
                assert not here & busy
                busy |= here
    assert busy == set(range(27))
    assert found.stages[0].region(HOST).start == 0
    assert found.stages[0].region(2).address(4, Stripe(2, Bytes(1), Bytes(1))) == 7 + 1


def test_shares_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="shares of 4 bytes"):
        cut((Swapped(0, 0, Bytes(5)),), (Share(HOST, Bytes(4)),))
