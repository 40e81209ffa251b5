"""One large JSON object read a value at a time, from a file that may be packed by gzip: memory does not grow with the file.

A packed file may unpack to a thousand times its size. One that unpacks to more than RATIO times as much is refused: traces of
the PyTorch profiler shrink to a tenth or a thirtieth.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from topologies.documents.syntaxes import MalformedError
from topologies.reading import UserError

CHUNK = 2**20  # letters that are read at a time
VALUE = 16 * 2**20  # letters of one value, or element of the list that is read element by element
RATIO = 100
FREE = 64 * 2**20  # bytes that any file may unpack to
MOST = 8 * 2**30  # bytes in all
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def beginning_of(path: Path, letters: int) -> str:
    """The first letters of a text file, unpacked. Raises UserError when it cannot be read."""
    text = ""
    with _readable(path), closing(_chunks(path)) as chunks:
        for chunk in chunks:
            text += chunk
            if len(text) >= letters:
                break
    return text[:letters]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:  # also a NUL in the name
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def members(path: Path, by_element: str) -> Iterator[tuple[str, Any]]:
    """(key, value) of the outermost object in a file, in its order; of a list under `by_element` each element by itself, after
    (by_element, []) for the list. Raises UserError.
    """
    with _readable(path), closing(_chunks(path)) as chunks:
        window = _Window(chunks)
        window.take("{")
        if window.peek() == "}":
            return
        while True:
            key = window.value()
            if not isinstance(key, str):
                raise MalformedError("broken JSON: a key is no text")
            window.take(":")
            if key == by_element and window.peek() == "[":
                yield key, []
                for element in window.elements():
                    yield key, element
            else:
                yield key, window.value()
            if window.peek() == "}":
                return
            window.take(",")


def _chunks(path: Path) -> Generator[str, None, None]:
    """A file's text in pieces."""
    packed = path.stat().st_size
    total = 0
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with path.open("rb") as raw:
        is_packed = raw.peek(2)[:2] == b"\x1f\x8b"
        with cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_packed else raw as file:
            try:
                while data := file.read(CHUNK):
                    total += len(data)
                    if total > MOST or (is_packed and total > FREE + RATIO * packed):
                        rule = f"{RATIO} times its size" if total <= MOST else f"{MOST / 2**30:g} GiB"
                        raise MalformedError(f"more than {rule} of text")
                    yield decoder.decode(data)
                yield decoder.decode(b"", final=True)
            except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError):
                raise MalformedError("broken gzip or not text") from None


class _Window:
    """The part of a text that is being read."""

    def __init__(self, chunks: Iterator[str]) -> None:
        self.chunks = chunks
        self.text, self.at, self.ended = "", 0, False

    def more(self) -> None:
        """Drop what was read, and append as much as is left, a chunk at least."""
        self.text = self.text[self.at :]
        self.at = 0
        if len(self.text) > VALUE:
            raise MalformedError(f"broken JSON, or a value of more than {VALUE // 2**20} MiB")
        parts, wanted = [self.text], max(1, len(self.text))
        while wanted > 0 and not self.ended:
            chunk = next(self.chunks, None)
            self.ended = chunk is None
            parts.append(chunk or "")
            wanted -= len(chunk or "")
        self.text = "".join(parts)

    def peek(self) -> str:
        """The next letter that is no space; "" at the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()

    def take(self, letter: str) -> None:
        """Go past a letter that must come next."""
        if self.peek() != letter:
            raise MalformedError(f"broken JSON: '{letter}' expected, found {self.peek()!r}")
        self.at += 1

    def value(self) -> Any:
        """The value that comes next."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if self.ended:
                    raise MalformedError(f"broken JSON: {error.msg}") from None
            except (RecursionError, ValueError):  # thousands of lists inside each other, or of digits
                raise MalformedError("broken JSON: too deep, or a number of thousands of digits") from None
            else:
                if end < len(self.text) or self.ended:  # otherwise a number may go on
                    self.at = end
                    return value
            self.more()

    def elements(self) -> Iterator[Any]:
        """The elements of the list that comes next."""
        self.take("[")
        if self.peek() == "]":
            self.at += 1
            return
        while True:
            yield self.value()
            if self.peek() == "]":
                self.at += 1
                return
            self.take(",")
