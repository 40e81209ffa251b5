"""Limits of documents that are not trusted, and the values that keep them.

Documents give the types of JSON: null, true and false, finite numbers, texts, lists, and mappings whose keys are texts. Bytes,
depth, values, digits of a number and letters of a text are limited before anything is built from them. Control characters are
refused in texts and keys: they end file names early and steer terminals.
"""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

BYTES = 8 * 2**20  # of a document; the largest shipped one has 20 kB
DEPTH = 64  # mappings and lists inside each other
VALUES = 500_000
LETTERS = 20_000  # of a text
LINE = 2**20  # bytes of a line of a file that is read line by line
KEY = 200  # letters of a key
DIGITS = 64  # letters of a number: 1e64 is still a float, 64 digits are more than any measurement has


WHOLE = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
# Unicode's Cc and Cs, but tab and ends of lines
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")


class MalformedError(ValueError):
    """A malformed document: the fault, and its line where that is known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


TOO_DEEP = f"more than {DEPTH} mappings and lists inside each other"
TOO_LONG = f"a number of more than {DIGITS} digits"


def parse_number(text: str) -> int | float:
    """A number as JSON and YAML 1.2 spell it. Raises MalformedError when it is longer or larger than any that is meant."""
    if len(text) > DIGITS:
        raise MalformedError(TOO_LONG)
    if WHOLE.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    value = float(text)
    if math.isinf(value):
        raise MalformedError(f"the number {text} is too large")
    return value


def checked_text(text: str, most: int = LETTERS) -> str:
    """The text, when it is short enough and has no control characters. Raises MalformedError."""
    if len(text) > most:
        raise MalformedError(f"a {'key' if most == KEY else 'text'} of more than {most:,} letters")
    if match := _CONTROL.search(text):
        raise MalformedError(f"the control character {match[0]!r} in {text[:40]!r}")
    return text


def refuse_constant(text: str) -> None:
    """Infinity and NaN are no numbers. Raises MalformedError."""
    raise MalformedError(f"{text} is no number of JSON: numbers are finite")


def within_limits(data: Any) -> Any:
    """Data that a parser built, once it is known to keep the limits. Raises MalformedError."""
    values, waiting = 0, [(data, 1)]
    while waiting:
        value, depth = waiting.pop()
        values += 1
        if isinstance(value, str):
            checked_text(value)
        elif isinstance(value, dict | list):
            if depth > DEPTH:
                raise MalformedError(TOO_DEEP)
            if isinstance(value, dict):
                for key in value:
                    checked_text(key, KEY)
            waiting += [(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, datetime.date | datetime.time):
            raise MalformedError(f"{value} is a date; write it as a text, in quotes")
        elif isinstance(value, float) and not math.isfinite(value):
            refuse_constant(str(value))
        elif isinstance(value, int) and abs(value) >= 10**DIGITS:
            raise MalformedError(TOO_LONG)
        if values > VALUES:
            raise MalformedError(f"more than {VALUES:,} values")
    return data
