"""The hand-written graph of docs/graph-format.md, and ways to break it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "graph-format.md"


def example() -> str:
    """The text of the example file."""
    found = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def broken(path: str, value: Any) -> str:
    """The example with the value at "ops.3.args" replaced, or added; `...` removes it."""
    document = json.loads(example())
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place: Any = document
    for step in way:
        place = place[step]
    if value is ...:
        del place[last]
    elif isinstance(place, list) and last == len(place):
        place.append(value)
    else:
        place[last] = value
    return json.dumps(document)
