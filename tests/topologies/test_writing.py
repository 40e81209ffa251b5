"""Files are whole or not there: on full and broken disks, when writing is interrupted, and where somebody laid a link."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from topologies.documents.writing import WriteError, whole_file, write_whole
from topologies.reading import UserError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "p.yaml").write_text("old")
    return tmp_path / "p.yaml"


def untouched(path: Path) -> bool:
    """Whether the old file is there and nothing else."""
    return [entry.name for entry in path.parent.iterdir()] == ["p.yaml"] and path.read_text() == "old"


def test_a_file_is_replaced_or_begun(path: Path, tmp_path: Path) -> None:
    write_whole(path, "new µ")
    assert path.read_text(encoding="utf-8") == "new µ"
    write_whole(tmp_path / "c.txt", b"\x00\xff")
    assert (tmp_path / "c.txt").read_bytes() == b"\x00\xff"


@pytest.mark.parametrize("room", [0, 1, 4096, 99_999])
def test_a_full_disk_leaves_the_old_file(room: int, path: Path, full_disk: Callable[[int], AbstractContextManager[None]]) -> None:
    with full_disk(room), pytest.raises(WriteError, match=r"p\.yaml: cannot be written: File too large$"):
        write_whole(path, "x" * 100_000)
    assert untouched(path)


def test_a_disk_that_fails_when_it_is_synchronised_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(UserError, match=r"p\.yaml: cannot be written: Input/output error"):
        write_whole(path, "new")
    assert untouched(path)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_ends_the_writing_leaves_the_old_file(error: type[BaseException], path: Path) -> None:
    def half() -> None:
        with whole_file(path) as file:
            file.write(b"half of")
            raise error

    with pytest.raises(error):
        half()
    assert untouched(path)


def test_the_name_of_an_unfinished_file_cannot_be_foreseen(path: Path) -> None:
    names = set()
    for _ in range(2):
        with whole_file(path):
            names |= {entry.name for entry in path.parent.iterdir()}
    assert len(names) == 3
    assert not any(str(os.getpid()) in name for name in names)


def test_a_link_in_the_way_is_not_followed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even to who foresees the name of the unfinished file."""
    precious = path.with_name("precious")
    precious.write_text("precious")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "known")
    path.with_name(".known.part").symlink_to(precious)
    with pytest.raises(WriteError, match="File exists"):
        write_whole(path, "new")
    assert (precious.read_text(), path.read_text()) == ("precious", "old")
    path.unlink()
    path.symlink_to(precious)
    monkeypatch.undo()
    write_whole(path, "new")
    assert (precious.read_text(), path.read_text(), path.is_symlink()) == ("precious", "new", False)


def test_permissions_are_those_of_the_file_that_is_replaced_or_of_the_umask(path: Path, tmp_path: Path) -> None:
    path.chmod(0o640)
    write_whole(path, "new")
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "first", "new")
    finally:
        os.umask(before)
    assert [entry.stat().st_mode & 0o777 for entry in (path, tmp_path / "first")] == [0o640, 0o640]


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("/dev/null", "is no regular file"),
        ("/dev/null/x", "Not a directory"),
        ("folder", "is no regular file"),
        ("none/x", "No such file or directory"),
    ],
)
def test_where_nothing_can_be_written_is_one_line(where: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=f"{where}: cannot be written: {reason}"):
        write_whole(tmp_path / where, "new")
