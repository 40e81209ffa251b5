"""What is worked out of an object once, and forgotten with it."""

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
