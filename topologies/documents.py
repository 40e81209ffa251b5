"""YAML, JSON and TOML as plain data, under limits: what people and other programs write is not trusted.

Every syntax gives the types of JSON: null, true and false, finite numbers, texts, lists, and mappings whose keys are texts. Plain
scalars of YAML mean what YAML 1.2's core schema says (yaml.org/spec/1.2.2, chapter 10.3): `no` and `2001-01-01` are texts, 1e9
is a number, 017 is 17. Tags construct nothing: every explicit one (`!!python/name`, `!!int`, `!x`) is refused.

No document takes gigabytes or minutes: bytes, depth, values (aliases counted as often as they are used), digits of a number and
letters of a text are limited before anything is built from them. Control characters are refused in texts and keys: they end file
names early and steer terminals.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

BYTES = 8 * 2**20  # of a document; the largest shipped one has 20 kB
DEPTH = 64  # mappings and lists inside each other
VALUES = 500_000
LETTERS = 20_000  # of a text
LINE = 2**20  # bytes of a line of a file that is read line by line
KEY = 200  # letters of a key
DIGITS = 64  # letters of a number: 1e64 is still a float, 64 digits are more than any measurement has

_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the parser in C, ten times faster, where it was built
_WORDS = {"": None, "~": None} | {
    spelt: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for spelt in (word, word.capitalize(), word.upper())
}
_WHOLE = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_DOTTED = re.compile(rf"""(?:\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*){{{DEPTH}}}""")  # a key of TOML through so many tables
_CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]"
)  # Unicode's Cc and Cs, but tab and ends of lines


class MalformedError(ValueError):
    """A malformed document: the fault, and its line where that is known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


def read_text(path: Path, most: int = BYTES) -> str:
    """The text of a file within the limit of bytes. Raises OSError and MalformedError."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except ValueError:  # a NUL in its name
        raise OSError(0, "not the name of a file") from None
    if len(data) > most:
        raise MalformedError(f"larger than {_bytes(most)}")
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
                raise MalformedError(f"{what} {_bytes(longest if len(line) > longest else most)}", number)
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise MalformedError("not UTF-8 text", number) from None


def _bytes(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count / 2**10:g} KiB"


def parse_yaml(text: str) -> Any:
    """The value in a YAML document; None when it is empty. Raises MalformedError."""
    try:
        return _Builder().build(yaml.parse(text, Loader=_SAFE))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", error)).split())
        raise MalformedError(problem, mark.line + 1 if mark else None) from None
    except UnicodeEncodeError:
        raise MalformedError("has half a surrogate pair, which is no character") from None


def parse_json(text: str) -> Any:
    """The value in a JSON document. Raises MalformedError."""
    try:
        data = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise MalformedError(error.msg, error.lineno) from None
    except RecursionError:
        raise MalformedError(_TOO_DEEP) from None
    return checked(data)


def parse_toml(text: str) -> dict[str, Any]:
    """The table in a TOML document. Raises MalformedError."""
    if match := _DOTTED.search(text):  # tomllib takes seconds over thousands
        raise MalformedError(_TOO_DEEP, text.count("\n", 0, match.start()) + 1)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MalformedError(str(error)) from None
    except RecursionError:
        raise MalformedError(_TOO_DEEP) from None
    except ValueError:  # Python's own limit of a number's digits
        raise MalformedError(_TOO_LONG) from None
    result: dict[str, Any] = checked(data)
    return result


def dump_yaml(data: Any, **options: Any) -> str:
    """YAML that `parse_yaml`, and parsers of YAML 1.1, read as `data`."""
    return str(yaml.dump(data, **({"Dumper": Dumper} | options)))


class Dumper(yaml.SafeDumper):
    """Quotes texts that either version of YAML would take for something else."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT.pattern})$"), list("-+.0123456789"))
Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"(?:{_WHOLE.pattern})$"), list("-+0123456789"))

_TOO_DEEP = f"more than {DEPTH} mappings and lists inside each other"
_TOO_LONG = f"a number of more than {DIGITS} digits"


def number(text: str) -> int | float:
    """A number as JSON and YAML 1.2 spell it. Raises MalformedError when it is longer or larger than any that is meant."""
    if len(text) > DIGITS:
        raise MalformedError(_TOO_LONG)
    if _WHOLE.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    value = float(text)
    if math.isinf(value):
        raise MalformedError(f"the number {text} is too large")
    return value


def _letters(text: str, most: int = LETTERS) -> str:
    if len(text) > most:
        raise MalformedError(f"a {'key' if most == KEY else 'text'} of more than {most:,} letters")
    if match := _CONTROL.search(text):
        raise MalformedError(f"the control character {match[0]!r} in {text[:40]!r}")
    return text


def _no_constant(text: str) -> None:
    raise MalformedError(f"{text} is no number of JSON: numbers are finite")


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise MalformedError(f"field '{twice}' is given twice")
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_mapping, parse_int=number, parse_float=number, parse_constant=_no_constant)


