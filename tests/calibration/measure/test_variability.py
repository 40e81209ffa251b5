"""How far ranks come apart that do the same work at the same time."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from calibration.launch.ranks import launch
from calibration.measure.variability import deviations, slowest
from calibration.samples import Sample
from tests.calibration.conftest import with_small_caches


@pytest.mark.parametrize(("count", "expected"), [(2, 1 / sqrt(pi)), (3, 1.5 / sqrt(pi)), (8, 1.4236), (64, 2.3437)])
def test_the_slowest_of_so_many(count: int, expected: float) -> None:
    """Of two and three in closed form, others by Harter 1961, "Expected values of normal order statistics", table 1."""
    assert slowest(count) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("sigma", [0.005, 0.05])
def test_deviations_are_found_again(ranks: int, sigma: float) -> None:
    seconds = 0.15 * np.exp(sigma * np.random.default_rng(1).standard_normal((20_000, ranks)))
    assert deviations(seconds).mean() == pytest.approx(sigma, rel=0.03)


def test_one_rank_that_is_always_slower_counts() -> None:
    """Two ranks, one 4 % above the mean in all stretches: the mean wait for it is 0.04."""
    assert deviations(np.array([[0.96, 1.04]] * 5)) * slowest(2) == pytest.approx(np.full(5, 0.04))


def test_two_ranks_say_how_far_they_come_apart() -> None:
    told: list[dict[str, Any]] = []
    launch(with_small_caches, 2, True, ("variability",), [], 0.0, -2, 1.0, hear=told.append)
    (sample,) = [Sample.model_validate(message["sample"]) for message in told if "sample" in message]
    assert (sample.part, sample.case, sample.count) == ("variability", {}, 5)
    assert 0 < sample.value < 1
