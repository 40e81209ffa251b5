"""Runs differ by their steps, too: the interval of days contains what prices leave open and what failures do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import shardyard
from shardyard import read_job
from sim.runs.replications import replicate, step_factor
from sim.runs.spec import Elastic, Pace, RunSpec
from strategies.planner.uncertainty import NORMAL
from strategies.resilience.run_spec import Prepared, prepare
from strategies.resilience.runs import RunAnswer, answer
from strategies.resilience.settings import read_run
from strategies.resilience.step_interval import with_step_interval
from topologies.costs import rates

JOB = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": 16, "plan": {"data_parallel": "zero1", "sequence": 4096}}
HUNDRED = RunSpec(step=1.0, work=100.0, steps=100.0, nodes=4, gpus_per_node=2, faster=0.1, slower=0.2)


def over_days(run: dict, count: int = 100, tokens: float = 1e12, days: float | None = None) -> tuple[Prepared, RunAnswer]:
    job = read_job(JOB)
    prepared = with_step_interval(prepare(job, read_run(run, "run"), days, None if days else tokens))
    return prepared, answer(prepared, rates(job.cluster.node.gpu), replicate(prepared.spec, 0, count))


def test_factors_are_spread_evenly_over_both_halves() -> None:
    """Log-normal with 0.1 below and 0.2 above the median, which is the first two runs'; every two are on both sides."""
    factors = np.array([step_factor(HUNDRED, number) for number in range(2000)])
    assert tuple(factors[:2]) == (1.0, 1.0)
    low, high = np.quantile(factors, [0.1, 0.9])
    assert (math.log(low), math.log(high)) == (pytest.approx(-0.1 * NORMAL, rel=0.01), pytest.approx(0.2 * NORMAL, rel=0.01))
    assert np.log(factors[2::2]) / 0.2 == pytest.approx(np.log(factors[3::2]) / -0.1)
    even = replace(HUNDRED, faster=0.1, slower=0.1)
    assert sum(math.log(step_factor(even, number)) for number in range(20)) == pytest.approx(0.0, abs=1e-12)
    assert step_factor(replace(HUNDRED, faster=0.0, slower=0.0), 7) == 1.0


def test_a_factor_stretches_steps_and_nothing_else() -> None:
    elastic = Elastic((Pace(1.0, 0.5),), 2, 1.0, rollback=True)
    longer = replace(HUNDRED, elastic=elastic).with_steps(1.5)
    assert (longer.step, longer.work, longer.steps) == (1.5, 150.0, 100.0)
    assert longer.elastic == replace(elastic, paces=(Pace(1.5, 0.5),))
    assert HUNDRED.with_steps(1.0) is HUNDRED


def test_without_failures_days_have_the_interval_of_the_step() -> None:
    prepared, result = over_days({"failures": "none", "initialization": "0 s"}, count=1000)
    interval, step = prepared.summary.interval, prepared.summary.step_seconds
    assert interval is not None
    assert result.days.low / result.days.median == pytest.approx(interval.low / step, rel=5e-3)
    assert result.days.high / result.days.median == pytest.approx(interval.high / step, rel=5e-3)
    assert result.chance.low == pytest.approx(result.chance.high, rel=1e-12)
    assert result.goodput.low == pytest.approx(1.0)


def test_the_interval_contains_prices_and_failures() -> None:
    """Variances of the logarithm add up: of the step, and of what failures do to it."""
    failing = {"failures": {"parts": {"node": {"mtbf": "8 days"}}, "rate_spread": 0.5}, "checkpoint": {"interval": "60 min"}}
    _, both = over_days(failing)
    _, chance = over_days({**failing, "step_interval": False})
    _, prices = over_days({"failures": "none", "initialization": "0 s"})

    def variance(estimate: RunAnswer) -> float:
        return float(np.var([math.log(outcome.seconds) for outcome in estimate.outcomes]))

    assert variance(both) == pytest.approx(variance(chance) + variance(prices), rel=0.3)
    assert min(variance(chance), variance(prices)) > 0.1 * variance(both)
    assert both.chance.median == pytest.approx(chance.days.median, rel=0.02)
    assert both.chance.high - both.chance.low == pytest.approx(chance.days.high - chance.days.low, rel=0.2)


def test_of_given_days_tokens_differ() -> None:
    prepared, result = over_days({"failures": "none", "initialization": "0 s"}, days=10.0)
    assert (result.days.low, result.days.high) == (10.0, 10.0)
    assert result.tokens.high / result.tokens.low == pytest.approx(
        math.exp(NORMAL * (prepared.spec.faster + prepared.spec.slower)), rel=0.03
    )
    assert result.finished == 0.0


def test_a_job_may_say_that_its_step_is_as_predicted() -> None:
    job = read_job(JOB, run={"failures": "none", "initialization": "0 s", "step_interval": False})
    summary = shardyard.predict(job)
    certain = shardyard.run_days(job, tokens=1e12, count=3)
    assert certain.days.low == certain.days.high == certain.chance.mean
    assert certain.days.mean * 86400 == pytest.approx(
        summary.step_seconds * 1e12 / (summary.tokens_per_second * summary.step_seconds)
    )


def test_runs_say_the_days_that_comparisons_have() -> None:
    """Beside the days of runs with steps of their own: those with the step as predicted, within what chance leaves."""
    job = read_job(JOB, run={"failures": "llama-3"})
    spread = shardyard.run_days(job, tokens=1e12, count=20)
    compared = shardyard.run_days(read_job(JOB, run={"failures": "llama-3", "step_interval": False}), tokens=1e12, count=20)
    assert spread.chance.mean == pytest.approx(compared.days.mean, rel=1e-3)
    assert spread.days.mean == pytest.approx(compared.days.mean, rel=0.01)
