"""A report of eight stages made by hand, for the tests of screens."""

from __future__ import annotations

from mpress.emit.actions import ActionReport
from mpress.emit.crossings import Crossing, CutReport
from mpress.emit.report import InputReport, Report, StageReport, StripeReport, TieReport
from mpress.plan import HOST
from mpress.units import GIB, MIB, Bytes, Seconds


def stage(index: int, plain: float) -> StageReport:
    causes = (
        ("weights", Bytes(4 * GIB)),
        ("gradients", Bytes(4 * GIB)),
        ("optimizer", Bytes(12 * GIB)),
        ("inputs", Bytes(GIB)),
        ("activations", Bytes(10 * GIB)),
        ("swap buffers", Bytes(GIB)),
        ("boundary", Bytes(GIB)),
        ("foreign stripes", Bytes(0)),
        ("workspace", Bytes(2 * GIB)),
    )
    return StageReport(
        stage=index,
        gpu=index,
        layers=f"h.{index * 9}-h.{index * 9 + 8}",
        parameters=1_912_000_000,
        unplanned_peak_bytes=Bytes(int(plain * GIB)),
        peak_bytes=Bytes(35 * GIB),
        peak_action=f"{index}B0",
        capacity_bytes=Bytes(40 * GIB),
        usable_bytes=Bytes(38 * GIB),
        in_flight=8 - index,
        forward_seconds=Seconds(0.05),
        backward_seconds=Seconds(0.1),
        recompute_seconds=Seconds(0.0123),
        stall_seconds=Seconds(0.001),
        causes=causes,
    )


def cut(after: int) -> CutReport:
    """A block's sum, and a mask from the first stage that stages 1 to 3 hand on and stage 4 reads."""
    block = Crossing(f"h.{after * 9 + 8} add", (1, 2048, 5120), "bfloat16", Bytes(20 * MIB), Bytes(20 * MIB), after, False)
    mask = Crossing("mask le", (2048, 2048), "bool", Bytes(4 * MIB), Bytes(0), 0, passed=after > 0)
    return CutReport(after, (block, mask) if after < 4 else (block,))


def report() -> Report:
    return Report(
        model="gpt",
        machine="dgx-a100-40gb",
        gpus=8,
        reserve=0.05,
        host_memory_bytes=Bytes(1024 * GIB),
        precision="bf16",
        optimizer="adamw",
        recipe_words="16 B/parameter: 2 weight + 2 gradient + 4 master weight + 4 + 4 AdamW moments",
        bytes_per_parameter=16,
        parameters=15_300_000_000,
        schedule="1f1b",
        micro_batch=1,
        micro_batches=32,
        status="within_gap",
        gap=0.00312,
        gap_target=0.01,
        bound_seconds=Seconds(7.97),
        step_seconds=Seconds(8.0),
        bubble=0.181,
        samples_per_second=4.0,
        recompute_seconds=Seconds(3.1),
        stall_seconds=Seconds(0.008),
        solver="scip",
        iterations=1,
        stages=tuple(stage(s, 60.0 if s < 2 else 30.0) for s in range(8)),
        cuts=tuple(cut(s) for s in range(7)),
        actions=(
            ActionReport("mlp.c_fc addmm", "keep", 75, Bytes(75 * GIB // 64), Bytes(75 * GIB // 16), Seconds(0.0)),
            ActionReport("mlp gelu", "recompute", 20, Bytes(20 * GIB // 64), Bytes(20 * GIB // 16), Seconds(3.1)),
            ActionReport("attn.c_attn addmm", "swap_d2d", 9, Bytes(9 * GIB // 64), Bytes(9 * GIB // 16), Seconds(0.0)),
        ),
        stripes=(
            StripeReport(0, HOST, Bytes(GIB), Bytes(GIB // 4), 0.2),
            StripeReport(0, 6, Bytes(3 * GIB), Bytes(GIB), 0.031),
            StripeReport(0, 7, Bytes(3 * GIB), Bytes(GIB), 0.033),
            StripeReport(1, 7, Bytes(GIB), Bytes(GIB), 0.01),
        ),
        layers=72,
        placed_layers=72,
        ties=(TieReport(("wte.weight", "lm_head.weight"), (0, 7), Bytes(3 * GIB), Bytes(3 * GIB // 8)),),
        inputs=(InputReport("tokens", (1, 2048), "int64", (0,)), InputReport("targets", (1, 2048), "int64", (7,))),
        checkpoints=0,
        assumptions=(),
        no_module="",
        proof=("twin", "411 operators, loss and 29 gradients bit-equal to a real run"),
    )
