"""The law of micro-batch sizes against recordings at every size from 1 to 9."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import get_type_hints

import pytest

import mpress.graph as vocabulary
from mpress.graph import Graph, Op, Ref
from mpress.scale import QUANTITIES, SAMPLED, Law, NoLaw, difference, fit
from mpress.trace.record import trace
from mpress.trace.sizes import example_ranges, fill
from mpress.units import Bytes, Flops
from tiny_models import GPT, gpt_args, write_model

CONV = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, stride=2)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(4, 5)
    def forward(self, x, y):
        x = self.pool(torch.relu(self.norm(self.first(x))))
        return F.cross_entropy(self.head(torch.relu(self.second(x)).mean((2, 3))), y)
def build_model(): return Net()
def example_inputs(batch=1): return torch.randn(batch, 3, 16, 16), torch.randint(0, 5, (batch,))
"""
LSTM = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)
    def forward(self, x): return self.head(self.layers(x)[0][:, -1]).square().mean()
def build_model(): return Net()
def example_inputs(batch=1): return (torch.randn(batch, 5, 6),)
"""
CELL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)
    def forward(self, x):
        h = x.new_zeros(x.shape[0], 8)
        for t in range(3): h = self.cell(x[:, t], h)
        return self.head(h).square().sum()
def build_model(): return Net()
def example_inputs(batch=1): return (torch.randn(batch, 5, 6),)
"""
MEANS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
    def forward(self, x, weights):
        y = self.layer(x["left"] + x["right"]) * weights[:, None, None] * (1.0 / x["left"].shape[0])
        return (y * (0.3 / y.shape[0]) * float(y.shape[0] * 3) * (1 / (y.shape[0] * 7 + 2))).sum() / y.shape[0]
def build_model(): return Net()
def example_inputs(batch=1):
    return {"x": {"left": torch.randn(batch, 8, 6), "right": torch.randn(batch, 8, 6)}, "weights": torch.randint(1, 9, (batch,))}
"""
SAME = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 3), nn.Linear(3, 2)
    def forward(self, x):
        y = self.two(torch.tanh(self.one(x.reshape(-1, 2))))
        return y.reshape(x.shape[0], 3, 2).sum(1).expand(2, x.shape[0], 2).square().mean()
def build_model(): return Net()
def example_inputs(batch=1): return (torch.randn(batch, 3, 2),)
"""
CAPACITY = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(6, 4), nn.Linear(6, 6)
    def forward(self, x):
        x = x.flatten(0, 1)
        capacity = x.shape[0] * 5 // 16
        w, i = self.gate(x).softmax(-1).topk(capacity, dim=0)
        return self.expert(x[i[:, 0]] * w[:, :1]).square().mean()
def build_model(): return Net()
def example_inputs(batch=1): return (torch.randn(batch, 8, 6),)
"""
BRANCH = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
    def forward(self, x):
        y = self.layer(x)
        return (y.relu() if x.shape[0] > LIMIT else y.tanh()).mean()
def build_model(): return Net()
def example_inputs(batch=1): return (torch.randn(batch, 6),)
"""
SQUARE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def forward(self, x):
        y = self.layer(x)
        return (y @ y.t()).square().mean()
