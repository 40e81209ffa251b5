"""What is worked out of an object is worked out once, and forgotten with the object."""

from __future__ import annotations

import gc
import weakref

from sim.remembered import remembered


class Thing:
    """Something that can be referred to weakly."""


class Result:
    """What is worked out of it."""


def test_an_object_is_asked_once_and_forgotten() -> None:
    asked = list[int]()

    @remembered
    def result_of(thing: Thing) -> Result:
        """A result."""
        asked.append(id(thing))
        return Result()

    first, second = Thing(), Thing()
    result = result_of(first)
    assert result_of(first) is result
    assert result_of(second) is not result
    assert asked == [id(first), id(second)]
    gone = weakref.ref(result)
    del first, result
    gc.collect()
    assert gone() is None
