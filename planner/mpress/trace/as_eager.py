"""What transformers does differently when it is watched is switched off: it takes the branches of an eager run, alone and silently.

Nothing here imports transformers; where a model file (or a configuration) has loaded it, the contexts below reach into it.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpress.errors import InputError

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


@contextmanager
def as_eager() -> Iterator[None]:
    """transformers treats a fake tensor as torch.compile's and builds a T x T mask where an eager run needs none."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    if library is None:
        yield
        return
    before = library.is_fake_tensor
    library.is_fake_tensor = lambda tensor: False
    try:
        with quiet():
            yield
    finally:
        library.is_fake_tensor = before


@contextmanager
def quiet() -> Iterator[None]:
    """No warning, advice or progress bar of transformers, and no request of its hub client."""
    environment = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(_OFFLINE)
    hub: Any = sys.modules.get("huggingface_hub.constants")
    offline = None if hub is None else hub.HF_HUB_OFFLINE
    if hub is not None:
        hub.HF_HUB_OFFLINE = True
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(transformers|huggingface_hub)\b")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        hub = sys.modules.get("huggingface_hub.constants")
        if hub is not None:  # loaded inside: it read the environment of this context
            hub.HF_HUB_OFFLINE = _wanted_offline(environment) if offline is None else offline


def _wanted_offline(environment: dict[str, str | None]) -> bool:
    """What the hub client would have read, had it been loaded outside."""
    said = environment["HF_HUB_OFFLINE"] or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def no_hidden_draws(file: str) -> Iterator[None]:
    """Refuse a step that draws from Python's or numpy's generator: another step would draw otherwise, and a trace cannot see it."""
    numpy: Any = sys.modules.get("numpy")
    state = random.getstate()
    drawn: Any = None if numpy is None else numpy.random.get_state(legacy=False)
    yield
    whose = "Python's random" if random.getstate() != state else ""
    if numpy is not None and not whose:
        now = numpy.random.get_state(legacy=False)
        if now["state"]["pos"] != drawn["state"]["pos"] or (now["state"]["key"] != drawn["state"]["key"]).any():
            whose = "numpy.random"
    if whose:
        raise InputError(
            "hidden-draw",
            f"the model draws from {whose} in its forward, so every step runs other operators or other constants",
            file,
            "draw with torch (nn.Dropout, torch.rand), or switch off what draws: layer drop, SpecAugment, random masks",
        )
