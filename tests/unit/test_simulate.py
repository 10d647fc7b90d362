"""The replay against arithmetic done by hand."""

from dataclasses import replace

import pytest

from mpress.errors import BrokenPlanError
from mpress.machine import Device, Machine
from mpress.plan import HOST, Plan, ScheduleKind, Share, StagePlan
from mpress.schedule import Action, parse_action
from mpress.simulate import simulate
from mpress.units import Bytes, BytesPerSecond, Seconds
from mpress.verify import verify
from mpress.workload import CellCost, Mode, Workload

KEEP = Mode((), (), Bytes(100), Bytes(0), Bytes(130), Bytes(150), Seconds(0.0))
SWAP = Mode((), (1,), Bytes(40), Bytes(60), Bytes(130), Bytes(150), Seconds(0.0))
REBUILD = Mode((1,), (), Bytes(40), Bytes(0), Bytes(130), Bytes(170), Seconds(0.5))


def machine(gpus: int, capacity: int = 10**6) -> Machine:
    device = Device(Bytes(capacity), (("float32", 1e12),), BytesPerSecond(1e12), 0.5, 0.0)
    links = tuple(tuple(BytesPerSecond(0.0 if a == b else 1e3) for b in range(gpus)) for a in range(gpus))
    host = tuple(BytesPerSecond(100.0) for _ in range(gpus))
    return Machine("toy", (device,) * gpus, links, BytesPerSecond(1e3), host, (), Bytes(10**9), 0.0, 0.0)


def chain(cells: int, output: int = 0) -> Workload:
    cost = CellCost(
        "h", Seconds(1.0), Seconds(2.0), Bytes(output), Bytes(output), Bytes(0), Bytes(0), Bytes(0), 10, 10, 2, 6, (), (KEEP, SWAP, REBUILD)
    )
    return Workload((cost,), (0,) * cells, (((0,), cells),), 16, 2, 4, 0, 4, 0.0)


def stage(device: int, first: int, last: int, mode: int = 0, shares: tuple[Share, ...] = (), lag: int = 1, lead: int = 1) -> StagePlan:
    return StagePlan(device, first, last, (mode,) * (last - first), shares, lag, lead)


@pytest.mark.parametrize("kind", list(ScheduleKind))
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 4), (4, 8), (3, 2)])
def test_equal_stages_take_the_textbook_time(kind: ScheduleKind, stages: int, micro_batches: int) -> None:
    """(M + S - 1)(F + B) for both schedules with free communication (facts: bubble (p-1)/(m+p-1))."""
    plan = Plan(kind, micro_batches, tuple(stage(s, s, s + 1) for s in range(stages)))
    replay = simulate(chain(stages), machine(stages), plan)
    assert replay.step_seconds == pytest.approx((micro_batches + stages - 1) * 3.0)
    assert replay.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    path = replay.path
    assert sum(path.forwards) * 1.0 + sum(path.backwards) * 2.0 + path.constant_seconds == pytest.approx(replay.step_seconds)
    assert path.constant_seconds == pytest.approx(0.0)


def test_memory_of_one_forward_one_backward() -> None:
    """Stage 0 of 2 holds one finished micro-batch (200 resident) while the second cell of the next one runs backward."""
    plan = Plan(ScheduleKind.ONE_F_ONE_B, 4, (stage(0, 0, 2), stage(1, 2, 4)))
    replay = simulate(chain(4), machine(2), plan)
    state = 2 * 10 * 16 + 2 * 2 * 4
    assert replay.stages[0].peak_bytes == state + 200 + 100 + 150
    assert replay.stages[1].peak_bytes == state + 0 + 100 + 150
    assert sum(size for _, size in replay.stages[0].causes) == replay.stages[0].peak_bytes


def test_boundary_buffers_are_charged_by_the_rules() -> None:
    """While stage 0 runs a backward it holds one sent activation and one posted gradient buffer (of the next backward)."""
    plan = Plan(ScheduleKind.ONE_F_ONE_B, 4, (stage(0, 0, 1), stage(1, 1, 2)))
    replay = simulate(chain(2, output=8), machine(2), plan)
    causes = dict(replay.stages[0].causes)
    assert causes["boundary"] in (8, 16)
    assert replay.link_bytes == ((0, 1, 32), (1, 0, 32))


