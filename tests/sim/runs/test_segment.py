"""Training without interruption, as arithmetic, against playing every step and save one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.runs.segment import Pause, Segment, blocked
from sim.runs.spec import Saving


def one_by_one(first: int, step: float, pauses: tuple[Pause, ...], seconds: float) -> tuple[int, float, list[float], list[int]]:
    """(step, seconds in the next one, seconds of each pause, newest step that each has completed), step by step."""
    at, left, paused, done = first, seconds, [0.0] * len(pauses), [0] * len(pauses)
    while left >= step:
        left -= step
        at += 1
        for number, pause in enumerate(pauses):
            if at % pause.steps == 0:
                spent = min(left, pause.seconds)
                paused[number] += spent
                left -= spent
                if spent < pause.seconds:
                    return at, 0.0, paused, done
                done[number] = at
    return at, left, paused, done


whole = st.integers(0, 40)


@given(
    first=whole,
    step=st.integers(1, 8),
    every=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 60)), max_size=3),
    seconds=st.integers(0, 3000),
)
@settings(max_examples=400, deadline=None)
def test_equals_playing_every_step(first: int, step: int, every: list[tuple[int, int]], seconds: int) -> None:
    pauses = tuple(Pause(steps, float(length)) for steps, length in every)
    segment = Segment(first, float(step), pauses)
    position = segment.at(float(seconds))
    at, rest, paused, done = one_by_one(first, float(step), pauses, float(seconds))
    assert (position.step, position.seconds, list(position.paused)) == (at, rest, paused)
    assert [segment.complete(float(seconds), position, number, 0.0) or 0 for number in range(len(pauses))] == done
    assert sum(position.paused) + position.seconds + (at - first) * step == seconds


def test_a_flush_makes_a_save_complete_later() -> None:
    """Steps of 1 s, every 10 steps a save that blocks 2 s and is complete 5 s later: at 10 + 2 + 5 s and 22 + 2 + 5 s."""
    segment = Segment(0, 1.0, (Pause(10, 2.0),))
    complete = [segment.complete(seconds, segment.at(seconds), 0, 5.0) for seconds in (16.9, 17.0, 28.9, 29.0)]
    assert complete == [None, 10, 10, 20]
    late = [segment.complete(seconds, segment.at(seconds), 0, 25.0) for seconds in (36.9, 37.0, 48.9, 49.0)]
    assert late == [None, 10, 10, 20]


def test_a_save_waits_for_the_flush_before_it() -> None:
    assert blocked(Saving("storage", steps=10, blocking=2.0, flush=12.0), 1.0) == pytest.approx(2.0)
    assert blocked(Saving("storage", steps=10, blocking=2.0, flush=15.0), 1.0) == pytest.approx(5.0)
