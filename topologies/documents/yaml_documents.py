"""YAML under limits, without PyYAML's constructors.

Plain scalars mean what YAML 1.2's core schema says (yaml.org/spec/1.2.2, chapter 10.3): `no` and `2001-01-01` are texts, 1e9 is a
number, 017 is 17. Tags construct nothing: every explicit one (`!!python/name`, `!!int`, `!x`) is refused. Aliases are counted as
often as they are used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from topologies.documents import limits
from topologies.documents.limits import (
    DEPTH,
    FLOAT,
    KEY,
    TOO_DEEP,
    WHOLE,
    MalformedError,
    checked_text,
    parse_number,
    refuse_constant,
)

_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the parser in C, ten times faster, where it was built
_WORDS = {"": None, "~": None} | {
    spelt: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for spelt in (word, word.capitalize(), word.upper())
}
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def parse_yaml(text: str) -> Any:
    """The value in a YAML document; None when it is empty. Raises MalformedError."""
    try:
        return _Builder().build(yaml.parse(text, Loader=_SAFE))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", error)).split())
        if "maximum nesting depth" in problem:  # libyaml's own limit of 1,000, which its scanner meets before events come
            problem = TOO_DEEP
        raise MalformedError(problem, mark.line + 1 if mark else None) from None
    except UnicodeEncodeError:
        raise MalformedError("has half a surrogate pair, which is no character") from None


def dump_yaml(data: Any, **options: Any) -> str:
    """YAML that `parse_yaml`, and parsers of YAML 1.1, read as `data`."""
    return str(yaml.dump(data, **({"Dumper": Dumper} | options)))


class Dumper(yaml.SafeDumper):
    """Quotes texts that either version of YAML would take for something else."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{FLOAT.pattern})$"), list("-+.0123456789"))
Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"(?:{WHOLE.pattern})$"), list("-+0123456789"))


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
        value = _meaning(event.value) if plain else checked_text(event.value)
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
        elif checked_text(text, KEY) in here.items:
            raise MalformedError(f"field '{text}' is given twice")
        else:
            here.key = text

    def _begin(self, event: Any) -> None:
        _untagged(event)
        is_mapping = type(event) is yaml.MappingStartEvent
        if self._wants_key:
            raise MalformedError(f"a {'mapping' if is_mapping else 'list'} as a key; keys are texts")
        if len(self.open) >= DEPTH:
            raise MalformedError(TOO_DEEP)
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
        if self.values > limits.VALUES:
            raise MalformedError(f"more than {limits.VALUES:,} values, those behind aliases counted as often as they are used")


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
            refuse_constant(text)
        if WHOLE.fullmatch(text) or FLOAT.fullmatch(text):
            return parse_number(text)
    return checked_text(text)
