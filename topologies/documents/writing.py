"""The door for files that are written: each is whole or not there, whatever ends the writing."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from topologies.reading import UserError

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # file systems that have nothing to synchronise


class WriteError(UserError):
    """A file cannot be written; `reason` is what the system says."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: cannot be written: {reason}")
        self.reason = reason


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends well and every byte is on the disk.

    Until then it lies in the same folder under a random name, and it is removed when the block fails or is interrupted: what
    was at `path` stays. Permissions are kept. Raises WriteError.
    """
    if path.exists() and not path.is_file():
        raise WriteError(path, "is no regular file")
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file, _removed_on_failure(part):  # never through a file or a link that is there already
            yield file
            file.flush()
            _synchronise(file)
            with suppress(OSError):
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            part.replace(path)
    except OSError as error:
        raise WriteError(path, error.strerror or str(error)) from None


@contextmanager
def whole_gzip(path: Path) -> Iterator[BinaryIO]:
    """As `whole_file`, packed; the same bytes give the same file, which tells no name and no time. Raises WriteError."""
    import gzip

    with whole_file(path) as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        yield cast(BinaryIO, packed)


@contextmanager
def _removed_on_failure(part: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _synchronise(file: BinaryIO) -> None:
    """On the disk: a disk that is full or broken may say so only now."""
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. Raises WriteError."""
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with whole_file(path) as file:
        file.write(data)


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written before hours of work go into it: folders are made only where a folder is asked for.
    Raises UserError.
    """
    folder = path.absolute().parent
    if not folder.exists():
        raise UserError(f"{option} {path}: its folder does not exist")
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or (
        path.exists() and not (path.is_file() and os.access(path, os.W_OK))
    ):
        raise UserError(f"{option} {path}: cannot be written there")
