"""Graph files: the example of the page, every kind of refusal, and the same bytes for the same graph."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from graph_example import PAGE, broken, example
from mpress import graph_file
from mpress.errors import InputError
from mpress.fold import check_chain, fold
from mpress.graph import Kind, Name, Phase, Ref
from mpress.graph_check import extent, parameter_dtype
from mpress.graph_file import contiguous, is_graph_file, load_graph, read_graph, write_graph
from mpress.trace.record import trace
from tiny_models import GPT, gpt_args


def refused(text: str) -> InputError:
    with pytest.raises(InputError) as refusal:
        read_graph(text, "g.json")
    error = refusal.value
    assert (error.code, error.exit_code) == ("graph-file", 2)
    assert "g.json" in error.where and error.message.startswith("g.json ") and error.hint
    for words in (error.message, error.where, error.hint):
        assert words.isprintable() and words.isascii() and len(words) < 400
    return error


def test_the_example_of_the_page_is_a_graph() -> None:
    graph = read_graph(example(), "two.graph.json")
    assert (graph.model, graph.micro_batch, len(graph.ops), parameter_dtype(graph)) == ("two", 2, 10, "float32")
    assert [p.names for p in graph.parameters] == [("net.0.weight",), ("net.1.weight",)]
    assert graph.parameters[0].trainable and graph.parameters[0].elements == 16
    assert graph.tensors[2].name == "x" and graph.tensors[0].name == "net.0.weight" and graph.tensors[3].name == ""
    assert graph.tensors[3].stride == (4, 1) and graph.tensors[7].stride == (0, 0)
    assert graph.ops[0].args == (Ref(2), Ref(0)) and graph.ops[0].flops == 64.0 and graph.ops[0].source.place() == "two.py:9"
    assert [op.phase for op in graph.ops].count(Phase.FORWARD) == 3
    chain = fold(graph)
    check_chain(graph, chain)
    assert [cell.name for cell in chain.cells] == ["net.0", "net.1", "sum"]


def test_the_page_names_every_key_a_file_can_have(tmp_path: Path) -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"`([a-z_]+)`", text))
    asked = set(re.findall(r"""row\.\w+\("(\w+)"|top\.\w+\("(\w+)\"""", Path(graph_file.__file__).read_text()))
    keys = {key for pair in asked for key in pair if key}
    assert {"storage", "forward_op", "repeats", "atom", "initial", "assumptions"} <= keys
    assert keys - named == set()


def test_writing_is_stable_and_diffable() -> None:
    graph = trace(GPT, model_args=gpt_args(), micro_batch=2, precision="bf16")
    text = write_graph(graph)
    again = trace(GPT, model_args=gpt_args(), micro_batch=2, precision="bf16")
    assert text == write_graph(again) and text.isascii() and text.endswith("}\n")
    assert sum(line.startswith('  {"id":') and '"target":' in line for line in text.splitlines()) == len(graph.ops)
    assert max(len(line) for line in text.splitlines()) < 500
    assert "/" not in json.loads(text)["model"] and str(Path(GPT).parent) not in text


