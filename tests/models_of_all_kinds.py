"""Small models of every kind people train, as texts of model files: build_model(), example_inputs(batch), loss(out) where needed.

Each is a stack of a few blocks, so that it can also be cut for 2 to 4 stages.  `write(name, folder)` makes the file; `MODELS` lists them.
"""

from __future__ import annotations

from pathlib import Path

import models_autograd
import models_language
import models_tensors
import models_vision

HEADER = """
import math
from dataclasses import dataclass
from typing import Optional
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
"""

MODELS: dict[str, str] = {**models_language.MODELS, **models_vision.MODELS, **models_autograd.MODELS, **models_tensors.MODELS}


def write(name: str, folder: Path) -> str:
    """Write one of MODELS as a model file; returns its path."""
    path = folder / f"{name}.py"
    path.write_text(HEADER + MODELS[name])
    return str(path)
