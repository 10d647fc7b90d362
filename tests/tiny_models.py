"""Small model files for tests: the example GPT at toy size, and files written from source text."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

GPT = str(Path(__file__).parent.parent / "examples" / "gpt.py")


def gpt_args(**changes: object) -> dict[str, str]:
    """--model-arg of a GPT of a few thousand parameters."""
    sizes: dict[str, object] = {"layers": 2, "hidden": 16, "heads": 2, "sequence": 8, "vocabulary": 32, "dropout": 0.0, "tied": True}
    return {key: str(value) for key, value in (sizes | changes).items()}


def write_model(folder: Path, body: str, name: str = "model.py") -> str:
    """Write a model file; torch, nn and F are imported for it."""
    path = folder / name
    path.write_text("import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n" + dedent(body))
    return str(path)
