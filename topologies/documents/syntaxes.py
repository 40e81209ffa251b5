"""YAML, JSON and TOML as plain data, under limits: what people and other programs write is not trusted.

Every syntax gives the types of JSON. No document takes gigabytes or minutes: `topologies.documents.limits`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from topologies.documents.limits import (
    BYTES,
    DEPTH,
    LINE,
    TOO_DEEP,
    TOO_LONG,
    MalformedError,
    parse_number,
    refuse_constant,
    within_limits,
)
from topologies.documents.yaml_documents import Dumper, dump_yaml, parse_yaml

__all__ = ["Dumper", "MalformedError", "dump_yaml", "parse", "parse_json", "parse_toml", "parse_yaml", "read_lines", "read_text"]

_DOTTED = re.compile(rf"""(?:\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*){{{DEPTH}}}""")  # a key of TOML through so many tables


def read_text(path: Path, most: int = BYTES) -> str:
    """The text of a file within the limit of bytes. Raises OSError and MalformedError."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except ValueError:  # a NUL in its name
        raise OSError(0, "not the name of a file") from None
    if len(data) > most:
        raise MalformedError(f"larger than {_size(most)}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise MalformedError("not UTF-8 text") from None


def read_lines(path: Path, most: int, longest: int = LINE) -> Iterator[str]:
    """The lines of a text file with their ends, one at a time; at most so many bytes in all and in one. Raises OSError and
    MalformedError.
    """
    total = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(longest + 1), b""), 1):
            total += len(line)
            if len(line) > longest or total > most:
                what = "a line of more than" if len(line) > longest else "larger than"
                raise MalformedError(f"{what} {_size(longest if len(line) > longest else most)}", number)
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise MalformedError("not UTF-8 text", number) from None


def _size(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count / 2**10:g} KiB"


def parse(text: str, suffix: str = "", constants: bool = False) -> Any:
    """The value in a document: TOML, JSON or else YAML, as its file's ending says; constants: as in `parse_json`. Raises
    MalformedError.
    """
    parser: Callable[[str], Any]
    name, parser = "YAML", parse_yaml
    if suffix.lower() == ".toml":
        name, parser = "TOML", parse_toml
    elif suffix.lower() == ".json" and text.lstrip()[:1] in ("{", "["):  # otherwise it is YAML under JSON's name
        name, parser = "JSON", functools.partial(parse_json, constants=constants)
    try:
        return parser(text)
    except MalformedError as error:
        at = f" at line {error.line}" if error.line else ""
        raise MalformedError(f"not valid {name}{at}: {error}") from None


def parse_json(text: str, constants: bool = False) -> Any:
    """The value in a JSON document. constants: Infinity and NaN, which Python writes though JSON has no such numbers, are texts
    of these names; otherwise they are refused. Raises MalformedError.
    """
    try:
        data = (_PYTHONS if constants else _DECODER).decode(text)
    except json.JSONDecodeError as error:
        raise MalformedError(error.msg, error.lineno) from None
    except RecursionError:
        raise MalformedError(TOO_DEEP) from None
    return within_limits(data)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise MalformedError(f"field '{twice}' is given twice")
    return result


_DECODER = json.JSONDecoder(
    object_pairs_hook=_mapping, parse_int=parse_number, parse_float=parse_number, parse_constant=refuse_constant
)


_PYTHONS = json.JSONDecoder(object_pairs_hook=_mapping, parse_int=parse_number, parse_float=parse_number, parse_constant=str)


def parse_toml(text: str) -> dict[str, Any]:
    """The table in a TOML document. Raises MalformedError."""
    import tomllib

    if match := _DOTTED.search(text):  # tomllib takes seconds over thousands
        raise MalformedError(TOO_DEEP, text.count("\n", 0, match.start()) + 1)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MalformedError(str(error)) from None
    except RecursionError:
        raise MalformedError(TOO_DEEP) from None
    except ValueError:  # Python's own limit of a number's digits
        raise MalformedError(TOO_LONG) from None
    result: dict[str, Any] = within_limits(data)
    return result
