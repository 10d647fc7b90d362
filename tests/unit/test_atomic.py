"""Files are replaced all together or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpress.atomic import check_directory, write_files
from mpress.errors import InputError


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_writes_and_replaces(tmp_path: Path) -> None:
    a, b = tmp_path / "a.py", tmp_path / "b.json"
    a.write_text("old")
    write_files(((a, "new\n"), (b, "{}\n")))
    assert (a.read_bytes(), b.read_bytes()) == (b"new\n", b"{}\n")
    assert names(tmp_path) == ["a.py", "b.json"]


def test_an_error_in_the_second_file_leaves_the_first_alone(tmp_path: Path) -> None:
    a = tmp_path / "a.py"
    a.write_text("old")
    with pytest.raises(InputError) as caught:
        write_files(((a, "new"), (tmp_path / "missing" / "b.json", "{}")))
    assert caught.value.code == "write"
    assert a.read_text() == "old"
    assert names(tmp_path) == ["a.py"]


def test_a_directory_in_the_way_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    a, b = tmp_path / "a.py", tmp_path / "b.json"
    a.write_text("old")
    b.mkdir()
    with pytest.raises(InputError, match="is a directory"):
        write_files(((a, "new"), (b, "{}")))
    assert a.read_text() == "old"
    assert names(tmp_path) == ["a.py", "b.json"]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("old")
    link.symlink_to(real)
    write_files(((link, "new"),))
    assert link.is_symlink() and real.read_text() == "new"


def test_a_missing_directory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist") as caught:
        check_directory(tmp_path / "none")
    assert caught.value.where == "--out" and "mkdir" in caught.value.hint
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        check_directory(tmp_path / "file")
