"""The sentences of the screen, and how numbers are written.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mpress.emit.report import InputReport, Report, TieReport
from mpress.units import GIB, MIB, gib

MOST_ASSUMPTIONS = 5
MOST_TIES = 3


def shape_words(report: Report) -> str:
    """What the plan holds for: the example inputs, and where each enters the pipeline."""
    inputs = "".join(f", {item.name} {shape(item.shape)}{_entry(item, len(report.stages))}" for item in report.inputs)
    return f"planned for the example shapes only: micro-batch {report.micro_batch}{inputs}"


def shape(sizes: Sequence[int]) -> str:
    """ "4x1024"."""
    return "x".join(str(size) for size in sizes) or "scalar"


def _entry(item: InputReport, stages: int) -> str:
    if not item.stages:
        return " (not read)"
    if len(item.stages) == stages > 2:
        return " (all stages)"
    return f" ({'stage' if len(item.stages) == 1 else 'stages'} {_and(item.stages)})"


def _and(items: Sequence[object]) -> str:
    """ "0", "0 and 7" or "0, 1 and 7"."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def tie_lines(report: Report) -> tuple[str, ...]:
    """Copies of tied parameters: where they are, and what keeping them equal moves."""
    lines = [_tie(tie) for tie in report.ties[:MOST_TIES]]
    rest = report.ties[MOST_TIES:]
    if rest:
        lines.append(f"... and {len(rest)} more, {gib(sum(tie.reduced_bytes for tie in rest))} a step")
    return tuple(lines)


def _tie(tie: TieReport) -> str:
    where = f"{tie.names[0]} is stored on {_and([f'GPU {gpu}' for gpu in tie.gpus])} ({gib(tie.copy_bytes)} each)"
    return f"{where}, its gradient is all-reduced: {gib(tie.reduced_bytes)} a step" if tie.reduced_bytes else f"{where}, it is not trained"


def assumption_lines(assumptions: Sequence[str]) -> tuple[str, ...]:
    """The first few assumptions, and how many there are."""
    rest = len(assumptions) - MOST_ASSUMPTIONS
    return (*assumptions[:MOST_ASSUMPTIONS], f"... and {rest} more, all in --json") if rest > 0 else tuple(assumptions)


def checkpoint_words(regions: int) -> str:
    """What the model itself recomputes, whatever the plan decides."""
    return f"{regions} {'region' if regions == 1 else 'regions'} by the model's own checkpoints, beside what the plan recomputes"


def proof_words(report: Report) -> str:
    """The gap in words; never better than what was proven."""
    limits = {
        "limit": "; the search ended without a better plan or bound",
        "interrupted": "; you ended the search",
    }
    ending = limits.get(report.status, "")
    if report.gap < 0:
        return f"no bound was proven: this is a valid plan, not known to be a good one{ending}"
    missed = f" (asked for: {report.gap_target:.1%})" if report.gap > report.gap_target else ""
    return f"at most {_ceil_percent(report.gap)} from the best plan under this cost model{missed}{ending}"


def scale(largest: int) -> tuple[int, str]:
    """One unit for a whole table, as (bytes, word)."""
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB")):
        if largest >= 0.5 * factor:
            return factor, unit
    return 1024, "KiB"


def count(number: int) -> str:
    """15.34 B, 51.4 M, 920 K or 12."""
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= factor:
            return f"{number / factor:.{2 if unit == 'B' else 1}f} {unit}"
    return str(number)


def seconds(value: float) -> str:
    """12.34 s, 56.7 ms or 8.9 us."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def rounds(iterations: int) -> str:
    """How many times the problem was solved."""
    return "one round" if iterations == 1 else f"{iterations} rounds"


def _ceil_percent(share: float) -> str:
    """A share in percent, rounded up to a tenth: a proof must not be rounded down."""
    tenths = int(share * 1000)
    return f"{(tenths + (tenths < share * 1000 - 1e-9)) / 10:.1f} %"
