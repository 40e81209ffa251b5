"""Seeds, common random numbers, and when there are enough runs."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from sim.runs.replications import BATCH, ENOUGH, MOST, Estimate, half_width, replicate
from sim.runs.spec import Component, RunSpec, Saving
from strategies.planner.search.workers.executors import engine
from topologies.documents.durations import Spread

SPEC = RunSpec(
    step=10.0,
    work=864000.0,
    steps=86400.0,
    nodes=64,
    gpus_per_node=8,
    initialization=Spread(mean=300.0),
    components=(Component("node", Spread(mean=2e7, kind="exponential"), replace=0.5),),
    savings=(Saving("storage", 180, 30.0),),
)


def test_the_number_of_workers_changes_nothing() -> None:
    with ProcessPoolExecutor(2) as pool:
        assert replicate(SPEC, 7, 25, pool.map) == replicate(SPEC, 7, 25)


def test_more_runs_begin_with_fewer() -> None:
    assert replicate(SPEC, 7, 25)[:5] == replicate(SPEC, 7, 5)


def test_runs_stop_when_the_mean_is_known() -> None:
    outcomes = replicate(SPEC, 7)
    goodputs = [outcome.goodput for outcome in outcomes]
    assert len(outcomes) % BATCH == 0
    assert len(outcomes) < MOST
    assert half_width(goodputs) <= ENOUGH
    assert len(outcomes) == BATCH or half_width(goodputs[:-BATCH]) > ENOUGH


def test_alternatives_meet_the_same_failures() -> None:
    """The difference that ten seconds of a save make is known better from equal seeds than from different ones."""
    other = replace(SPEC, savings=(Saving("storage", 180, 40.0),))
    base, equal, different = replicate(SPEC, 1, 20), replicate(other, 1, 20), replicate(other, 2, 20)
    paired = np.std([a.goodput - b.goodput for a, b in zip(base, equal, strict=True)])
    unpaired = np.std([a.goodput - b.goodput for a, b in zip(base, different, strict=True)])
    assert paired < unpaired / 2


def test_an_estimate() -> None:
    estimate = Estimate.of([float(value) for value in range(11)])
    assert (estimate.mean, estimate.median, estimate.low, estimate.high) == (5.0, 5.0, 1.0, 9.0)
    assert Estimate.of([3.0]) == Estimate(3.0, 3.0, 3.0, 3.0)
    assert half_width([1.0, 3.0]) == pytest.approx(1.96)


def test_dask_changes_nothing() -> None:
    """A scheduler and a worker of Dask's own, over a socket."""
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, protocol="tcp", dashboard_address=None
        ) as cluster,
        engine(dask=cluster.scheduler_address) as runs,
    ):
        assert replicate(SPEC, 7, 25, runs.map) == replicate(SPEC, 7, 25)


def test_ray_changes_nothing() -> None:
    pytest.importorskip("ray")
    with engine(ray="local") as runs:
        assert replicate(SPEC, 7, 25, runs.map) == replicate(SPEC, 7, 25)
