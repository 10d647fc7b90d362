"""What crosses from stage to stage, as a table of the kinds of tensors and as rows of the `--json` document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mpress.emit.crossings import Crossing, CutReport
from mpress.emit.report import Report
from mpress_cli.console import Json
from mpress_cli.words import scale, shape

MAX_ROWS = 12  # kinds of tensors; the rest is counted
NOTE = "through: stages that only hand it on; gradient: what comes back for it"

Kind = tuple[str, str, str, int, int, int]  # name without numbers, shape, dtype, bytes, gradient bytes, how many of them cross one cut


def cut_table(report: Report) -> Group:
    """One row for each kind of tensor, with the cuts it crosses: a chain of equal blocks has one row.  One micro-batch."""
    size, unit = scale(max((max(cut.bytes, cut.gradient_bytes) for cut in report.cuts), default=0))
    table = Table(title=f"Cuts, {unit} per micro-batch", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for head in ("after", "tensor", "shape", "dtype"):
        table.add_column(head, justify="left", overflow="fold")
    for head in ("forward", "gradient"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("through", justify="left", overflow="fold")
    kinds = _kinds(report.cuts)
    for (name, sizes, dtype, forward, back, number), rows in list(kinds.items())[:MAX_ROWS]:
        alone = len({row.name for _, row in rows}) == 1
        words = f"{'' if number == 1 else f'{number} of '}{rows[0][1].name if alone else name}"
        after = sorted({cut for cut, _ in rows})
        passed = sorted({cut for cut, row in rows if row.passed})
        table.add_row(_ranges(after), words, sizes, dtype, _number(forward * number, size), _number(back * number, size), _ranges(passed))
    if len(kinds) > MAX_ROWS:
        table.add_row("", f"{len(kinds) - MAX_ROWS} more kinds, all in --json")
    if any(len(cut.tensors) > 1 for cut in report.cuts):
        for (total, back), cuts in _totals(report.cuts).items():
            row = (_ranges(cuts), "all", "", "", _number(total, size), _number(back, size))
            table.add_row(*[Text(word, style="bold") for word in row])
    return Group(table, Text(NOTE, style="dim"))


def cut_documents(cuts: Sequence[CutReport]) -> list[Json]:
    """Every tensor over every cut; gradient_bytes is null where nothing comes back."""
    return [
        {
            "after": cut.after,
            "bytes": cut.bytes,
            "gradient_bytes": cut.gradient_bytes or None,
            "tensors": [_document(row) for row in cut.tensors],
        }
        for cut in cuts
    ]


def _document(row: Crossing) -> Json:
    return {
        "name": row.name,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "bytes": row.bytes,
        "gradient_bytes": row.gradient_bytes or None,
        "made_by": row.made_by,
        "passed": row.passed,
    }


def _kinds(cuts: Iterable[CutReport]) -> Mapping[Kind, list[tuple[int, Crossing]]]:
    """Tensors of one kind over all cuts, as (cut, tensor), in the order in which the cuts name them."""
    found: dict[Kind, list[tuple[int, Crossing]]] = {}
    for cut in cuts:
        alike: dict[tuple[str, str, str, int, int], list[Crossing]] = {}
        for row in cut.tensors:
            name = re.sub(r"(?<![^.])\d+(?=[. ])", "*", row.name)
            alike.setdefault((name, shape(row.shape), row.dtype, row.bytes, row.gradient_bytes), []).append(row)
        for key, rows in alike.items():
            found.setdefault((*key, len(rows)), []).extend((cut.after, row) for row in rows)
    return found


def _totals(cuts: Iterable[CutReport]) -> Mapping[tuple[int, int], list[int]]:
    """(bytes, gradient bytes) -> cuts with these sums."""
    found: dict[tuple[int, int], list[int]] = {}
    for cut in cuts:
        found.setdefault((cut.bytes, cut.gradient_bytes), []).append(cut.after)
    return found


def _number(size: int, unit: int) -> str:
    """Two digits behind the point; more where a small one would read as zero; "none" for nothing."""
    words = f"{size / unit:.2f}"
    return "none" if size == 0 else words if float(words) else f"{size / unit:.1g}"


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-6, 8" of sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
