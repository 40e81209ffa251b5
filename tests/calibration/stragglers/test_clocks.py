"""Clocks of ranks that differ, and ranks without a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.readers.kineto_ops import Kernel, RankTrace
from calibration.stragglers.clocks import on_one_clock
from calibration.stragglers.kernels import analyse_kernels
from tests.calibration.stragglers.test_kernels import analysed, training

COMPUTE, BESIDE = 7, 20  # streams


def run_of(groups: list[list[int]], ahead: dict[int, float], late: float = 2e-6) -> list[RankTrace]:
    """Ten rounds of 10 ms of compute, 12 on rank 1, and an all-reduce of 1 ms in each of `groups`, one group after the other.
    Ends differ by up to `late`, and the clock of a rank is so many seconds ahead.
    """
    draw, now = np.random.default_rng(0), 0.0
    ranks = sorted({rank for group in groups for rank in group})
    kernels: dict[int, list[Kernel]] = {rank: [] for rank in ranks}
    for _ in range(10):
        free = {rank: now + (0.012 if rank == 1 else 0.010) for rank in ranks}
        for rank in ranks:
            kernels[rank].append(Kernel(now, now, free[rank], COMPUTE))
        for group in groups:
            end = max(free[rank] for rank in group) + 1e-3
            for rank in group:
                own = end + late * draw.random()
                kernels[rank].append(Kernel(free[rank], free[rank], own, BESIDE, "allreduce", f"{group}: allreduce"))
                free[rank] = own
        now = max(free.values()) + 1e-4

    def moved(rank: int) -> list[Kernel]:
        more = ahead.get(rank, 0.0)
        return [
            each._replace(launched=each.launched + more, start=each.start + more, end=each.end + more) for each in kernels[rank]
        ]

    return [RankTrace(rank, {0: moved(rank)}) for rank in ranks]


@pytest.mark.parametrize("ahead", [{}, {1: 0.5}, {0: 0.02, 1: -0.03, 2: 0.001, 3: 7.0}], ids=str)
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0, 1], [2, 3], [0, 2], [1, 3]]], ids=str)
def test_clocks_are_told_by_what_ranks_do_together(groups: list[list[int]], ahead: dict[int, float]) -> None:
    """Whatever the clocks: rank 1 is the slow one, and costs the same."""
    agreed, given = run_of(groups, {}), run_of(groups, ahead)
    traces, moved = on_one_clock(given)
    assert moved == pytest.approx(max([0.0, *(abs(more - ahead.get(0, 0.0)) for more in ahead.values())]), abs=4e-6)
    base = ahead.get(0, 0.0)
    for mine, real in zip(traces, agreed, strict=True):
        ends = [each.end - base for each in mine.steps[0]]
        assert ends == pytest.approx([each.end for each in real.steps[0]], abs=4e-6)
    right, answer = (analyse_kernels(each, "traces") for each in (agreed, given))
    assert answer.slowdown == pytest.approx(right.slowdown, rel=1e-3)
    assert answer.workers[0].rank == right.workers[0].rank == 1
    assert any(note.startswith("clocks of ranks are up to") for note in answer.notes) == bool(ahead)


def test_ends_that_scatter_tell_no_clocks() -> None:
    """Of processes that are late by themselves times stay as they are."""
    traces = run_of([[0, 1]], {}, late=5e-3)
    assert on_one_clock(traces) == (traces, 0.0)


def test_what_one_ends_before_the_other_begins_tells_no_clock() -> None:
    """A send is over when it is buffered: 0.4 s before it is received."""
    pairs = [(each, each + 0.4) for each in range(5)]
    sends = [Kernel(begin, begin, begin + 0.01, BESIDE, "send", "0: 0 to 1") for begin, _ in pairs]
    received = [Kernel(end, end, end + 0.01, BESIDE, "recv", "0: 0 to 1") for _, end in pairs]
    traces = [RankTrace(0, {0: sends}), RankTrace(1, {0: received})]
    assert on_one_clock(traces) == (traces, 0.0)


def test_ranks_without_a_trace_are_named(tmp_path: Path) -> None:
    answer = analysed(training(0, 2), training(1, 2), folder=tmp_path)
    assert not any("no trace" in note for note in answer.notes)
    traces = [RankTrace(rank, {0: [Kernel(0.0, 0.0, 1.0, COMPUTE)]}, 10**15) for rank in (0, 2)]
    (note,) = (note for note in analyse_kernels(traces, "traces").notes if "no trace" in note)
    assert note == (
        "of 1,000,000,000,000,000 ranks 999,999,999,999,998 have no trace here (1, 3, 4, 5, 6, …): waiting for them counts as "
        "transfer"
    )
