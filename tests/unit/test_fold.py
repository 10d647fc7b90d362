"""Cells of the example GPT and of small hand-written models: where they are cut, which are equal, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpress.cells import Chain, Segment
from mpress.errors import BrokenPlanError
from mpress.fold import check_chain, fold, segments
from mpress.graph import Graph, reads
from mpress.trace.record import trace
from tiny_models import GPT, gpt_args, write_model

TAIL = """
def build_model(**kw):
    return Net(**kw)

def example_inputs(batch=1):
    return (torch.randn(batch, 4),)

def loss(out):
    return out.square().mean()
"""


def _gpt(**changes: object) -> tuple[Graph, Chain]:
    graph = trace(GPT, model_args=gpt_args(**changes), micro_batch=2, precision="fp32")
    return graph, fold(graph)


def _written(folder: Path, body: str) -> tuple[Graph, Chain]:
    graph = trace(write_model(folder, body + TAIL), model_args={}, micro_batch=2, precision="fp32")
    chain = fold(graph)
    check_chain(graph, chain)
    return graph, chain


@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_gpt_folds_into_half_blocks(layers: int, dropout: float) -> None:
    graph, chain = _gpt(layers=layers, dropout=dropout)
    check_chain(graph, chain)
    assert chain.segments == (Segment((0,), 1), Segment((1, 2), layers), Segment((3,), 1))
    halves = [f"h.{layer}.{half}" for layer in range(layers) for half in ("attn", "mlp")]
    assert [cell.name for cell in chain.cells] == ["wte..drop" if dropout else "wte..wpe", *halves, "ln_f..lm_head"]
    assert chain.representatives == (0, 1, 2, 2 * layers + 1)


def test_equal_cells_correspond_position_by_position() -> None:
    graph, chain = _gpt(layers=3, dropout=0.1)
    for cell in chain.cells:
        first = chain.cells[chain.representatives[cell.type]]
        assert [n.removeprefix(cell.prefix) for n in cell.parameters] == [n.removeprefix(first.prefix) for n in first.parameters]
        local, other = dict[int, int](), dict[int, int]()
        for mine, theirs in zip(cell.forward + cell.backward, first.forward + first.backward, strict=True):
            a, b = graph.ops[mine], graph.ops[theirs]
            assert (a.target, a.view, a.flops, len(a.outputs)) == (b.target, b.view, b.flops, len(b.outputs))
            for x, y in zip((*reads(a), *a.outputs), (*reads(b), *b.outputs), strict=True):
                if x >= 0:
                    assert local.setdefault(x, y) == y and other.setdefault(y, x) == x
                    assert graph.tensors[x].shape == graph.tensors[y].shape
        for field in ("inputs", "outputs", "gradient_inputs", "gradient_outputs"):
            assert [local[t] for t in getattr(cell, field)] == list(getattr(first, field))


def test_one_tensor_and_its_gradient_cross_every_border() -> None:
    graph, chain = _gpt(layers=2)
    for cell in chain.cells[:-1]:
        output, gradient = graph.tensors[cell.outputs[0]], graph.tensors[cell.gradient_inputs[0]]
        assert output.differentiable and output.shape == gradient.shape == (2, 8, 16)
    assert chain.cells[-1].outputs == (graph.loss,) and chain.cells[-1].gradient_inputs == (graph.seed,)
    assert chain.cells[0].user_inputs == (graph.inputs[0].tensor,) and chain.cells[-1].user_inputs == (graph.inputs[1].tensor,)


def test_a_broken_chain_is_noticed() -> None:
    graph, chain = _gpt()
    cells = list(chain.cells)
    cells[1], cells[2] = replace(cells[1], forward=cells[1].forward + cells[2].forward[:1]), replace(cells[2], forward=cells[2].forward[1:])
    with pytest.raises(BrokenPlanError):
        check_chain(graph, replace(chain, cells=tuple(cells)))


def test_residual_outside_the_blocks_joins_its_block(tmp_path: Path) -> None:
    _, chain = _written(
        tmp_path,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
""",
    )
    assert [cell.name for cell in chain.cells] == ["inp", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert chain.segments == (Segment((0,), 1), Segment((1,), 4), Segment((2,), 1))


def test_a_saved_output_is_never_handed_over(tmp_path: Path) -> None:
    graph, chain = _written(
        tmp_path,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)])

    def forward(self, x):
        return self.layers(x)
