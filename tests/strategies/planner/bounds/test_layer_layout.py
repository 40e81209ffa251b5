"""What a rank keeps from pass to pass, followed by hand along short schedules."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.planner.bounds.layer_layout import Layout, gatherings, moments, paired, splits


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "forward", "backward"),
    [
        ("1f1b", 1, 3, 3, 0),  # F B F B F B: each forward finds nothing, each backward what its forward has left
        ("gpipe", 1, 3, 1, 2),  # F F F B B B: what the first backward releases is gathered again for the others
        ("1f1b", 2, 3, 2, 1),  # F F B F B B
    ],
)
def test_passes_that_find_parameters_gone(schedule: str, ranks: int, microbatches: int, forward: int, backward: int) -> None:
    assert gatherings(schedule, ranks, microbatches, 1) == ((forward, backward),)


def held(schedule: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> set[tuple[Any, ...]]:
    """By moment: (pass, whether it makes weights' gradients, microbatches kept, halves owed, whether parameters are there)."""
    kept = moments(schedule, rank, ranks, microbatches, chunks)
    assert not isinstance(kept, str)
    rows = zip(kept.forward, kept.makes, kept.saved, kept.held, kept.there, strict=True)
    return {(bool(f), bool(m), tuple(s.tolist()), tuple(h.tolist()), tuple(t.tolist())) for f, m, s, h, t in rows}


def test_what_is_kept_at_most() -> None:
    """1F1B keeps two on the first of two ranks, one on the last; GPipe all, and later fewer with gradients of those before. When
    one F of GPipe runs, the others are there.
    """
    assert held("1f1b", 0, 2, 3) == {(True, False, (2,), (0,), (1,)), (False, True, (2,), (0,), (1,))}
    assert held("1f1b", 1, 2, 3) == {(True, False, (1,), (0,), (1,)), (False, True, (1,), (0,), (1,))}
    full = {(True, False, (3,), (0,), (1,)), (False, True, (3,), (0,), (1,))}
    assert held("gpipe", 0, 2, 3) == full | {(False, True, (2,), (0,), (0,))}


def test_gradients_that_wait_for_those_of_the_last_microbatch() -> None:
    """Two chunks on the first of two ranks, two microbatches: both passes of the second chunk go back first, then of the first.
    As each begins its second pass there are gradients of its first.
    """
    kept = moments("interleaved", 0, 2, 2, 2)
    assert not isinstance(kept, str)
    rows = zip(kept.forward, kept.chunk, kept.owed.tolist(), strict=True)
    owing = {(chunk, *owed) for forward, chunk, owed in rows if not forward}
    assert {(1, 0.0, 1.0), (0, 1.0, 0.0)} <= owing
    assert not any(first and second for _, first, second in owing)


def test_halves_that_are_owed() -> None:
    """ZB-H1 on the last of two ranks: the first half of a backward pass keeps no more than 1F1B, and owes a second half."""
    passes = held("zb-h1", 1, 2, 4)
    assert {makes for forward, makes, *_ in passes} == {False}
    assert max(owed[0] for _, _, _, owed, _ in passes) >= 1
    assert max(kept[0] for _, _, kept, _, _ in passes) == 1


def test_schedules_that_cannot_be_made_say_why() -> None:
    assert "even" in str(moments("dualpipe", 0, 2, 3, 2))
    assert not paired("dualpipe", 2, 3, 2)


def test_schedules_by_what_they_do() -> None:
    assert [splits(name, 2, 4, 1) for name in ("1f1b", "gpipe", "zb-h1")] == [False, False, True]
    assert [paired(name, 2, 4, chunks) for name, chunks in (("1f1b", 1), ("dualpipe", 2))] == [False, True]


def test_the_fullest_rank_is_the_first_of_those_with_most_layers() -> None:
    """Two chunks of three ranks, of one layer each but for the embedding's and the head's."""
    loop, back = ((0, 3), (1, 4), (2, 5)), ((0, 5), (1, 4), (2, 3))
    assert Layout((0, 1, 2, 3, 4, 5, 6), loop).fullest == 0
    assert Layout((0, 0, 1, 2, 3, 4, 4), loop).fullest == 1
    assert Layout((0, 0, 1, 2, 3, 4, 4), back).fullest == 1
    assert Layout((0, 1, 3, 5, 6, 7, 8), loop).fullest == 1