@pytest.mark.parametrize(("shape", "stride"), [((), ()), ((3,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (4, 4, 1)), ((1, 5), (5, 1))])
def test_row_by_row(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert contiguous(shape) == stride


def test_values_json_has_no_word_for() -> None:
    text = broken("ops.2.kwargs", {"fill": {"float": "-inf"}, "dtype": {"dtype": "float32"}, "deep": [[], [{"tensor": 4}, None, "sum"]]})
    graph = read_graph(text, "g.json")
    fill, dtype, deep = (value for _, value in graph.ops[2].kwargs)
    assert fill == float("-inf") and dtype == Name("dtype", "float32") and deep == ((), (Ref(4), None, "sum"))
    assert read_graph(write_graph(graph), "g.json") == graph
    odd = read_graph(broken("ops.2.kwargs", {"fill": {"float": "nan"}}), "g.json")
    assert repr(read_graph(write_graph(odd), "g.json")) == repr(odd)


def test_a_buffer_with_its_first_value() -> None:
    document = json.loads(example())
    document["storages"] += [{"id": 10, "bytes": 16, "kind": "buffer"}, {"id": 11, "bytes": 16, "kind": "setup"}]
    document["tensors"] += [{"id": 14 + i, "storage": 10 + i, "shape": [4], "dtype": "float32"} for i in range(2)]
    document["buffers"] = [{"names": ["scale"], "tensor": 14, "persistent": False, "initial": 15}]
    document["setup"] = [
        {"id": 0, "target": "mpress.literal.default", "args": [[4], [1.0, 2.0, 3.0, 4.0], {"dtype": "float32"}], "outputs": [15]}
    ]
    graph = read_graph(json.dumps(document), "g.json")
    assert graph.buffers[0].initial == 15 and not graph.buffers[0].persistent and graph.buffers[0].elements == 4
    assert graph.storages[11].kind is Kind.SETUP and graph.setup[0].args[1] == (1.0, 2.0, 3.0, 4.0)
    assert read_graph(write_graph(graph), "g.json") == graph
    document["buffers"][0]["initial"] = 14
    assert "which setup does not make" in refused(json.dumps(document)).message
    document["buffers"][0]["initial"] = 15
    document["ops"][0]["args"].append({"tensor": 15})
    assert "which setup makes" in refused(json.dumps(document)).message


CASES: list[tuple[str, Any, str, str]] = [
    # (path, value, where, words): types and keys
    ("format", "onnx", "format", "'onnx'"),
    ("format", ..., "format", "missing"),
    ("version", 2, "version", "reads version 1"),
    ("version", True, "version", "not a whole number"),
    ("colour", 1, "", "'colour'"),
    ("ops", {}, "ops", "not a list"),
    ("ops", ..., "ops", "missing"),
    ("ops.0", 7, "ops[0]", "not an object"),
    ("ops.1.colour", 1, "ops[1]", "'colour'"),
    ("ops.1.target", ..., "ops[1].target", "missing"),
    ("ops.1.outputs", 4, "ops[1].outputs", "not a list"),
    ("ops.1.outputs", [True], "ops[1].outputs[0]", "not a whole number"),
    ("ops.1.outputs", [4.0], "ops[1].outputs[0]", "not a whole number"),
    ("ops.1.view", 1, "ops[1].view", "not true or false"),
    ("ops.1.phase", "sideways", "ops[1].phase", "backward, forward"),
    ("ops.1.phase", ["forward"], "ops[1].phase", "backward, forward"),
    ("ops.1.flops", -1, "ops[1].flops", "not in 0 to"),
    ("ops.1.flops", 1e30, "ops[1].flops", "not in 0 to"),
    ("ops.1.bytes_moved", 1.5, "ops[1].bytes_moved", "not a whole number"),
    ("ops.1.args", [{"tensor": -1}], "ops[1].args[0]", "an object is one of"),
    ("ops.1.args", [{"tensor": 1, "dtype": "x"}], "ops[1].args[0]", "an object is one of"),
    ("ops.1.args", [{"python": "os.system"}], "ops[1].args[0]", "an object is one of"),
    ("ops.1.args", [{"dtype": "float32; import os"}], "ops[1].args[0]", "an object is one of"),
    ("ops.1.args", [{"float": "1e5"}], "ops[1].args[0]", "an object is one of"),
    ("ops.1.args", [2**64 - 1], "ops[1].args[0]", "64-bit"),
    ("ops.1.args", [[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]], "ops[1].args[0]" + "[0]" * 16, "nested"),
    ("ops.1.kwargs", {"a b": 1}, "ops[1].kwargs", "name of an argument"),
    ("ops.1.kwargs", [], "ops[1].kwargs", "not an object"),
    # names
    ("model", "../../etc/passwd", "model", "not a path"),
    ("model", "a\\b", "model", "not a path"),
    ("model", ".bashrc", "model", "not a path"),
    ("model", "", "model", "0 characters"),
    ("model", "x" * 2000, "model", "2000 characters"),
    ("model", "a\nb", "model", "cannot be shown"),
    ("parameters.0.names", ["\x1b[31mred"], "parameters[0].names[0]", "cannot be shown"),
    ("parameters.0.names", ["a\u202eb"], "parameters[0].names[0]", "cannot be shown"),
    ("parameters.0.names", ["\ud800"], "parameters[0].names[0]", "cannot be shown"),
    ("parameters.0.names", ["net.1.weight"], "parameters[1].names", "there already"),
    ("parameters.0.names", [], "parameters[0].names", "empty"),
    ("inputs.0.name", 3, "inputs[0].name", "not a text"),
    ("ops.1.target", "__import__('os').system('true')", "ops[1].target", "not like"),
    ("ops.1.target", "aten.mm", "ops[1].target", "not like"),
    ("ops.1.target", "aten..mm", "ops[1].target", "not like"),
    ("ops.1.target", "aten.mm.default.x", "ops[1].target", "not like"),
    ("ops.1.module", "a\nb", "ops[1].module", "cannot be shown"),
    ("ops.1.random_key", "drop", "ops[1].random_key", "h.0.drop#0"),
    ("sources.0", ["two.py", "9", "x"], "sources[0]", "line number"),
    ("sources.0", ["../two.py", 9, "x"], "sources[0]", "not a path"),
    ("sources.0", ["two.py", 9, "x\n"], "sources[0]", "line of code"),
    ("sources.0", ["two.py", 9], "sources[0]", "[file, line, code]"),
    ("assumptions", ["a\x00b"], "assumptions[0]", "cannot be shown"),
    # ids
    ("ops.1.source", 2, "ops[1].source", "sources are 0 to 1"),
    ("ops.1.id", 0, "ops[1].id", "ids count from 0"),
    ("tensors.3.id", 2, "tensors[3].id", "ids count from 0"),
    ("storages.9.id", 99, "storages[9].id", "ids count from 0"),
    ("tensors.3.storage", 10, "tensors[3].storage", "storages are 0 to 9"),
    ("tensors.3.storage", -1, "tensors[3].storage", "not in 0 to"),
    ("ops.1.args", [{"tensor": 14}], "ops[1].args", "tensors are 0 to 13"),
    ("ops.1.outputs", [99], "ops[1].outputs", "tensors are 0 to 13"),
    ("ops.1.outputs", [-2], "ops[1].outputs[0]", "not in -1 to"),
    ("ops.5.forward_op", 5, "ops[5].forward_op", "no earlier op"),
    ("ops.5.forward_op", 3, "ops[5].forward_op", "no op of the forward"),
    ("ops.1.forward_op", 0, "ops[1].forward_op", "only for ops of the backward"),
    ("ops.5.repeats", 77, "ops[5].repeats", "no earlier op"),
    ("loss", 14, "loss", "tensors are 0 to 13"),
    ("loss", 4, "loss", "not one number"),
    ("loss", 2, "loss", "no op of the forward"),
    ("seed", 0, "seed", "is a parameter"),
    ("seed", 5, "ops[2].outputs", "which is the seed"),
    ("contributions.0.tensor", 14, "contributions[0].tensor", "tensors are 0 to 13"),
    ("contributions.0.tensor", 4, "contributions[0].tensor", "the backward does not make"),
    ("contributions.0.tensor", 10, "contributions[0].tensor", "the backward does not make"),
    ("contributions.0.tensor", 11, "contributions[0].tensor", "another shape"),
    ("contributions.0.parameter", "net.2.weight", "contributions[0].parameter", "'net.2.weight'"),
    ("contributions", [], "parameters[0]", "no contribution"),
    ("parameters.0.tensor", 14, "parameters[0].tensor", "tensors are 0 to 13"),
    ("parameters.0.tensor", 3, "parameters[0].tensor", "of kind computed"),
    ("parameters.0.tensor", 1, "parameters[1].tensor", "lies on the storage of parameters[0]"),
    ("parameters", [], "storages[0].kind", "no parameter is on it"),
    # memory
    ("storages.0.bytes", -64, "storages[0].bytes", "not in 0 to"),
    ("storages.0.bytes", 2**60, "storages[0].bytes", "not in 0 to"),
    ("storages.0.bytes", 63, "tensors[0]", "reaches byte 64 of storage 0, which has 63"),
    ("storages.0.bytes", 65, "storages[0].bytes", "its tensors need 64"),
    ("storages.10", {"id": 10, "bytes": 0, "kind": "computed"}, "storages[10]", "no tensor on it"),
    ("storages.0.kind", "weights", "storages[0].kind", "buffer, computed"),
    ("storages.3.born", 10, "storages[3].born", "ops are 0 to 9"),
    ("tensors.3.shape", [2, -4], "tensors[3].shape[1]", "not in 0 to"),
    ("tensors.3.shape", [2] * 65, "tensors[3].shape", "65 dimensions"),
    ("tensors.3.shape", [2**40, 2**40], "tensors[3].shape", "more elements"),
    ("tensors.3.stride", [4], "tensors[3].stride", "another length"),
    ("tensors.3.stride", [8, 1], "tensors[3]", "reaches byte 48"),
    ("tensors.3.stride", [-4, 1], "tensors[3].stride[0]", "not in 0 to"),
    ("tensors.3.offset", 1, "tensors[3]", "reaches byte 36"),
    ("tensors.3.dtype", "float33", "tensors[3].dtype", "no dtype"),
    ("tensors.0.dtype", "int32", "parameters[0].tensor", "not one of"),
    # order
    ("ops.0.args", [{"tensor": 4}], "ops[0].args", "reads tensor 4 before anything makes it"),
    ("ops.0.args", [{"tensor": 3}], "ops[0].args", "reads tensor 3 before anything makes it"),
    ("ops.0.args", [[{"tensor": 6}]], "ops[0].args", "reads tensor 6 before anything makes it"),
    ("ops.1.outputs", [3], "ops[1].outputs", "as ops[0] does"),
    ("ops.1.outputs", [2], "ops[1].outputs", "given by inputs[0]"),
    ("ops.1.outputs", [4, 5], "ops[1].outputs", "multi is not set"),
    ("ops.1.outputs", [-1], "ops[2].args", "before anything makes it"),
    ("ops.0.phase", "backward", "ops[1].phase", "after the backward began"),
    ("ops.1.view", True, "ops[1].view", "does not only look"),
    ("ops.4.view", False, "ops[4].view", "neither allocates nor writes"),
    ("ops.1.mutates", [5], "ops[1].mutates", "no argument"),
    ("ops.4.args", [{"tensor": 7}], "ops[4].outputs", "which it does not read"),
    ("tensors.14", {"id": 14, "storage": 3, "shape": [2], "dtype": "float32"}, "tensors[14]", "made by no op"),
    # memory of gradients between ops
    ("accumulations", [{"after": 10, "bytes": 8}], "accumulations[0].after", "not in 0 to 9"),
    ("accumulations", [{"after": 5}, {"after": 4}], "accumulations[1].after", "not in 5 to 9"),
    ("accumulations", [{"after": 5, "frees": [7]}], "accumulations[0].frees", "no storage that dies once, after op 5"),
    ("accumulations", [{"after": 5, "frees": [99]}], "accumulations[0].frees", "no storage"),
    ("accumulations", [{"after": 5, "drops": [1]}, {"after": 6}], "accumulations[0].drops", "no earlier one"),
    ("accumulations", [{"after": 5}, {"after": 6, "drops": [0, 0]}], "accumulations[1].drops", "no earlier one"),
    # the recipe
    ("parameters.0.trainable", False, "contributions[1].parameter", "no trained parameter"),
    ("micro_batch", 0, "micro_batch", "not in 1 to"),
    ("inputs.0.low", 5, "inputs[0].high", "below low"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "where", "words"), CASES, ids=[f"{path}={str(value)[:20]!a}" for path, value, *_ in CASES])
def test_what_is_wrong_is_refused_where_it_is(path: str, value: Any, where: str, words: str) -> None:
    error = refused(broken(path, value))
    assert error.where == (f"{where} in g.json" if where else "g.json")
    assert words in error.message or words in error.hint


def test_mixed_precisions_are_refused() -> None:
    document = json.loads(example())
    document["tensors"][0]["dtype"] = "bfloat16"
    document["storages"][0]["bytes"] = 32
    assert refused(json.dumps(document)).where == "parameters[1].tensor in g.json"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[1, 2", "not JSON"),
        ("[]", "is a list, not an object"),
        ("{}", "format is missing"),
        ('{"format": "mpress-graph", "format": "mpress-graph"}', "'format' twice"),
        ('{"format": "mpress-graph", "version": 1, "loss": NaN}', "NaN"),
        ('{"format": "mpress-graph", "version": 1, "loss": -Infinity}', "Infinity"),
        ('{"format": "mpress-graph", "version": 1, "loss": 1e999}', "out of range"),
        ('{"format": "mpress-graph", "version": 1, "loss": ' + "9" * 5000 + "}", "5000 digits"),
        ("[" * 200_000 + "]" * 200_000, "without end"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "without end"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_text_that_is_no_json_of_ours(text: str, words: str) -> None:
    assert words in refused(text).message


def test_a_syntax_error_has_its_line() -> None:
    lines = example().splitlines()
    lines[9] = lines[9].replace(":", ";", 1)
    assert refused("\n".join(lines)).where == "g.json:10"


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> str:
        with pytest.raises(InputError) as refusal:
            load_graph(tmp_path / name)
        assert refusal.value.code == "graph-file" and refusal.value.hint and refusal.value.where
        return refusal.value.message

    assert "there is no file" in load("missing.json")
    (tmp_path / "folder.json").mkdir()
    assert "there is no file" in load("folder.json")
    os.mkfifo(tmp_path / "pipe.json")
    assert "there is no file" in load("pipe.json")  # and does not wait for a writer
    (tmp_path / "latin.json").write_bytes(b'{"model": "\xe9"}')
    assert "not UTF-8" in load("latin.json")
    with (tmp_path / "huge.json").open("wb") as stream:
        stream.truncate(2 * 2**30)  # sparse: 2 GB that take no disk
    assert "more than 64 MiB" in load("huge.json")
    monkeypatch.setattr(graph_file, "MOST_CHARACTERS", 100)
    assert "more than" in refused(example()).message


def test_a_graph_file_says_so_in_its_name_or_its_text(tmp_path: Path) -> None:
    for name in ("gpt.graph.json", "a/GPT.Graph.JSON"):
        assert is_graph_file(name)  # also a missing one: the refusal should speak of a graph
    for name in ("gpt.py", "gpt.graph.json.py", "gpt.py:json", "missing.json", str(tmp_path)):
        assert not is_graph_file(name)
    ours, config = tmp_path / "two.json", tmp_path / "config.json"
    ours.write_text(example())
    config.write_text('{"model_type": "gpt2", "quantization_config": {"format": "pack-quantized"}}')
    assert is_graph_file(str(ours)) and not is_graph_file(str(config))


def test_extents_by_hand() -> None:
    graph = read_graph(example(), "g.json")
    assert [extent(graph.tensors[i]) for i in (0, 2, 5, 7, 8)] == [64, 32, 4, 4, 32]
