"""Configurations of real sizes are traced on a laptop: parameters counted by hand, at most 1 GiB resident, no weight anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def llama_like(layers: int, hidden: int, inner: int, kv: int, vocabulary: int, experts: int = 0, bias: bool = False) -> int:
    """Two embeddings; q and o of the hidden size, k and v of the grouped one; three matrices of an MLP (or of each expert); norms."""
    mlp = 3 * hidden * inner * (experts or 1) + experts * hidden
    attention = 2 * hidden * hidden + 2 * hidden * kv + (hidden + 2 * kv if bias else 0)
    return 2 * vocabulary * hidden + layers * (attention + mlp + 2 * hidden) + hidden


def gpt2(layers: int, hidden: int, positions: int, vocabulary: int) -> int:
    """A tied embedding; 12 h^2 of weights, 13 h of biases and norms a layer."""
    return (vocabulary + positions) * hidden + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def t5(layers: int, hidden: int, inner: int, feed: int, heads: int, vocabulary: int) -> int:
    """Encoder layers have one attention and two norms, decoder layers two and three; each stack has a table of 32 distances."""
    attention, mlp = 4 * hidden * inner, 2 * hidden * feed
    return vocabulary * hidden + layers * (3 * attention + 2 * mlp + 5 * hidden) + 2 * (32 * heads + hidden)


def vit(layers: int, hidden: int, inner: int, patches: int, pixels: int, classes: int) -> int:
    """Patches, a class token and positions; 4 h^2 of attention, two matrices of an MLP; a head."""
    block = 4 * hidden**2 + 2 * hidden * inner + 9 * hidden + inner
    return pixels * hidden + hidden + hidden + (patches + 1) * hidden + layers * block + 2 * hidden + (hidden + 1) * classes


CONFIGURATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "mixtral-8x7b": (
        {
            "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "max_position_embeddings": 32768, "vocab_size": 32000,
        },
        llama_like(32, 4096, 14336, 1024, 32000, experts=8),
    ),
    "llama-7b": (
        {
            "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "max_position_embeddings": 4096, "vocab_size": 32000,
        },
        llama_like(32, 4096, 11008, 4096, 32000),
    ),
    "qwen2-7b": (
        {
            "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "vocab_size": 152064,
        },
        llama_like(28, 3584, 18944, 512, 152064, bias=True),
    ),
    "gpt2-25b": (
        {"model_type": "gpt2", "n_layer": 96, "n_embd": 4608, "n_head": 36, "n_positions": 1024, "vocab_size": 50257},
        gpt2(96, 4608, 1024, 50257),
    ),
    "t5-11b": (
        {"model_type": "t5", "num_layers": 24, "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128, "vocab_size": 32128},
        t5(24, 1024, 128 * 128, 65536, 128, 32128),
    ),
    "vit-22b": (
        {
            "model_type": "vit", "num_hidden_layers": 48, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48,
            "image_size": 224, "patch_size": 14, "num_labels": 1000,
        },
        vit(48, 6144, 24576, 16 * 16, 3 * 14 * 14, 1000),
    ),
}  # fmt: skip
PUBLISHED = {"mixtral-8x7b": 46_702_792_704, "llama-7b": 6_738_415_616, "qwen2-7b": 7_615_616_512, "t5-11b": 11_307_321_344}


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_traced_in_one_gibibyte(tmp_path: Path, name: str) -> None:
    configuration, expected = CONFIGURATIONS[name]
    assert PUBLISHED.get(name, expected) == expected
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(configuration))
    code = f"""
import resource
from mpress.fold import fold
from mpress.trace.record import trace
graph = trace({str(path)!r}, model_args={{}}, micro_batch=1, precision="bf16")
chain = fold(graph)
print(sum(p.elements for p in graph.parameters), len(chain.representatives), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    paths = [str(ROOT / folder) for folder in ("planner", "cli", "profiles")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    parameters, types, resident = (int(word) for word in done.stdout.split())
    assert parameters == expected
    assert types <= 12, "equal layers are one type"
    assert resident < GIB
