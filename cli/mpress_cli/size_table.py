"""The micro-batch sizes a plan was chosen from, as a table and as rows of the `--json` document.  Empty where there was one size."""

from __future__ import annotations

from rich.table import Table

from mpress.emit.report import Report
from mpress.sizes import SizeRow
from mpress_cli.console import Json


def size_table(report: Report) -> Table:
    """A row for each size: speed where there is a plan, the reason where there is none."""
    samples = report.micro_batch * report.micro_batches
    table = Table(
        title=f"Micro-batch sizes for {samples} samples in a step", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for head in ("samples", "micro-batches", "step s", "samples/s"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in report.sizes:
        planned = row.step_seconds >= 0
        table.add_row(
            str(row.micro_batch),
            str(row.micro_batches or "."),
            f"{row.step_seconds:.4g}" if planned else ".",
            f"{row.samples_per_second:.4g}" if planned else ".",
            _words(row),
            style="bold" if row.status == "chosen" else "",
        )
    return table


def size_documents(report: Report) -> list[Json]:
    """The same rows for scripts; null where there is no plan."""
    return [_document(row) for row in report.sizes]


def _words(row: SizeRow) -> str:
    return "chosen" if row.status == "chosen" else row.words


def _document(row: SizeRow) -> Json:
    planned = row.step_seconds >= 0
    return {
        "micro_batch": row.micro_batch,
        "micro_batches": row.micro_batches,
        "status": row.status,
        "fits": row.fits,
        "missing_bytes": int(row.missing_bytes),
        "step_seconds": row.step_seconds if planned else None,
        "samples_per_second": row.samples_per_second if planned else None,
        "gap": row.gap if planned else None,
        "words": row.words,
    }
