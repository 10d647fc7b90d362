"""Transport and context: bytes go out in stripes, memory is free when the plan says so, and everything comes back as it was."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from mpress.runtime.account import Accountant
from mpress.runtime.context import Context
from mpress.runtime.schedule_file import HOST, Stripe, Swapped
from mpress.runtime.transport import Transport

CPU = torch.device("cpu")


def transport(**sizes: int) -> tuple[Transport, dict[int, Tensor]]:
    pools = {HOST if name == "host" else int(name[3:]): torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    return Transport(pools, CPU), pools


def context(carrier: Transport, places: dict[tuple[str, str], Swapped], micro_batch: int = 0) -> Context:
    return Context(carrier, places, CPU, {}, seed=0, step=0, micro_batch=micro_batch)


def test_stripes_land_at_their_offsets_and_slots() -> None:
    carrier, pools = transport(host=10, gpu2=64)
    source = torch.arange(1, 11, dtype=torch.uint8)
    stripes = (Stripe(2, 8, 7), Stripe(HOST, 1, 3))
    carrier.put(source, stripes, slot=2).wait()
    assert pools[2][8 + 2 * 7 : 8 + 3 * 7].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert pools[HOST][1 + 2 * 3 : 1 + 3 * 3].tolist() == [8, 9, 10]
    assert int(pools[2].count_nonzero() + pools[HOST].count_nonzero()) == 10
    target = torch.zeros(10, dtype=torch.uint8)
    carrier.get(target, stripes, slot=2).wait()
    assert torch.equal(target, source)
    assert carrier.moved == {(2, "out"): 7, (HOST, "out"): 3, (2, "in"): 7, (HOST, "in"): 3}
    carrier.close()


def test_stripes_must_hold_the_tensor() -> None:
    carrier, _ = transport(host=10)
    with pytest.raises(ValueError, match="stripes hold 4 bytes, the tensor 5"):
        carrier.put(torch.zeros(5, dtype=torch.uint8), (Stripe(HOST, 0, 4),), slot=0)


def test_a_copy_that_fails_is_raised_by_whoever_waits() -> None:
    carrier, _ = transport(host=10)
    work = carrier.put(torch.zeros(4, dtype=torch.uint8, device="meta"), (Stripe(HOST, 0, 4),), slot=0)
    with pytest.raises(NotImplementedError):
        work.wait()
    carrier.close()


def test_a_finished_copy_keeps_nothing_alive() -> None:
    carrier, _ = transport(host=4096)
    for _ in range(50):  # the thread must have let go when the waiter wakes, not some time later
        tensor = torch.zeros(4096, dtype=torch.uint8)
        gone = weakref.ref(tensor.untyped_storage())
        carrier.put(tensor, (Stripe(HOST, 0, 4096),), slot=0).wait()
        del tensor
        assert gone() is None
    carrier.close()


def test_swapped_memory_is_free_until_it_is_prefetched() -> None:
    carrier, pools = transport(gpu1=3 * 4096)
    places = {(f"h.{i}", "x"): Swapped(4096, 1, (Stripe(1, i * 4096, 4096),)) for i in range(3)}
    with Accountant(1) as accountant:
        for pool in pools.values():
            accountant.ignore(pool)
        c = context(carrier, places)
        for i in range(3):
            cell, x = c.at(f"h.{i}"), torch.full((32, 32), float(i))
            cell.swap_out(x=x)
            del x, cell
            c.free(behind=1)
            assert accountant.live[0] == 4096  # that of this cell; the cells before have left
        c.free()
        assert accountant.live[0] == 0
        c.give((), backward=True)
        for i in (2, 1, 0):
            c.prefetch(ahead=1)
            assert accountant.live[0] == 4096 * min(i + 1, 2)
            back = c.at(f"h.{i}").load("x")
            with accountant.paused():
                assert torch.equal(back, torch.full((32, 32), float(i)))
            del back
        assert accountant.live[0] == 0
        assert accountant.peak[0] == 2 * 4096
    assert c.late == 0
    assert c.left() == []
    carrier.close()


def test_strides_and_offsets_come_back() -> None:
    carrier, _ = transport(host=480)
    whole = torch.randn(2, 3, 4, 5)
    view = whole.transpose(1, 2)[:, 1:]
    c = context(carrier, {("a", "t"): Swapped(480, 1, (Stripe(HOST, 0, 480),))})
    c.at("a").swap_out(t=view)
    c.free()
    c.give((), backward=True)
    c.prefetch(ahead=1)
    back = c.at("a").load("t")
    assert torch.equal(back, view)
    assert back.stride() == view.stride()
    carrier.close()


def test_a_load_that_nobody_prefetched_is_late_but_right() -> None:
    carrier, _ = transport(host=16)
    x = torch.randn(4)
    c = context(carrier, {("a", "x"): Swapped(16, 1, (Stripe(HOST, 0, 16),))})
    c.at("a").swap_out(x=x)
    c.free()
    c.give((), backward=True)
    assert torch.equal(c.at("a").load("x"), x)
    assert c.late == 1
    carrier.close()


def test_cells_go_back_in_reverse() -> None:
    carrier, _ = transport()
    c = context(carrier, {})
    c.at("a").save(x=torch.zeros(1))
    c.at("b")
    c.give((), backward=True)
    with pytest.raises(RuntimeError, match="backward of a runs when it is the turn of b"):
        c.at("a")
    assert c.left() == ["a x"]
