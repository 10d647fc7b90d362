"""Which line of the user's code is running: the first frame that belongs neither to torch nor to this package."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from mpress.graph import Source

_LIBRARY = tuple(f"{Path(path).resolve().parent}/" for path in (torch.__file__, str(Path(__file__).parent), linecache.__file__))
_OURS: dict[CodeType, bool] = {}
_SEEN: dict[tuple[CodeType, int], Source] = {}
_ENTRIES: set[CodeType] = set()
NOWHERE = Source("", 0, "")


def entry(code: CodeType) -> None:
    """Declare the function of this package that calls the user's code: frames outside it are never the user's."""
    _ENTRIES.add(code)


def _is_user_code(code: CodeType) -> bool:
    known = _OURS.get(code)
    if known is None:
        name = code.co_filename
        known = not (name.startswith("<") or name.startswith(_LIBRARY))
        _OURS[code] = known
    return known


def _source(code: CodeType, line: int) -> Source:
    key = (code, line)
    found = _SEEN.get(key)
    if found is None:
        found = Source(Path(code.co_filename).name, line, linecache.getline(code.co_filename, line).strip())
        _SEEN[key] = found
    return found


def current_source() -> Source:
    """The innermost line of user code on this thread's stack, NOWHERE if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_user_code(frame.f_code):
            return _source(frame.f_code, frame.f_lineno)
        if frame.f_code in _ENTRIES:
            break
        frame = frame.f_back
    return NOWHERE


def error_source(traceback: TracebackType | None, within: Path | None = None) -> Source:
    """The innermost line of user code an exception passed; with `within`, only files in that folder count."""
    found = NOWHERE
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_user_code(code) and (within is None or within in Path(code.co_filename).parents):
            found = _source(code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def forget_sources() -> None:
    """Drop cached lines: the user's file may have changed between two traces of one process."""
    _SEEN.clear()
    _OURS.clear()
    linecache.checkcache()
