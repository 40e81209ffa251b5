"""What a run did when: saves inside training by arithmetic, training that was in vain, the longest interruption."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.runs.record import Span, costliest, in_vain
from sim.runs.segment import Pause, Segment

TWENTY = Segment(0, 1.0, (Pause(20, 2.0), Pause(30, 5.0)))
TRAINING = Span(100.0, 160.0, "productive", TWENTY, 100.0, ("checkpoint save", "evaluation"))


def test_pauses_are_pieces_of_their_own() -> None:
    """Steps of 1 s from second 100 on: a save at 120, an evaluation 32 s after the start, the next save after 47."""
    assert list(TRAINING.pieces(0.0, 1e9)) == [
        (100.0, 120.0, "productive"),
        (120.0, 122.0, "checkpoint save"),
        (122.0, 132.0, "productive"),
        (132.0, 137.0, "evaluation"),
        (137.0, 147.0, "productive"),
        (147.0, 149.0, "checkpoint save"),
        (149.0, 160.0, "productive"),
    ]
    assert list(TRAINING.pieces(121.0, 134.0)) == [
        (121.0, 122.0, "checkpoint save"),
        (122.0, 132.0, "productive"),
        (132.0, 134.0, "evaluation"),
    ]


@given(
    first=st.integers(0, 40),
    step=st.integers(1, 8),
    every=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 60)), max_size=3),
    seconds=st.integers(1, 1000),
)
@settings(max_examples=300, deadline=None)
def test_pieces_add_up_to_where_the_segment_is(first: int, step: int, every: list[tuple[int, int]], seconds: int) -> None:
    segment = Segment(first, float(step), tuple(Pause(steps, float(length)) for steps, length in every))
    names = tuple(f"pause {number}" for number in range(len(every)))
    pieces = list(Span(0.0, float(seconds), "productive", segment, 0.0, names).pieces(0.0, float(seconds)))
    assert sum(end - start for start, end, _ in pieces) == seconds
    spent = [sum(end - start for start, end, cause in pieces if cause == name) for name in names]
    assert spent == list(segment.at(float(seconds)).paused)


def test_what_was_in_vain_begins_after_the_pauses_of_the_last_step_that_counts() -> None:
    """Back to step 20 of two stretches: the first is in vain from 122 s on, the second as a whole."""
    record = [TRAINING, Span(160.0, 170.0, "detection"), Span(170.0, 180.0, "productive", Segment(52, 1.0, ()), 170.0)]
    in_vain(record, 20)
    assert [(span.start, span.end, span.cause) for span in record] == [
        (100.0, 122.0, "productive"),
        (122.0, 160.0, "wasted progress"),
        (160.0, 170.0, "detection"),
        (170.0, 180.0, "wasted progress"),
    ]
    assert costliest(record) is None  # training did not go on
    assert costliest([*record, Span(180.0, 190.0, "productive", Segment(20, 1.0, ()), 180.0)]) == (122.0, 180.0)


def test_the_start_is_no_interruption() -> None:
    record = [
        Span(0.0, 100.0, "initialization"),
        TRAINING,
        Span(160.0, 170.0, "detection"),
        TRAINING._replace(start=170.0, end=200.0),
    ]
    assert costliest(record) == (160.0, 170.0)


@pytest.mark.parametrize(("lengths", "longest"), [([10, 5, 7], 0), ([5, 10, 7], 1), ([5, 7, 10], 2), ([7, 7, 5], 0)])
def test_the_longest_interruption_is_the_first_of_the_longest(lengths: list[int], longest: int) -> None:
    """Stretches of 100 s with three interruptions between them."""
    record, begins, now = [Span(0.0, 100.0, "productive")], list[float](), 100.0
    for length in lengths:
        begins.append(now)
        record += [Span(now, now + length, "detection"), Span(now + length, now + length + 100.0, "productive")]
        now += length + 100.0
    assert costliest(record) == (begins[longest], begins[longest] + lengths[longest])
