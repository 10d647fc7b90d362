"""Files appear whole or not at all: every text is written beside its target first, and renamed only when all of them are on disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mpress.errors import InputError


def check_directory(directory: Path) -> None:
    """Refuse an output directory that is missing or cannot be written, before minutes are spent on a plan."""
    if not directory.is_dir():
        what = "is a file, not a directory" if directory.exists() else "does not exist"
        raise InputError(
            "out-dir", f"the output directory '{directory}' {what}", where="--out", hint=f"create it first: mkdir -p {directory}"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InputError(
            "out-dir",
            f"the output directory '{directory}' cannot be written",
            where="--out",
            hint="choose a directory you may write to with --out DIR",
        )


def write_files(files: tuple[tuple[Path, str], ...]) -> None:
    """Replace all files; on any error before the first rename the files that exist keep their content.  UTF-8, "\\n" line ends."""
    for target, _ in files:
        if target.is_dir():
            raise InputError(
                "write", f"'{target}' is a directory", where="--out", hint="remove it, or choose another directory with --out DIR"
            )
    pending: list[tuple[Path, Path]] = []
    try:
        for target, text in files:
            final = target.resolve()  # a symbolic link stays one: its target is replaced
            beside = final.with_name(f".{final.name}.{os.getpid()}.part")
            pending.append((beside, final))
            with beside.open("w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        for beside, final in pending:
            beside.replace(final)
    except OSError as error:
        raise InputError(
            "write",
            f"the files could not be written: {error.strerror or error}",
            where=str(error.filename or files[0][0].parent),
            hint="free some space or choose another directory with --out DIR",
        ) from error
    finally:
        for beside, _ in pending:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
