"""A public reliability simulator's configuration and published results (github.com/karthikp-ubc/airesim, 30 replications)."""

from __future__ import annotations

import numpy as np
import pytest

from sim.runs.run import Run
from sim.runs.spec import Component, Repair, RunSpec, Saving
from topologies.documents.durations import Spread

MINUTE = 60.0


def exponential(minutes: float) -> Spread:
    return Spread(mean=minutes * MINUTE, kind="exponential")


SPEC = RunSpec(
    step=1.0,
    work=368640 * MINUTE,  # 256 days
    steps=368640 * MINUTE,
    nodes=4096,
    gpus_per_node=1,
    components=(Component("server", exponential(1 / 6.944444e-6)),),
    savings=(Saving("none is lost", 1),),  # it does not model lost work
    spares=16,
    pool=48,
    reserve=200,
    allocation=3 * MINUTE,
    preemption=20 * MINUTE,
    bad=0.15,
    bad_factor=6.0,  # a bad server has its systematic failures, five times as many, and the others
    initialization=Spread(mean=20 * MINUTE),
    idle_failures=False,
    repair=Repair(exponential(120), exponential(2880), escalates=0.8, cures=0.6, cures_manually=0.8),
)


def test_failures_and_hours_are_within_the_published_spread() -> None:
    outcomes = [Run(SPEC, np.random.SeedSequence(1, spawn_key=(number,))).outcome() for number in range(4)]
    failures = [sum(outcome.failures.values()) for outcome in outcomes]
    hours = [outcome.seconds / 3600 for outcome in outcomes]
    assert np.mean(failures) == pytest.approx(11145.6, abs=100.3)
    assert np.mean(hours) == pytest.approx(9865.97, abs=33.6)
    assert np.mean([outcome.ettr for outcome in outcomes]) == pytest.approx(0.6228, abs=0.0021)