def checked(data: Any) -> Any:
    """Data that a parser built, once it is known to keep the limits above. Raises MalformedError."""
    values, waiting = 0, [(data, 1)]
    while waiting:
        value, depth = waiting.pop()
        values += 1
        if isinstance(value, str):
            _letters(value)
        elif isinstance(value, dict | list):
            if depth > DEPTH:
                raise MalformedError(_TOO_DEEP)
            if isinstance(value, dict):
                for key in value:
                    _letters(key, KEY)
            waiting += [(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, datetime.date | datetime.time):
            raise MalformedError(f"{value} is a date; write it as a text, in quotes")
        elif isinstance(value, float) and not math.isfinite(value):
            _no_constant(str(value))
        elif isinstance(value, int) and abs(value) >= 10**DIGITS:
            raise MalformedError(_TOO_LONG)
        if values > VALUES:
            raise MalformedError(f"more than {VALUES:,} values")
    return data


class _Open:
    """A mapping or a list that has not ended."""

    def __init__(self, event: Any, is_mapping: bool, values: int) -> None:
        self.items: Any = {} if is_mapping else []
        self.is_mapping = is_mapping
        self.anchor: str | None = event.anchor
        self.first = values  # how many values there were before it
        self.key: str | None = None
        self.merged: list[Any] = []  # behind the key <<
        self.merges = False  # the value that comes is one of these


class _Builder:
    """Data from the events of PyYAML's parser, without recursion and without its constructors."""

    def __init__(self) -> None:
        self.open: list[_Open] = []
        self.anchors: dict[str, tuple[Any, int]] = {}  # name -> value, and the number of values in it
        self.values = 0
        self.documents = 0
        self.result: Any = None
        self.takes: dict[type, Callable[[Any], None]] = {
            yaml.ScalarEvent: self._scalar,
            yaml.AliasEvent: self._alias,
            yaml.DocumentStartEvent: self._document,
            yaml.MappingStartEvent: self._begin,
            yaml.SequenceStartEvent: self._begin,
            yaml.MappingEndEvent: self._end,
            yaml.SequenceEndEvent: self._end,
        }

    def build(self, events: Iterator[Any]) -> Any:
        """The value of the only document."""
        for event in events:
            take = self.takes.get(type(event))
            try:
                if take is not None:
                    take(event)
            except MalformedError as error:
                raise MalformedError(str(error), event.start_mark.line + 1) from None
        return self.result

    def _document(self, event: Any) -> None:
        self.documents += 1
        if self.documents > 1:
            raise MalformedError("a second document begins; give one")

    def _scalar(self, event: Any) -> None:
        _untagged(event)
        self._count(1)
        plain = event.implicit[0]  # neither quoted nor a block
        if self._wants_key:
            self._key(event.value, plain)
            return
        value = _meaning(event.value) if plain else _letters(event.value)
        if event.anchor:
            self.anchors[event.anchor] = value, 1
        self._put(value)

    @property
    def _wants_key(self) -> bool:
        return bool(self.open) and self.open[-1].is_mapping and self.open[-1].key is None and not self.open[-1].merges

    def _key(self, text: str, plain: bool) -> None:
        """A key means its text, whatever it looks like; << puts other mappings under this one."""
        here = self.open[-1]
        if plain and text == "<<":
            here.merges = True
        elif _letters(text, KEY) in here.items:
            raise MalformedError(f"field '{text}' is given twice")
        else:
            here.key = text

    def _begin(self, event: Any) -> None:
        _untagged(event)
        is_mapping = type(event) is yaml.MappingStartEvent
        if self._wants_key:
            raise MalformedError(f"a {'mapping' if is_mapping else 'list'} as a key; keys are texts")
        if len(self.open) >= DEPTH:
            raise MalformedError(_TOO_DEEP)
        self.open.append(_Open(event, is_mapping, self.values))
        self._count(1)

    def _end(self, _: Any) -> None:
        ended = self.open.pop()
        for mapping in ended.merged:
            ended.items = mapping | ended.items
        if ended.anchor:
            self.anchors[ended.anchor] = ended.items, self.values - ended.first
        self._put(ended.items)

    def _alias(self, event: Any) -> None:
        anchor = event.anchor
        if self._wants_key:
            raise MalformedError("an alias as a key; keys are texts")
        if any(part.anchor == anchor for part in self.open):
            raise MalformedError(f"*{anchor} contains itself")
        if anchor not in self.anchors:
            raise MalformedError(f"*{anchor} is not defined by &{anchor} before it")
        value, values = self.anchors[anchor]
        self._count(values)
        self._put(value)

    def _put(self, value: Any) -> None:
        """A value where it belongs."""
        if not self.open:
            self.result = value
            return
        here = self.open[-1]
        if not here.is_mapping:
            here.items.append(value)
        elif here.merges:
            mappings = value if isinstance(value, list) else [value]
            if not all(isinstance(mapping, dict) for mapping in mappings):
                raise MalformedError("<< takes a mapping or a list of mappings")
            here.merged += mappings
            here.merges = False
        else:
            here.items[here.key], here.key = value, None

    def _count(self, values: int) -> None:
        self.values += values
        if self.values > VALUES:
            raise MalformedError(f"more than {VALUES:,} values, those behind aliases counted as often as they are used")


def _untagged(event: Any) -> None:
    if event.tag is not None:
        spelt = event.tag.replace("tag:yaml.org,2002:", "!!")
        raise MalformedError(f"the tag '{spelt[:40]}' is not read: a value is what it looks like")


def _meaning(text: str) -> Any:
    """The value of a plain scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] in "-+.0123456789":
        if _INFINITE.fullmatch(text):
            _no_constant(text)
        if _WHOLE.fullmatch(text) or _FLOAT.fullmatch(text):
            return number(text)
    return _letters(text)


def parse(text: str, suffix: str = "") -> Any:
    """The value in a document: TOML, JSON or else YAML, as its file's ending says. Raises MalformedError."""
    name, parser = "YAML", parse_yaml
    if suffix.lower() == ".toml":
        name, parser = "TOML", parse_toml
    elif suffix.lower() == ".json" and text.lstrip()[:1] in ("{", "["):  # otherwise it is YAML under JSON's name
        name, parser = "JSON", parse_json
    try:
        return parser(text)
    except MalformedError as error:
        at = f" at line {error.line}" if error.line else ""
        raise MalformedError(f"not valid {name}{at}: {error}") from None
