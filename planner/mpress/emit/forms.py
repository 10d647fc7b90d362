"""Operators that are not printed as plain ATen calls: attention kernels and draws of random numbers go through the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpress.graph import Argument, Op


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of the runtime that stands for an operator.

    parameters: the operator's positional parameters, each the runtime's name for it, "" for one it does without, "*name" for one that is
    passed without its name.  results: the places among the operator's outputs of what the function returns.
    """

    function: str
    parameters: tuple[str, ...]
    results: tuple[int, ...]

    def arguments(self, op: Op) -> tuple[tuple[str, Argument], ...]:
        """(name or "" for a positional one, value) in the order of the function's parameters; defaults left out."""
        given = dict(zip(self.parameters, op.args, strict=False))
        named = {**{name: value for name, value in given.items() if name}, **dict(op.kwargs)}
        found = [("", named.get(name)) for name in self.parameters if name.startswith("*")]
        while found and found[-1][1] is None:  # the bias of the forward, which comes last
            found.pop()
        for name, default in _DEFAULTS.items():
            value = named.get(name, default)
            if value != default:
                found.append((name, value))
        return tuple(found)


_DEFAULTS: Mapping[str, Argument] = {"causal": False, "scale": None, "dropout": 0.0, "sums": True, "wanted": (True, True, True, False)}
KERNELS: Mapping[str, Kernel] = {
    "_scaled_dot_product_flash_attention": Kernel("sdpa_flash", ("*q", "*k", "*v", "dropout", "causal", ""), (0, 1, 6, 7)),
    "_scaled_dot_product_flash_attention_backward": Kernel(
        "sdpa_flash_bwd",
        ("*g", "*q", "*k", "*v", "*out", "*lse", "", "", "", "", "dropout", "causal", "*seed", "*offset"),
        (0, 1, 2),
    ),
    "_scaled_dot_product_efficient_attention": Kernel(
        "sdpa_efficient", ("*q", "*k", "*v", "*bias", "sums", "dropout", "causal"), (0, 1, 2, 3)
    ),
    "_scaled_dot_product_efficient_attention_backward": Kernel(
        "sdpa_efficient_bwd",
        ("*g", "*q", "*k", "*v", "*bias", "*out", "*lse", "*seed", "*offset", "dropout", "wanted", "causal"),
        (0, 1, 2, 3),
    ),
}  # fmt: skip

# draws: operator -> its overload -> the overload that takes a generator
_SAME = (
    "bernoulli", "bernoulli_", "normal", "normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_",
    "multinomial", "poisson", "binomial", "rrelu_with_noise", "rrelu_with_noise_", "_standard_gamma", "_sample_dirichlet",
)  # fmt: skip
_OTHER: Mapping[str, Mapping[str, str]] = {
    **{name: {"default": "generator"} for name in ("rand", "randn", "rand_like", "randn_like", "randperm")},
    "randint": {"default": "generator", "low": "low_generator"},
    "randint_like": {"default": "generator", "Tensor": "Tensor_generator", "low_dtype": "low_generator_dtype"},
}


def keyed_overload(op: Op) -> str:
    """The overload of a drawing operator that takes a generator, "" where there is none."""
    overload = op.target.split(".")[2]
    return overload if op.name in _SAME else _OTHER.get(op.name, {}).get(overload, "")


def results(op: Op) -> tuple[int, ...]:
    """Tensor ids of what the printed call of an operator returns, -1 for None and for what is no tensor."""
    kernel = KERNELS.get(op.name)
    return op.outputs if kernel is None else tuple(op.outputs[place] for place in kernel.results)