def test_swap_frees_memory_and_stalls_when_the_link_is_slow() -> None:
    plan = Plan(ScheduleKind.ONE_F_ONE_B, 4, (stage(0, 0, 1, 1, (Share(HOST, Bytes(60)),)), stage(1, 1, 2)))
    slow = simulate(chain(2), machine(2), plan)
    kept = simulate(chain(2), machine(2), replace(plan, stages=(stage(0, 0, 1), stage(1, 1, 2))))
    assert slow.stages[0].stall_seconds == pytest.approx(4 * (0.6 + 0.6))  # 60 B at 100 B/s, out and in, nothing to hide behind
    assert slow.step_seconds > kept.step_seconds
    assert slow.stages[0].peak_bytes == kept.stages[0].peak_bytes - 60
    assert (0, HOST, 240) in slow.link_bytes and (HOST, 0, 240) in slow.link_bytes


def test_a_donor_pays_for_every_slot() -> None:
    plan = Plan(ScheduleKind.ONE_F_ONE_B, 4, (stage(0, 0, 1, 1, (Share(1, Bytes(60)),)), stage(1, 1, 2)))
    replay = verify(chain(2), machine(2), plan)
    assert dict(replay.stages[1].causes)["foreign stripes"] == 2 * 60


def test_ties_are_stored_twice_and_reduced_once() -> None:
    work = chain(2)
    tied = replace(work.types[0], shared_parameters=((0, 6),))
    work = replace(work, types=(tied,))
    plan = Plan(ScheduleKind.ONE_F_ONE_B, 1, (stage(0, 0, 1), stage(1, 1, 2)))
    replay = simulate(work, machine(2), plan)
    assert replay.step_seconds == pytest.approx(6.0 + 6 * 4 / 1e3)
    alone = simulate(work, machine(1), Plan(ScheduleKind.ONE_F_ONE_B, 1, (stage(0, 0, 2),)))
    assert dict(alone.stages[0].causes)["state"] == (20 - 6) * 16 + 3 * 4


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        ((stage(0, 0, 1), stage(1, 2, 4)), "partition"),
        ((stage(0, 0, 2), stage(0, 2, 4)), "placement"),
        ((stage(0, 0, 2, 1, (Share(1, Bytes(10)),)), stage(1, 2, 4)), "shares"),
        ((stage(0, 0, 2, 0, (), 0), stage(1, 2, 4)), "lags"),
        ((stage(0, 0, 2, 7), stage(1, 2, 4)), "modes"),
    ],
)
def test_broken_plans_are_refused(broken: tuple[StagePlan, ...], code: str) -> None:
    with pytest.raises(BrokenPlanError) as refusal:
        verify(chain(4), machine(2), Plan(ScheduleKind.ONE_F_ONE_B, 4, broken))
    assert refusal.value.code == code


def test_over_capacity_says_how_much_is_missing() -> None:
    plan = Plan(ScheduleKind.ONE_F_ONE_B, 4, (stage(0, 0, 2), stage(1, 2, 4)))
    need = simulate(chain(4), machine(2), plan).stages[0].peak_bytes
    verify(chain(4), machine(2, need), plan)
    with pytest.raises(BrokenPlanError, match="1 bytes missing"):
        verify(chain(4), machine(2, need - 1), plan)


@pytest.mark.parametrize("kind", list(ScheduleKind))
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (3, 2), (4, 9)])
def test_no_schedule_of_ours_waits_for_itself(kind: ScheduleKind, stages: int, micro_batches: int) -> None:
    verify(chain(stages), machine(stages), Plan(kind, micro_batches, tuple(stage(s, s, s + 1) for s in range(stages))))


def test_a_cycle_of_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 that wants the second micro-batch first and stage 0 that sends it only after the gradient of the first."""

    def crossed(kind: ScheduleKind, stages: int, s: int, micro_batches: int, tied: bool) -> tuple[Action, ...]:
        words = (
            "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
            "1RECV_F1 1F1 1RECV_F0 1F0 1B1 1SEND_B1 1B0 1SEND_B0",
        )
        return tuple(parse_action(word) for word in words[s].split())

    monkeypatch.setattr("mpress.verify.actions", crossed)
    plan = Plan(ScheduleKind.GPIPE, 2, (stage(0, 0, 1), stage(1, 1, 2)))
    with pytest.raises(BrokenPlanError, match="wait for each other") as refusal:
        verify(chain(2), machine(2), plan)
    assert refusal.value.code == "deadlock"