""",
    )
    assert chain.segments == (Segment((0,), 1), Segment((1,), 2), Segment((2,), 1))  # cut before each ReLU instead of behind it
    for cell in chain.cells[:-1]:
        handed = graph.tensors[cell.outputs[0]].storage
        assert not any(graph.tensors[t].storage == handed for op in cell.backward for t in reads(graph.ops[op]))


def test_without_numbered_blocks_the_children_are_cells(tmp_path: Path) -> None:
    _, chain = _written(
        tmp_path,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.third(self.second(self.first(x)))
""",
    )
    assert [cell.name for cell in chain.cells][:3] == ["first", "second", "third"]


SKIP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        a = self.blocks[0](x)
        b = self.blocks[2](self.blocks[1](a))
        return self.blocks[4](self.blocks[3](b) + a)
"""


def test_a_skip_connection_passes_through_the_cells_between(tmp_path: Path) -> None:
    _, chain = _written(tmp_path, SKIP)
    assert [cell.name for cell in chain.cells] == [*(f"blocks.{i}" for i in range(5)), "mean"]
    skipped = chain.cells[1].inputs[0]  # what blocks.0 made
    assert [skipped in cell.outputs for cell in chain.cells] == [True, True, True, False, False, False]
    assert [len(cell.outputs) for cell in chain.cells] == [1, 2, 2, 1, 1, 1]
    assert [len(cell.gradient_outputs) for cell in chain.cells] == [0, 1, 2, 2, 1, 1]
    # autograd saves it as the input of blocks.1 only, so nobody shares it
    assert all(cell.shared == () and cell.carried == () for cell in chain.cells)


def test_a_model_without_modules_is_cut_where_least_crosses(tmp_path: Path) -> None:
    _, chain = _written(
        tmp_path,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(5))

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x
""",
    )
    assert len(chain.cells) == 5 and all(len(cell.parameters) == 1 and len(cell.inputs) <= 1 for cell in chain.cells)


def test_what_many_cells_save_is_shared(tmp_path: Path) -> None:
    graph, chain = _written(
        tmp_path,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        memory = x = self.first(x)
        for block in self.blocks:
            x = block(x) * memory
        return x
""",
    )
    memory = graph.tensors[chain.cells[0].outputs[0]].storage
    assert [cell.shared for cell in chain.cells] == [(), (memory,), (memory,), (memory,), (memory,)]
    assert [cell.borrowed for cell in chain.cells] == [(), (), (memory,), (memory,), (memory,)]
    assert [cell.carried for cell in chain.cells] == [(), (memory,), (memory,), (memory,), ()]
    assert chain.segments == (Segment((0,), 1), Segment((1,), 1), Segment((2,), 2), Segment((3,), 1))


def test_views_of_what_crosses_are_taken_again(tmp_path: Path) -> None:
    graph, chain = _written(
        tmp_path,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        a, b = self.first(x).chunk(2, dim=-1)
        for block in self.blocks:
            a = block(a) + b.tanh()
        return a
""",
    )
    assert [cell.name for cell in chain.cells] == ["first", "blocks.0", "blocks.1", "blocks.2"]
    assert len(chain.cells[1].inputs) == 1 and graph.tensors[chain.cells[1].inputs[0]].shape == (2, 8)
    assert sum("split" in graph.ops[op].target for cell in chain.cells for op in cell.forward) >= 3


def test_a_positional_parameter_added_whole_gets_its_gradient_where_it_is_used(tmp_path: Path) -> None:
    graph, chain = _written(
        tmp_path,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.place = nn.Parameter(torch.zeros(2, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.first(x) + self.place
        for block in self.blocks:
            x = block(x)
        return x
""",
    )
    owner = [cell.name for cell in chain.cells if any(graph.contributions[n].parameter == "place" for n in cell.contributions)]
    assert owner == [cell.name for cell in chain.cells if "place" in cell.parameters] and len(owner) == 1


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ([0], [((0,), 1)]),
        ([0, 1, 1, 1, 2], [((0,), 1), ((1,), 3), ((2,), 1)]),
        ([0, 1, 2, 1, 2, 3], [((0,), 1), ((1, 2), 2), ((3,), 1)]),
        ([1, 1, 2, 1, 1, 2, 1, 1, 2], [((1, 1, 2), 3)]),
    ],
)
def test_segments(types: list[int], expected: list[tuple[tuple[int, ...], int]]) -> None:
    assert [(s.period, s.count) for s in segments(types)] == expected


def test_the_default_gpt_is_recorded_in_full() -> None:
    graph = trace(GPT, model_args={}, micro_batch=1, precision="bf16")
    chain = fold(graph)
    assert sum(p.elements for p in graph.parameters) == 15_317_929_984
    assert len(graph.ops) < 10_000
    assert chain.segments == (Segment((0,), 1), Segment((1, 2), 75), Segment((3,), 1))
