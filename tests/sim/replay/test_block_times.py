"""Blocks of several cohorts whose kernels take other times."""

from __future__ import annotations

import numpy as np

from sim.replay.block_times import BlockTimes, DrawnBlocks


def _cohort(*seconds: list[float], slope: float) -> BlockTimes:
    """Blocks that take so long on each place, and are launched in a second more."""
    busy = np.array(seconds)[:, :, None]
    return BlockTimes(busy, busy + 1, slope * busy, slope * busy, np.array([2, *[0] * (len(seconds) - 1)]))


def test_cohorts_with_like_and_unlike_places() -> None:
    """Two blocks of a cohort whose places are alike, one of a cohort whose two places are not; kernels take 1 or 3 times as long
    in two draws of the first cohort, and on the two places of the second.
    """
    cohorts = [_cohort([1.0], [2.0], slope=0.5), _cohort([3.0, 4.0], slope=1.0)]
    drawn = DrawnBlocks(BlockTimes.joined(cohorts), [0, 2, 3], [np.array([[0.0, 2.0]]), np.array([[0.0], [2.0]])])
    assert [each.tolist() for each in drawn.busy] == [[[1, 2], [1, 2]], [[2, 4], [2, 4]], [[3], [12]]]
    assert drawn.least == [1, 2, 3]
    assert drawn.late == [3, 5, 13]
    assert drawn.critical(1).tolist() == [[3, 5], [3, 5]]
    assert drawn.critical(2).tolist() == [[4], [13]]
    assert [np.asarray(each).tolist() for each in drawn.computing()] == [[[2, 4], [2, 4]], [[6], [24]]]
