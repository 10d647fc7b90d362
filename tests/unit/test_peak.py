"""The peak of the eager step, by hand on a small step and on what real runs measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from models_of_all_kinds import MODELS, write
from mpress.errors import InputError
from mpress.graph import Accumulation, Graph, Kind
from mpress.graph_file import read_graph, write_graph
from mpress.options import View
from mpress.peak import Peak, step_peak
from mpress.trace.record import trace
from mpress.trace.semantics import Semantics
from mpress.units import Bytes
from tiny_models import write_model

TIED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.a(torch.tanh(self.a(x)))

def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 4),)

def loss(out):
    return out.sum()
"""


def _tied(folder: Path) -> Graph:
    return trace(write_model(folder, TIED), model_args={}, micro_batch=1, precision="fp32", semantics=Semantics(view=View.CPU))


def test_a_tied_step_by_hand(tmp_path: Path) -> None:
    """Two uses of one 4 x 4 weight: at the end both gradients (64 bytes each) and their sum live, with the loss and the seed (4 each)."""
    graph = _tied(tmp_path)
    assert [c.parameter for c in graph.contributions] == ["a.weight", "a.weight"]
    assert [a.bytes for a in graph.accumulations] == [64]  # the sum is no op, but it is memory
    (summed,) = graph.accumulations
    assert {graph.tensors[c.tensor].storage for c in graph.contributions} == set(summed.frees)
    assert step_peak(graph) == Peak(Bytes(64 + 64 + 64 + 4 + 4), summed.after)
    assert step_peak(replace(graph, accumulations=())).bytes < 200  # without it the peak would be spoilt


def test_state_and_inputs_are_not_counted(tmp_path: Path) -> None:
    graph = _tied(tmp_path)
    other = tuple(s if s.kind is Kind.COMPUTED else replace(s, bytes=Bytes(10**9)) for s in graph.storages)
    assert step_peak(replace(graph, storages=other)) == step_peak(graph)
    assert step_peak(replace(graph, ops=())) == Peak(Bytes(0), -1)


def test_every_storage_of_the_step_has_a_life(tmp_path: Path) -> None:
    graph = _tied(tmp_path)
    kept = {graph.tensors[t].storage for t in (graph.loss, graph.seed)}
    for storage in graph.storages:
        if storage.kind is Kind.COMPUTED:
            assert 0 <= storage.born < len(graph.ops)
            assert (storage.dies == -1) is (storage.id in kept)
            assert storage.dies == -1 or storage.dies >= storage.born
        else:
            assert (storage.born, storage.dies) == (-1, -1)


@pytest.mark.parametrize("name", ["gpt", "one_layer_used_many_times", "checkpoint", "tied_transposed", "tensors_from_python_values"])
def test_the_file_keeps_the_peak(tmp_path: Path, name: str) -> None:
    assert name in MODELS
    graph = trace(write(name, tmp_path), model_args={}, micro_batch=2, precision="fp32")
    again = read_graph(write_graph(graph), "g.json")
    assert again == graph and step_peak(again) == step_peak(graph)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"after": 99999}, "after"), ({"frees": (99999,)}, "frees"), ({"drops": (7,)}, "drops"), ({"frees": (0,)}, "frees")],
)
def test_accumulations_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    graph = _tied(tmp_path)
    wrong: Accumulation = replace(graph.accumulations[0], **change)  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        read_graph(write_graph(replace(graph, accumulations=(wrong,))), "g.json")
    assert caught.value.code == "graph-file" and f"accumulations[0].{words}" in caught.value.where
