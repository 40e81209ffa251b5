"""Speed of runs over days (`make bench`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from shardyard import read_job
from sim.runs.run import Run
from strategies.resilience.run_spec import prepare

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
