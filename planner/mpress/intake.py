"""From what the user names to a Graph: a model file is traced and proven, a graph file is read.  And back: a trace becomes a graph file.

torch is imported by what traces, and only there: planning a graph file needs none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpress.atomic import check_directory, write_files
from mpress.errors import BrokenPlanError, InputError
from mpress.graph import Graph
from mpress.graph_check import parameter_dtype
from mpress.graph_file import SUFFIX, is_graph_file, load_graph, read_graph, write_graph
from mpress.options import Attention, Depth, Options, Recording
from mpress.recipe import Precision, Recipe
from mpress.sizes import refuse_sizes

Progress = Callable[[str, float | None, str], None]  # (step, seconds or None while it runs, what it found)


@dataclass(frozen=True, slots=True)
class Traced:
    """A recorded step, the graph file that holds it, what was proven of it and how."""

    graph: Graph
    precision: Precision
    file: str
    proof: tuple[str, str]


def trace_model(recording: Recording, out: Path | None, on_step: Progress, prove: bool = True) -> Traced:
    """Record a model and write the graph file, MODEL.graph.json if `out` is None; raises MpressError.

    Nothing is written that does not read back as the same graph.
    """
    path = out or Path(graph_name(recording.model))
    if is_graph_file(recording.model):
        raise InputError("option", f"{recording.model} is a graph file already", "mpress-plan trace", "give a model file (.py)")
    if path.suffix != SUFFIX:
        hint = f"call it {graph_name(recording.model)}"
        raise InputError("option", f"a graph file ends in .json, '{path.name}' does not", "--out", hint)
    check_directory(path.parent)
    graphs: list[Graph] = []
    proofs: list[tuple[str, str]] = []

    def trace() -> str:
        graph, words = record_graph(recording)
        graphs.append(graph)
        return words

    def hold() -> str:
        proofs.append(prove_graph(recording, graphs[0], prove))
        return ": ".join(proofs[0])

    def write() -> str:
        text = write_graph(graphs[0])
        found = read_graph(text, path.name)
        if found != graphs[0] and repr(found) != repr(graphs[0]):  # nan is equal to itself as text only
            raise BrokenPlanError("graph-differs", "the graph file does not read back as the graph that was recorded", path.name)
        write_files(((path, text),))
        return path.name

    timed("trace", trace, on_step)
    timed("prove", hold, on_step)
    timed("write", write, on_step)
    return Traced(graphs[0], recording.precision, str(path), proofs[0])


def record_graph(recording: Recording) -> tuple[Graph, str]:
    """Trace the model; the graph, and how much and how it was recorded in a few words."""
    from mpress.trace.record import trace  # late: torch
    from mpress.trace.semantics import Semantics

    notes: list[str] = []
    graph = trace(
        recording.model,
        model_args=dict(recording.model_args),
        micro_batch=recording.micro_batch,
        precision=recording.precision.value,
        semantics=Semantics(attention=recording.attention, flash=recording.flash),
        sequence=recording.sequence,
        depth=recording.depth,
        on_note=notes.append,
    )
    return graph, "; ".join((graph_words(graph), *notes, *attention_note(recording, graph)))


def attention_note(recording: Recording, graph: Graph) -> tuple[str, ...]:
    """What `--attention auto` came to mean, where the machine and not torch alone decided."""
    attends = any("_attention" in op.name for op in graph.ops)
    return ("these GPUs have no flash attention: auto takes the efficient kernel, else math",) * (
        attends and not recording.flash and recording.attention is Attention.AUTO
    )


def prove_graph(recording: Recording, graph: Graph, wanted: bool) -> tuple[str, str]:
    """Hold a recorded step against real runs; the verdict and one line about it."""
    if not wanted:
        return "not proven", "--no-prove"
    from mpress.trace.proof import prove  # late: torch
    from mpress.trace.record import open_model
    from mpress.trace.semantics import Semantics

    found = prove(
        open_model(recording.model, dict(recording.model_args), recording.sequence),
        graph,
        micro_batch=recording.micro_batch,
        precision=recording.precision.value,
        semantics=Semantics(attention=recording.attention, flash=recording.flash),
    )
    return found.verdict.value, found.why


def read_graph_file(options: Options) -> tuple[Graph, Precision]:
    """The graph file in place of a trace, and what it was recorded in; what is settled by that cannot be asked for again."""
    for flag, used in (
        ("--model-arg", bool(options.model_args)),
        ("--attention", options.attention is not Attention.AUTO),
        ("--seq-len", options.sequence != 0),
        ("--trace", options.depth is not Depth.FAST),
    ):
        if used:
            hint = f"leave it out, or trace the model again: mpress-plan trace MODEL.py {flag} ..."
            raise InputError("option", f"{flag} has no meaning for a graph file: that was settled when the model was traced", flag, hint)
    refuse_sizes(
        options, "a graph file", "leave it out, or trace the model again for another size: mpress-plan trace MODEL.py --micro-batch N"
    )
    graph = load_graph(Path(options.model))
    precision = next(known for known in Precision if Recipe(known, options.optimizer).dtype == parameter_dtype(graph))
    asked = (("--micro-batch", options.micro_batch, graph.micro_batch), ("--precision", _word(options.precision), precision.value))
    for flag, wanted, recorded in asked:
        if wanted is not None and wanted != recorded:
            hint = f"leave {flag} out, or trace again: mpress-plan trace MODEL.py {flag} {wanted}"
            raise InputError("option", f"{flag} is {wanted}, but the graph was recorded with {recorded}", flag, hint)
    return graph, precision


def _word(precision: Precision | None) -> str | None:
    return None if precision is None else precision.value


def graph_words(graph: Graph) -> str:
    """How much there is, for the progress line."""
    return f"{len(graph.ops)} operators, {sum(p.elements for p in graph.parameters):,} parameters"


def timed(name: str, run: Callable[[], str], on_step: Progress) -> float:
    """Run one step; `on_step` hears of it before and after.  Returns its seconds."""
    on_step(name, None, "")
    started = time.perf_counter()
    note = run()
    seconds = time.perf_counter() - started
    on_step(name, seconds, note)
    return seconds


def graph_name(model: str) -> str:
    """ "models/gpt.py:factory" -> "gpt.graph.json"."""
    return f"{stem(model)}.graph.json"


def stem(model: str) -> str:
    """ "gpt" of "models/gpt.py:factory" and of "gpt.graph.json": what written files are named after."""
    path = model if model.endswith((".py", SUFFIX)) else model.rpartition(":")[0] or model
    return Path(path).stem.removesuffix(".graph")
