"""What is worked out once, and forgotten with the object that it follows from, or when it is too much."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")
V = TypeVar("V")


def remembered(function: Callable[[K], V]) -> Callable[[K], V]:
    """`function` of an object that does not change any more, asked once as long as the object lives. The result must not refer to
    it.
    """
    known: WeakKeyDictionary[K, V] = WeakKeyDictionary()

    @wraps(function)
    def of(thing: K) -> V:
        result = known.get(thing)
        if result is None:
            result = known[thing] = function(thing)
        return result

    return of


def kept(known: dict[K, V], key: K, value: V, most: int) -> V:
    """Remember a value; when there are more than `most`, all others are forgotten."""
    if len(known) > most:
        known.clear()
    known[key] = value
    return value
