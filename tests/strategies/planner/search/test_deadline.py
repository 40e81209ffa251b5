"""A deadline ends what runs in it, and nothing else."""

from __future__ import annotations

import signal
import time
from contextlib import suppress

import pytest

from strategies.planner.search.deadline import Deadline, TimeUp


def spin() -> None:
    while True:
        pass


def test_what_runs_when_the_time_is_over_is_left() -> None:
    began = time.perf_counter()
    with pytest.raises(TimeUp), Deadline(0.1).cut():
        spin()
    assert time.perf_counter() >= began + 0.1


def test_it_is_raised_again_when_something_dropped_it() -> None:
    def drop() -> None:
        with suppress(TimeUp):
            spin()
        spin()

    with pytest.raises(TimeUp), Deadline(0.05).cut():
        drop()


def test_what_is_in_time_is_not_disturbed_then_or_later() -> None:
    deadline = Deadline(0.1)
    with deadline.cut():
        pass
    while not deadline.over:
        time.sleep(0.01)
    time.sleep(0.1)
    assert deadline.left == 0.0
    with pytest.raises(TimeUp), deadline.cut():
        raise AssertionError("begins nothing")


def test_who_heard_the_alarm_before_hears_it_still() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        with Deadline(60.0).cut():
            signal.raise_signal(signal.SIGALRM)
            assert heard == [signal.SIGALRM]
        assert len(heard) == 2  # an alarm of theirs that this one had put off
    finally:
        signal.signal(signal.SIGALRM, before)
