"""The arguments of a command in a shell script, which is read, not run: its own variables and their defaults are put in; of
an `if` both branches are read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topologies.reading import UserError, kind_of, load_text, parse_document

GROWTH = 200_000  # letters that stand in place of variables: one in terms of two others doubles every time
MOST = 2**20  # bytes of a script


def arguments(path: Path) -> dict[str, Any]:
    """Flags of the text, without dashes in front and with "-" between words: their number, text, list, or true."""
    text = load_text(path, MOST)
    if path.suffix in (".yaml", ".yml", ".json"):
        words = parse_document(text, path)
        if not isinstance(words, list):
            raise UserError(f"{path}: expected a list of arguments, found {kind_of(words)}")
        words = [str(word) for word in words]
    else:
        words = _words(text, path)
    flags: dict[str, Any] = {}
    name: str = ""
    values: list[Any] = []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if name:
                flags[name] = True if not values else values[0] if len(values) == 1 else values
            name, _, value = word[2:].replace("_", "-").partition("=")
            values = [_value(value)] if value else []
        elif name:
            values.append(_value(word))
    return flags


def _words(text: str, path: Path) -> list[str]:
    """The words of a shell script, with its own variables in place of their names."""
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"^([ \t]*(?:export[ \t]+)?(\w+)=)[\"']?\$\{\2:[-=]([^{}$]*)\}[\"']?", r"\1\3", text, flags=re.MULTILINE)
    whole = r"\"[^\"\n]*\"(?=[\s;]|$)|'[^'\n]*'(?=[\s;]|$)"  # a quoted value may have blanks
    known = dict(re.findall(rf"^[ \t]*(?:export[ \t]+)?(\w+)=({whole}|[^\s(;]+)", text, re.MULTILINE))
    room = GROWTH

    def put(value: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
        def checked(match: re.Match[str]) -> str:
            nonlocal room
            new = value(match)
            room -= max(0, len(new) - len(match[0]))
            if room < 0:
                raise UserError(f"{path}: what its variables stand for is longer than {GROWTH:,} letters")
            return new

        return checked

    for _ in range(8):  # variables of variables
        given = put(lambda match: str(known.get(match[1], match[2])).strip("\"'"))
        text = re.sub(r"\$\{(\w+):[-=]([^{}$]*)\}", given, text)
        text = re.sub(r"\$\{?(\w+)\}?", put(lambda match: known.get(match[1], match[0]).strip("\"'")), text)
    product = r"\$\(\(\s*(\d{1,9})\s*([*/])\s*(\d{1,9})\s*\)\)"
    text = re.sub(product, lambda m: str(_product(int(m[1]), m[2], int(m[3]))), text)
    try:
        quoted = shlex.split(text, comments=True)  # a flag and its value may be quoted together
        words = [end for part in quoted for word in _split(part) for end in (word.strip("()"), *["--"] * word.endswith(")"))]
    except ValueError as error:
        raise UserError(f"{path}: not a shell line: {error}") from None
    return ["--" if not word or word.endswith(("=", ".py")) else word for word in words]  # what ends a list of arguments


def _split(part: str) -> list[str]:
    """The words of a quoted part that consists of flags, also where it is given a name: ARGS="--tp 2 --pp 4"."""
    assigned = re.match(r"\w+\+?=\(?\s*(?=--)", part)
    if assigned:
        return ["--", *part[assigned.end() :].split(), *["--"] * ("(" not in assigned[0])]
    return part.split() if part.startswith("--") else [part]


def _product(left: int, sign: str, right: int) -> int:
    return left * right if sign == "*" else left // max(1, right)


def _value(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text
