"""Any result as a few numbers and texts by name, which a person can read and compare.

A long column (of an array, or of a field of many rows) becomes [how many finite numbers it has, their sum, the sum in which each
counts as often as its place says]: what changes one of them, or two that change places, changes one of these.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel

SHORT = 4  # values of a column that are kept one by one
DIGITS = 9  # that are kept: libraries and CPUs may round the last ones otherwise
LETTERS = 300  # of a text


def plain(value: Any) -> dict[str, Any]:
    """By name, the numbers and texts that a value is made of; what is nothing (0, None, "" or empty) is left out."""
    return {name.lstrip("."): each for name, each in _flat("", value) if each not in (None, 0, "")}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case None | bool():
            yield name, value
        case str():
            yield name, value[:LETTERS]
        case int() | float() | np.number() | np.bool_():
            yield name, _rounded(float(value))
        case np.ndarray():
            yield from _column(name, value.ravel().tolist())
        case BaseModel():
            yield from _flat(name, {field: getattr(value, field) for field in sorted(value.model_fields_set)})
        case Mapping():
            for key, each in value.items():
                yield from _flat(f"{name}.{key}", each)
        case set() | frozenset():
            yield from _flat(name, sorted(map(str, value)))
        case tuple() if hasattr(value, "_fields"):
            yield from _flat(name, value._asdict())
        case list() | tuple():
            yield from _column(name, list(value))
        case _ if dataclasses.is_dataclass(value):
            yield from _flat(
                name, {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
            )
        case _:
            yield name, getattr(value, "__name__", type(value).__name__)


def _column(name: str, values: list[Any]) -> Iterator[tuple[str, Any]]:
    """A column of one field, or columns of every field of rows."""
    if values and all(isinstance(value, bool | int | float | np.number) for value in values):
        numbers = [float(value) for value in values]
        if not any(numbers):
            return
        if len(numbers) <= SHORT:
            yield name, list(map(_rounded, numbers))
            return
        finite = [number for number in numbers if math.isfinite(number)]
        by_place = math.fsum(place * number for place, number in enumerate(numbers, 1) if math.isfinite(number))
        yield f"{name}:", [len(finite), _rounded(math.fsum(finite)), _rounded(by_place)]
    elif all(isinstance(value, str) for value in values):
        if len(values) <= SHORT:
            yield name, " | ".join(values)[:LETTERS]
            return
        places = {text: place for place, text in enumerate(sorted(set(values)), 1)}
        texts = ", ".join(f"{text} {count}" for text, count in sorted(Counter(values).items()))[:LETTERS]
        yield f"{name}:", f"{texts}; by place {sum(place * places[text] for place, text in enumerate(values, 1))}"
    elif len(values) <= 1:
        for value in values:
            yield from _flat(name, value)
    else:
        columns: dict[str, list[Any]] = {}
        for number, value in enumerate(values):
            for field, each in _flat("", value):
                column = columns.setdefault(field, [0] * number)
                column += [0] * (number - len(column)) + [each]
        for field, column in columns.items():
            texts = any(isinstance(each, str) for each in column)
            lists = [sum(each) if isinstance(each, list) else each for each in column]
            yield from _column(name + field, [str(each) if texts else each or 0 for each in lists])


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
