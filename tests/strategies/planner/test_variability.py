"""Steps that wait for the slowest of GPUs that differ."""

from __future__ import annotations

import json
from math import sqrt

import numpy as np
import pytest
from click.testing import CliRunner

from reports.commands import main
from shardyard import read_job, simulate
from sim.replay.step import StepReplay
from strategies.planner.variability import _steps, variability

LARGE = {"name": "large", "hidden": 4096, "layers": 8, "heads": 32, "vocabulary": 32000, "context": 4096}


def test_a_step_waits_for_the_slowest_of_its_gpus() -> None:
    """The largest of 8 normal draws is on average 1.42 standard deviations above their mean, of 32 2.07. Kernels are nearly the
    whole step.
    """
    largest = {8: 1.4236, 32: 2.0697}  # tabulated: Harter 1961, Biometrika 48, expected values of normal order statistics
    for nodes in (1, 4):
        job = read_job(model=LARGE, cluster="dgx-h100", nodes=nodes, plan=dict(accumulation=16, sequence=4096))
        spread = variability(job, gpus=0.02, samples=2000)
        assert spread.cost == pytest.approx(0.02 * largest[8 * nodes], rel=0.15)
        assert list(spread.scaling) == [1, 2, 4, 8, 16, 32][: len(spread.scaling)]
        left = list(spread.scaling.values())
        assert left == sorted(left, reverse=True)
        assert left[0] == pytest.approx(1.0, abs=0.02 / sqrt(200) * 4)


def test_without_variation_nothing_varies() -> None:
    spread = variability(read_job(model=LARGE, cluster="dgx-h100", plan=dict(auto=False, sequence=1024)), gpus=0.0, samples=3)
    assert spread.mean == pytest.approx(spread.ideal, rel=1e-12)
    assert {round(value / spread.ideal, 12) for value in spread.percentiles.values()} == {1.0}


def test_draws_repeat_by_their_seed() -> None:
    job = read_job(model=LARGE, cluster="dgx-h100", plan=dict(auto=False, sequence=1024))
    first, again, other = (variability(job, collectives=0.1, samples=50, seed=seed).mean for seed in (0, 0, 1))
    assert first == again != other
    assert np.isfinite(first)


def test_the_command_says_what_is_left(tmp_path) -> None:
    job = ["--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--set", "plan.sequence=1024", "--samples", "50"]
    shown = CliRunner().invoke(main, ["variability", *job, "--plot", str(tmp_path / "v.png")])
    assert shown.exit_code == 0, shown.output
    assert "p99" in shown.output
    assert (tmp_path / "v.png").stat().st_size > 1000
    data = json.loads(CliRunner().invoke(main, ["variability", *job, "--json"]).stdout)
    assert data["ideal"] < data["mean"]
    assert CliRunner().invoke(main, ["variability", *job, "--gpus", "2"]).exit_code != 0


def test_as_many_steps_as_were_asked_for_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    job = read_job(model=LARGE, cluster="dgx-h100", plan=dict(auto=False, sequence=1024, global_batch=8))
    monkeypatch.setattr("strategies.planner.variability.AT_ONCE", 8 * 3)  # three samples of 8 ranks
    assert sum(len(steps) for steps in _steps(StepReplay(simulate(job)), 0.02, 0.0, 7, 0)) == 7
    assert max(len(steps) for steps in _steps(StepReplay(simulate(job)), 0.02, 0.0, 7, 0)) == 3  # no more are held at a time