def build_model(): return Net()
def example_inputs(batch=1): return (torch.randn(batch, 3),)
"""
LAWFUL = {"conv": CONV, "lstm": LSTM, "cell": CELL, "means": MEANS, "same": SAME}


def record(path: str, size: int, **arguments: object) -> Graph:
    return trace(path, model_args={k: str(v) for k, v in arguments.items()}, micro_batch=size, precision="fp32")


def law_of(first: Graph, second: Graph) -> Law:
    law = fit(first, second)
    assert isinstance(law, Law), law
    return law


def ranges(graph: Graph) -> tuple[tuple[int, int], ...]:
    return tuple((item.low, item.high) for item in graph.inputs)


def check_every_size(path: str, **arguments: object) -> None:
    """Every number of every recording from 2 to 9, from the recordings at 2 and 3."""
    recorded = {size: record(path, size, **arguments) for size in range(2, 10)}
    law = law_of(recorded[2], recorded[3])
    assert law.at(2) == recorded[2] and law.at(3) == recorded[3]
    for size, graph in recorded.items():
        assert law.contradiction(graph) == ""
        assert law.at(size, ranges(graph)) == graph
    other = law_of(recorded[4], recorded[9])
    assert [other.at(size, ranges(recorded[size])) for size in range(4, 10)] == [recorded[size] for size in range(4, 10)]


@pytest.mark.parametrize("changes", [{"tied": True}, {"tied": False, "dropout": 0.2}, {"hidden": 6, "sequence": 3, "vocabulary": 3}])
def test_a_gpt_at_every_size(changes: dict[str, object]) -> None:
    check_every_size(GPT, **gpt_args(**changes))


@pytest.mark.parametrize("name", LAWFUL)
def test_other_models_at_every_size(name: str, tmp_path: Path) -> None:
    check_every_size(write_model(tmp_path, LAWFUL[name], f"{name}.py"))


def test_a_law_says_nothing_below_its_sizes(tmp_path: Path) -> None:
    path = write_model(tmp_path, LSTM)
    with pytest.raises(ValueError, match="from size 2"):
        law_of(record(path, 2), record(path, 3)).at(1)
    with pytest.raises(ValueError, match="both recordings are of size 2"):
        fit(record(path, 2), record(path, 2))


def test_floor_division_contradicts_the_law(tmp_path: Path) -> None:
    path = write_model(tmp_path, CAPACITY)  # 8*B*5//16 = 5, 7, 10, 12 at B = 2, 3, 4, 5: on no line
    found = law_of(record(path, 2), record(path, 3)).contradiction(record(path, 4))
    assert "topk" in found and "model.py:" in found and "9 becomes 10" in found
    refused = fit(record(path, 2), record(path, 5))
    assert isinstance(refused, NoLaw) and "5 at size 2 and 12 at size 5 are on no line" in refused.why


def test_a_branch_on_the_size_is_no_law(tmp_path: Path) -> None:
    refused = fit(*(record(write_model(tmp_path, BRANCH.replace("LIMIT", "2")), size) for size in (2, 3)))
    assert isinstance(refused, NoLaw) and "'aten.tanh.default' becomes 'aten.relu.default'" in refused.why and "model.py:" in refused.why
    path = write_model(tmp_path, BRANCH.replace("LIMIT", "4"), "later.py")
    assert "becomes 'aten.relu.default'" in law_of(record(path, 2), record(path, 3)).contradiction(record(path, 5))


def test_what_is_square_in_the_size_contradicts_the_law(tmp_path: Path) -> None:
    path = write_model(tmp_path, SQUARE)  # y @ y.t(): 2 * 3 * B * B floating-point operations
    law = law_of(record(path, 2), record(path, 3))
    assert "flops: 84.0 becomes 96.0" in law.contradiction(record(path, 4))


def changed(graph: Graph, **change: object) -> Graph:
    op = replace(graph.ops[3], **change)  # type: ignore[arg-type]
    return replace(graph, ops=(*graph.ops[:3], op, *graph.ops[4:]))


def test_a_changed_id_name_or_length_is_never_a_law(tmp_path: Path) -> None:
    path = write_model(tmp_path, LSTM)
    two, three = record(path, 2), record(path, 3)
    for change in ({"forward_op": 7}, {"outputs": (99,)}, {"args": (Ref(0), *three.ops[3].args[1:])}, {"module": "x"}, {"view": True}):
        if changed(three, **change) != three:
            assert isinstance(fit(two, changed(three, **change)), NoLaw), change
    assert isinstance(fit(two, replace(three, ops=three.ops[:-1])), NoLaw)
    assert isinstance(fit(two, replace(three, model="y")), NoLaw)
    assert isinstance(fit(changed(two, args=(2,)), changed(three, args=(3.0,))), NoLaw)
    assert isinstance(fit(changed(two, args=(True,)), changed(three, args=(False,))), NoLaw)


def literals(two: object, three: object, graphs: tuple[Graph, Graph]) -> Law | NoLaw:
    return fit(changed(graphs[0], args=(two,)), changed(graphs[1], args=(three,)))


def test_floats_follow_a_law_only_if_it_is_exact(tmp_path: Path) -> None:
    path = write_model(tmp_path, LSTM)
    graphs = record(path, 2), record(path, 3)
    for law, exact in (
        (lambda b: 1 / b, True),
        (lambda b: 1 / (5 * b + 3), True),
        (lambda b: 0.3 / b, True),
        (lambda b: 0.1 / b, False),  # or 1 / (10 * b), which is not the same in the last bit
        (lambda b: float(40 * b), True),
        (lambda b: -math.inf, True),
        (lambda b: math.nan, True),
        (lambda b: b**-0.5, False),
        (lambda b: 0.1 * b, False),
        (lambda b: float(2**60 * b), False),
    ):
        found = literals(law(2), law(3), graphs)
        assert isinstance(found, Law) == exact, law(2)
        if isinstance(found, Law):
            assert [repr(found.at(b).ops[3].args) for b in (2, 3, 7)] == [repr((law(b),)) for b in (2, 3, 7)]


def test_numbers_inside_words_follow_lines(tmp_path: Path) -> None:
    two, three = (record(write_model(tmp_path, LSTM), size) for size in (2, 3))

    def said(first: str, second: str) -> Law | NoLaw:
        return fit(replace(two, assumptions=(first,)), replace(three, assumptions=(second,)))

    law = said("a mask of 16x4 at 0.5", "a mask of 24x4 at 0.5")
    assert isinstance(law, Law) and law.at(10).assumptions == ("a mask of 80x4 at 0.5",)
    for first, second in (("a mask", "no mask"), ("of 09", "of 10"), ("one 1", "one 1 2"), ("a2", "b2")):
        assert isinstance(said(first, second), NoLaw)


def test_the_range_of_inputs_is_read_off_the_examples_at_each_size(tmp_path: Path) -> None:
    graphs = [record(GPT, size, **gpt_args()) for size in (2, 3)]
    low, high = (f(f(getattr(i, end) for i in g.inputs) for g in graphs) for f, end in ((min, "low"), (max, "high")))
    widest = law_of(*graphs).at(6)
    assert min(i.low for i in widest.inputs) == low and max(i.high for i in widest.inputs) == high
    assert widest.inputs[0].tensor == graphs[0].inputs[0].tensor


def test_every_number_of_the_graph_is_declared_a_quantity_or_an_id() -> None:
    """A new field that counts something must be put in one of the lists: an id that followed a line would be dataflow made up."""
    ids = {
        "Ref.tensor", "Storage.id", "Storage.born", "Storage.dies", "Tensor.id", "Tensor.storage", "Source.line", "Op.id", "Op.outputs",
        "Op.forward_op", "Op.mutates", "Op.repeats", "Parameter.tensor", "Buffer.tensor", "Buffer.initial", "Contribution.tensor",
        "Accumulation.after", "Accumulation.frees", "Accumulation.drops", "Input.tensor", "Graph.loss", "Graph.seed", "Graph.checkpoints",
    }  # fmt: skip
    numbers = set()
    for kind in vars(vocabulary).values():
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == vocabulary.__name__:
            hints = get_type_hints(kind)
            for field in fields(kind):
                told = str(hints[field.name])
                if hints[field.name] in (int, float, Bytes, Flops) or "int" in told.replace("Literal", ""):
                    numbers.add(f"{kind.__name__}.{field.name}")
    declared = {f"{kind.__name__}.{name}" for table in (QUANTITIES, SAMPLED) for kind, names in table.items() for name in names}
    assert numbers == ids | declared - {"Graph.assumptions"}  # words with numbers in them
    assert not ids & declared


# -- several sizes -------------------------------------------------------------------------------------------------------------------


class Recorder:
    """Records a model and remembers at which sizes."""

    def __init__(self, path: str, **arguments: object) -> None:
        self.path, self.arguments, self.asked = path, arguments, list[int]()

    def __call__(self, size: int) -> Graph:
        self.asked.append(size)
        return record(self.path, size, **self.arguments)

    def ranges(self, size: int) -> tuple[tuple[int, int], ...]:
        from mpress.trace.model_file import load

        return example_ranges(load(self.path, {key: str(value) for key, value in self.arguments.items()}), size)


@pytest.mark.parametrize(
    ("sizes", "recorded"),
    [
        ((1,), [1]),
        ((2, 1, 4), [1, 2, 4]),
        ((1, 2, 4, 8), [1, 2, 4, 8]),
        ((1, 2, 4, 5, 8), [1, 2, 3, 8]),
        ((6, 7, 8, 9), [2, 3, 9]),
    ],
)
def test_recordings_are_made_only_where_the_law_saves_some(sizes: tuple[int, ...], recorded: list[int]) -> None:
    recorder = Recorder(GPT, **gpt_args())
    traced = fill(sizes, recorder, recorder.ranges)
    assert sorted(recorder.asked) == recorded
    assert traced.recorded == set(recorded) & set(sizes)
    assert dict(traced.graphs) == {size: record(GPT, size, **gpt_args()) for size in sizes}


def test_without_a_law_every_size_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(write_model(tmp_path, CAPACITY))
    traced = fill((2, 4, 5, 6, 8), recorder, recorder.ranges)
    assert sorted(recorder.asked) == [2, 3, 4, 5, 6, 8] and traced.recorded == {2, 4, 5, 6, 8}
    assert "each size is traced" in traced.note and "topk" in traced.note
    assert dict(traced.graphs) == {size: record(recorder.path, size) for size in (2, 4, 5, 6, 8)}


def test_a_size_that_cannot_be_traced_is_told_apart(tmp_path: Path) -> None:
    recorder = Recorder(write_model(tmp_path, CAPACITY.replace("capacity =", "assert x.shape[0] != 24, 'not three'\n        capacity =")))
    traced = fill((1, 2, 3), recorder, recorder.ranges)
    assert set(traced.graphs) == {1, 2} and set(traced.refusals) == {3} and "not three" in traced.refusals[3].message
    with pytest.raises(type(traced.refusals[3]), match="not three"):
        fill((3,), recorder, recorder.ranges)


def test_differences_in_words() -> None:
    graph = record(GPT, 2, **gpt_args())
    assert difference(graph, graph) == ""
    wrong: Op = graph.ops[5]
    other = replace(graph, ops=(*graph.ops[:5], replace(wrong, flops=Flops(wrong.flops + 1)), *graph.ops[6:]))
    assert f"{wrong.target} in {wrong.module or 'the model'} (gpt.py:{wrong.source.line}) flops" in difference(graph, other)
