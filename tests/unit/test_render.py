"""The screen, the JSON document and the words of a plan, from a Report made by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from made_report import report
from mpress.cells import Cell, Chain
from mpress.emit.crossings import Crossing, CutReport
from mpress.emit.layers import layer_words
from mpress.emit.report import InputReport, Report, StripeReport, TieReport
from mpress.units import GIB, Bytes
from mpress_cli.document import json_document
from mpress_cli.render import screen
from mpress_cli.words import assumption_lines, count, proof_words, seconds, shape_words, tie_lines

TIMINGS = {"trace_seconds": 1.0, "solve_seconds": 2.5, "emit_seconds": 0.5}
FILES = ("out/gpt_mpress.py", "out/gpt.schedule.json")


def printed(value: Report, *, colour: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=colour, no_color=not colour, highlight=False)
    console.print(screen(value, FILES, TIMINGS))
    return stream.getvalue()


def test_screen_fits_80_columns_and_says_what_matters_without_colour() -> None:
    text = printed(report())
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text
    assert "..." not in text and "\u2026" not in text  # nothing is cut
    for words in ("60.00 over", "35.00", "38.00", "h.0-h.8", "1.91 B", "50.00", "100.00", "12.30", "x8", "swap to GPUs", "-> 7", "3 %"):
        assert words.replace("3 %", "3%") in text
    assert "at most 0.4 % from the best plan under this cost model" in text
    assert "8.00 s, 4.00 samples/s, 18.1% of all GPUs' time idle" in text
    assert "in 2.5 s by scip" in text
    assert "out/gpt_mpress.py" in text


def test_plain_peaks_over_the_usable_memory_are_red() -> None:
    text = printed(report(), colour=True)
    assert "\x1b[1;31m60.00 over\x1b[0m" in text
    assert "\x1b[1;31m30.00" not in text


def test_a_machine_with_many_donors_gets_a_list_instead_of_a_matrix() -> None:
    many = tuple(StripeReport(0, gpu, Bytes(GIB), Bytes(GIB), 0.01) for gpu in range(1, 16))
    text = printed(replace(report(), stripes=many))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "link use" in text


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (0.004, "at most 0.4 %"),
        (0.0041, "at most 0.5 %"),
        (0.0, "at most 0.0 %"),
        (0.0204, "at most 2.1 % from the best plan under this cost model (asked"),
    ],
)
def test_a_proof_is_rounded_up_never_down(gap: float, words: str) -> None:
    assert proof_words(replace(report(), gap=gap)).startswith(words)


def test_a_plan_without_a_bound_says_so() -> None:
    value = replace(report(), gap=-1.0, status="interrupted")
    assert "no bound was proven" in proof_words(value)
    assert "you ended the search" in proof_words(value)
    assert json_document(value, (), TIMINGS)["gap"] is None


def test_json_document_has_the_promised_keys_and_plain_numbers() -> None:
    document = json.loads(json.dumps(json_document(report(), FILES, TIMINGS), allow_nan=False))
    promised = "schema_version status gap step_seconds bubble samples_per_second machine recipe stages actions d2d files timings"
    assert set(promised.split()) <= set(document)
    first = document["stages"][0]
    promised = (
        "stage gpu layers parameters unplanned_peak_bytes peak_bytes capacity_bytes usable_bytes in_flight forward_seconds "
        "backward_seconds recompute_seconds"
    )
    assert set(promised.split()) <= set(first)
    assert first["peak_bytes"] == 35 * GIB == sum(first["causes"].values())
    assert document["actions"] == {
        "keep": {"tensors": 75, "bytes": 75 * GIB // 64},
        "recompute": {"tensors": 20, "bytes": 20 * GIB // 64},
        "swap_host": {"tensors": 0, "bytes": 0},
        "swap_d2d": {"tensors": 9, "bytes": 9 * GIB // 64},
    }
    assert [(row["from_gpu"], row["to_gpu"], row["bytes"]) for row in document["d2d"]] == [(0, 6, 3 * GIB), (0, 7, 3 * GIB), (1, 7, GIB)]
    assert document["files"] == list(FILES)
    assert set(document["timings"]) == {"trace_seconds", "solve_seconds", "emit_seconds"}


def chain(*names: str) -> Chain:
    empty: tuple[int, ...] = ()
    cells = tuple(Cell(i, 0, name, "", empty, empty, empty, empty, (), (), *(empty,) * 7) for i, name in enumerate(names))
    return Chain(cells, (0,), ())


def test_layers_are_named_in_few_words() -> None:
    cells = chain("wte..drop", "h.0", "h.1", "h.2", "ln_f..loss")
    assert layer_words(cells, 0, 5) == "wte..drop, h.0-h.2, ln_f..loss"
    assert layer_words(cells, 1, 2) == "h.0"
    parts = chain("wte", "h.0/1", "h.0/2", "h.0/3", "h.1/1", "h.1/2", "h.1/3", "h.2/1", "h.2/2", "h.2/3", "head")
    assert layer_words(parts, 0, 11) == "wte, h.0-h.2, head"
    assert layer_words(parts, 0, 3) == "wte, h.0/1, h.0/2"
    assert layer_words(parts, 3, 9) == "h.0/3, h.1, h.2/1, h.2/2"


def test_layers_of_blocks_cut_at_their_modules() -> None:
    cells = chain("wte..drop", *(f"h.{n}.{part}" for n in range(4) for part in ("attn", "cross", "mlp/1", "mlp/2")), "ln_f..lm_head")
    assert layer_words(cells, 0, 18) == "wte..drop, h.0-h.3, ln_f..lm_head"
    assert layer_words(cells, 0, 2) == "wte..drop, h.0.attn"
    assert layer_words(cells, 2, 11) == "h.0.cross-h.0.mlp/2, h.1, h.2.attn, h.2.cross"
    assert layer_words(chain("0", "1", "2/a", "2/b"), 0, 3) == "0-1, 2/a"


def test_numbers_are_short() -> None:
    assert [count(n) for n in (7, 1500, 51_400_000, 15_340_000_000)] == ["7", "1.5 K", "51.4 M", "15.34 B"]
    assert [seconds(s) for s in (12.345, 0.0567, 8.9e-6)] == ["12.35 s", "56.7 ms", "8.9 us"]


def test_tied_copies_are_named_with_what_they_move() -> None:
    assert tie_lines(report()) == ("wte.weight is stored on GPU 0 and GPU 7 (3.00 GiB each), its gradient is all-reduced: 0.38 GiB a step",)
    frozen = TieReport(("bias",), (0, 1, 2), Bytes(GIB), Bytes(0))
    many = (frozen, *(TieReport((f"t{i}",), (0, 1), Bytes(4 * GIB), Bytes(GIB)) for i in range(4)))
    lines = tie_lines(replace(report(), ties=many))
    assert lines[0] == "bias is stored on GPU 0, GPU 1 and GPU 2 (1.00 GiB each), it is not trained"
    assert len(lines) == 4 and lines[-1] == "... and 2 more, 2.00 GiB a step"
    assert "tied" not in printed(replace(report(), ties=()))


def test_shapes_say_where_inputs_enter() -> None:
    assert shape_words(report()) == "planned for the example shapes only: micro-batch 1, tokens 1x2048 (stage 0), targets 1x2048 (stage 7)"
    inputs = (
        InputReport("mask", (4, 1), "bool", tuple(range(8))),
        InputReport("scale", (), "float32", (0, 3)),
        InputReport("spare", (2,), "int64", ()),
    )
    words = shape_words(replace(report(), micro_batch=4, inputs=inputs))
    assert words.endswith("micro-batch 4, mask 4x1 (all stages), scale scalar (stages 0 and 3), spare 2 (not read)")


def test_assumptions_are_few_on_the_screen_and_all_in_the_document() -> None:
    made = tuple(f"assumption {i}" for i in range(8))
    assert assumption_lines(made) == (*made[:5], "... and 3 more, all in --json")
    assert assumption_lines(made[:5]) == made[:5]
    value = replace(report(), assumptions=made, checkpoints=30, no_module="planned from a graph file")
    text = printed(value)
    assert "assumption 4" in text and "assumption 5" not in text and "... and 3 more" in text
    assert "30 regions by the model's own checkpoints" in text and "no module: planned from a graph file" in text
    assert "72/72 layers placed" in text
    document = json_document(value, (), TIMINGS)
    assert document["assumptions"] == list(made) and document["checkpoints"] == 30
    assert document["no_module"] == "planned from a graph file" and document["layers"] == {"placed": 72, "total": 72}
    assert document["tied"] == [
        {"names": ["wte.weight", "lm_head.weight"], "gpus": [0, 7], "copy_bytes": 3 * GIB, "reduced_bytes": 3 * GIB // 8}
    ]


def test_cuts_say_what_crosses_once_for_each_kind_of_tensor() -> None:
    lines = [line.rstrip() for line in printed(report()).splitlines()]
    start = lines.index("Cuts, MiB per micro-batch")
    assert " ".join(lines[start + 2].split()) == "0-6 h.* add 1x2048x5120 bfloat16 20.00 20.00"
    assert " ".join(lines[start + 3].split()) == "0-3 mask le 2048x2048 bool 4.00 none 1-3"
    assert " ".join(lines[start + 4].split()) == "0-3 all 24.00 20.00"
    one = replace(report(), cuts=())
    assert "Cuts" not in printed(one) and json_document(one, FILES, TIMINGS)["cuts"] == []


def test_tensors_alike_in_one_cut_are_counted_and_small_ones_are_not_zero() -> None:
    small = Crossing("enc.7 relu", (4,), "float32", Bytes(16), Bytes(16), 0, passed=False)
    large = Crossing("wte embedding", (2**20,), "float32", Bytes(4 * 2**20), Bytes(0), 0, passed=False)
    cut = CutReport(2, (small, replace(small, name="enc.8 relu"), large))
    text = printed(replace(report(), cuts=(cut, replace(cut, after=4))))
    assert "2, 4   2 of enc.* relu  4        float32    3e-05     3e-05" in text
    assert "2, 4   wte embedding    1048576  float32     4.00      none" in text
    document = json.loads(json.dumps(json_document(replace(report(), cuts=(cut,)), FILES, TIMINGS)["cuts"]))
    assert [row["gradient_bytes"] for row in document[0]["tensors"]] == [16, 16, None]
    assert (document[0]["after"], document[0]["bytes"], document[0]["gradient_bytes"]) == (2, 4 * 2**20 + 32, 32)


def test_a_table_of_cuts_without_end_is_cut_short_and_says_so() -> None:
    rows = tuple(Crossing(f"down{i} silu", (i + 1,), "float32", Bytes(4 * i + 4), Bytes(4), 0, passed=False) for i in range(20))
    text = printed(replace(report(), cuts=(CutReport(0, rows),)))
    assert "down11 silu" in text and "down12 silu" not in text
    assert "8 more kinds, all in --json" in text
