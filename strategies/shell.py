"""The arguments of a command in a shell script, which is read, not run: its own variables and their defaults are put in; of
an `if` both branches are read.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from topologies.reading import UserError, load_text, parse_document


def arguments(path: Path) -> dict[str, Any]:
    """Flags of the text, without dashes in front and with "-" between words: their number, text, list, or true."""
    text = load_text(path)
    if path.suffix in (".yaml", ".yml", ".json"):
        words = parse_document(text, path)
        if not isinstance(words, list):
            raise UserError(f"{path}: expected a list of arguments, found {type(words).__name__}")
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
    text = re.sub(r"^(\s*(?:export\s+)?(\w+)=)[\"']?\$\{\2:[-=]([^{}$]*)\}[\"']?", r"\1\3", text, flags=re.MULTILINE)
    known = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=([^\s(;]+)", text, re.MULTILINE))
    for _ in range(8):  # variables of variables
        text = re.sub(r"\$\{(\w+):[-=]([^{}$]*)\}", lambda found: str(known.get(found[1], found[2])).strip("\"'"), text)
        text = re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], found[0]).strip("\"'"), text)
    text = re.sub(r"\$\(\(\s*(\d+)\s*([*/])\s*(\d+)\s*\)\)", lambda m: str(_product(int(m[1]), m[2], int(m[3]))), text)
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
