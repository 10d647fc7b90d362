"""Report -> the `--json` document: every fact of the screen, as plain numbers.  Pure: prints nothing, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping

from mpress.emit.actions import ACTIONS
from mpress.emit.report import Report, StageReport
from mpress.intake import Traced
from mpress.plan import HOST
from mpress_cli.console import SCHEMA_VERSION, Json
from mpress_cli.cut_table import cut_documents
from mpress_cli.size_table import size_documents


def json_document(report: Report, files: tuple[str, ...], timings: Mapping[str, float]) -> dict[str, Json]:
    """The `--json` document.  Bytes are integers, seconds and shares floats; -1 as a GPU is host memory; gap null if none was proven."""
    actions: dict[str, Json] = {}
    for action in ACTIONS:
        tensors, size = report.total(action)
        actions[action] = {"tensors": tensors, "bytes": size}
    return {
        "schema_version": SCHEMA_VERSION,
        "status": report.status,
        "gap": report.gap if report.gap >= 0 else None,
        "bound_seconds": report.bound_seconds,
        "step_seconds": report.step_seconds,
        "bubble": report.bubble,
        "samples_per_second": report.samples_per_second,
        "model": {"name": report.model, "parameters": report.parameters},
        "machine": {
            "name": report.machine,
            "gpus": report.gpus,
            "reserve": report.reserve,
            "host_memory_bytes": report.host_memory_bytes,
        },
        "recipe": {
            "precision": report.precision,
            "optimizer": report.optimizer,
            "bytes_per_parameter": report.bytes_per_parameter,
            "words": report.recipe_words,
        },
        "layers": {"placed": report.placed_layers, "total": report.layers},
        "shapes": {
            "micro_batch": report.micro_batch,
            "inputs": [{"name": i.name, "shape": list(i.shape), "dtype": i.dtype, "stages": list(i.stages)} for i in report.inputs],
        },
        "tied": [
            {"names": list(t.names), "gpus": list(t.gpus), "copy_bytes": t.copy_bytes, "reduced_bytes": t.reduced_bytes}
            for t in report.ties
        ],
        "checkpoints": report.checkpoints,
        "proof": {"verdict": report.proof[0], "why": report.proof[1]},
        "assumptions": list(report.assumptions),
        "no_module": report.no_module or None,
        "schedule": {"name": report.schedule, "micro_batch": report.micro_batch, "micro_batches": report.micro_batches},
        "stages": [_stage_document(stage) for stage in report.stages],
        "cuts": cut_documents(report.cuts),
        "actions": actions,
        "kinds": [
            {
                "kind": row.kind,
                "action": row.action,
                "tensors": row.tensors,
                "bytes": row.bytes,
                "held_bytes": row.held_bytes,
                "seconds": row.seconds,
            }
            for row in report.actions
        ],
        "d2d": [
            {
                "from_gpu": row.from_gpu,
                "to_gpu": row.to_gpu,
                "bytes": row.bytes,
                "pool_bytes": row.pool_bytes,
                "link_use": row.link_use,
            }
            for row in report.stripes
            if row.to_gpu != HOST
        ],
        "host": [
            {"gpu": row.from_gpu, "bytes": row.bytes, "pool_bytes": row.pool_bytes, "link_use": row.link_use}
            for row in report.stripes
            if row.to_gpu == HOST
        ],
        "sizes": size_documents(report),
        "files": list(files),
        "timings": dict(sorted(timings.items())),
    }


def _stage_document(stage: StageReport) -> dict[str, Json]:
    causes: dict[str, Json] = {f"{cause.replace(' ', '_')}_bytes": size for cause, size in stage.causes}
    return {
        "stage": stage.stage,
        "gpu": stage.gpu,
        "layers": stage.layers,
        "parameters": stage.parameters,
        "unplanned_peak_bytes": stage.unplanned_peak_bytes,
        "peak_bytes": stage.peak_bytes,
        "peak_action": stage.peak_action,
        "capacity_bytes": stage.capacity_bytes,
        "usable_bytes": stage.usable_bytes,
        "in_flight": stage.in_flight,
        "forward_seconds": stage.forward_seconds,
        "backward_seconds": stage.backward_seconds,
        "recompute_seconds": stage.recompute_seconds,
        "stall_seconds": stage.stall_seconds,
        "causes": causes,
    }


def traced_document(traced: Traced) -> dict[str, Json]:
    """The `--json` document of `mpress-plan trace`."""
    graph = traced.graph
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "traced",
        "model": {"name": graph.model, "parameters": sum(parameter.elements for parameter in graph.parameters)},
        "precision": traced.precision.value,
        "operators": len(graph.ops),
        "shapes": {
            "micro_batch": graph.micro_batch,
            "inputs": [
                {"name": i.name, "shape": list(graph.tensors[i.tensor].shape), "dtype": graph.tensors[i.tensor].dtype} for i in graph.inputs
            ],
        },
        "checkpoints": graph.checkpoints,
        "proof": {"verdict": traced.proof[0], "why": traced.proof[1]},
        "assumptions": list(graph.assumptions),
        "files": [traced.file],
    }
