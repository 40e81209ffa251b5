"""Speed of runs over days (`make bench`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from shardyard import read_job
from sim.runs.run import Run
from strategies.resilience.run_spec import prepare
from tests.sim.engine.test_servers import BASE, play
from tests.sim.runs.test_airesim import SPEC

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.benchmark
def test_54_days_of_16384_gpus(benchmark: BenchmarkFixture) -> None:
    """Some 400 failures: 0.3 s at most."""
    job = read_job(EXAMPLES / "hybrids/llama-3.1-405b.yaml", run={"failures": "llama-3"})
    assert job.run is not None
    spec = prepare(job, job.run, days=54).spec
    outcome = benchmark(lambda: Run(spec, np.random.SeedSequence(0)).outcome())
    assert sum(outcome.failures.values()) > 300
    assert benchmark.stats.stats.median < 0.3


@pytest.mark.benchmark
def test_256_days_of_4096_servers(benchmark: BenchmarkFixture) -> None:
    """Some 11,000 failures, of which AIReSim takes 2.7 ms each: a fiftieth at most."""
    outcome = benchmark(lambda: Run(SPEC, np.random.SeedSequence(0)).outcome())
    assert benchmark.stats.stats.median / sum(outcome.failures.values()) < 2.7e-3 / 50


@pytest.mark.benchmark
def test_parameter_servers_of_256_workers(benchmark: BenchmarkFixture) -> None:
    """100 steps of each: seconds."""
    benchmark(lambda: play(replace(BASE, workers=256, compute=100.0), 100, None, 0.2))
    assert benchmark.stats.stats.median < 5
