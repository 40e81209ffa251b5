"""What a step waits for slower GPUs of one kind, against the expected maximum of normal deviates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardyard
from shardyard import UserError, read_job, simulate, summarise
from sim.analysis.summary import VARIABILITY
from sim.engine.player import run
from sim.pricing.shipped import load_profile, profile_names
from sim.program import Cohort, Collective, Op, Ref, Send
from sim.replay.waiting import waiting
from strategies.predict import from_some_microbatches, predict, prices_of
from tests.sim.conftest import block, program

SMALL = {"name": "small", "hidden": 1024, "layers": 8, "heads": 16, "vocabulary": 32000, "context": 2048}
SIGMA = 0.01
EXPECTED = {2: 0.5642, 8: 1.4236, 64: 2.3437, 1024: 3.2414}  # of the largest of n standard normal deviates (Harter 1961, Table 1)


def varied(played, cluster, prices, deviation: float = SIGMA):
    timeline = run(played, cluster.topology(), prices)
    timeline.variability = (deviation,)
    return timeline


@pytest.mark.parametrize("ranks", EXPECTED)
def test_a_synchronous_step_waits_for_the_slowest_of_so_many(toy_cluster, toy_prices, ranks: int) -> None:
    """Ten seconds of kernels on each rank, then an all-reduce of a second or two, which no GPU makes longer."""
    sync = Collective("all_reduce", 1e9, "dp", "gradients")
    cohort = Cohort({}, [Op("compute", block(10.0)), Op("dp", sync, (Ref(0, 0),))])
    timeline = varied(program(cohort, dp=ranks), toy_cluster(2, ranks // 2), toy_prices())
    waited = waiting(timeline)
    noise = 3 * 0.83 / waited.samples**0.5  # the standard deviation of the larger of two is 0.826, of more ranks less
    assert waited.seconds == pytest.approx(10 * SIGMA * EXPECTED[ranks], abs=10 * SIGMA * noise)
    summary = summarise(timeline)
    assert summary.breakdown[VARIABILITY] == waited.seconds
    assert sum(summary.breakdown.values()) == summary.step_seconds == timeline.step + waited.seconds
    assert summary.ideal_seconds == pytest.approx(timeline.step, rel=1e-12)


def test_nobody_waits_for_gpus_while_data_is_on_its_way(toy_cluster, toy_prices) -> None:
    """Stage 1 computes a second after 10 s of transfer; only its own factor and that of stage 0 are in the step, 2 s of 12."""
    first = Cohort({"pp": 0}, [Op("compute", block(1.0)), Op("send", Send(10e9, 1, "x"), (Ref(0, 0),))])
    second = Cohort({"pp": 1}, [Op("compute", block(1.0), (Ref(0, 1),))])
    timeline = varied(program(first, second, pp=2), toy_cluster(2), toy_prices())
    assert timeline.step == 12.0
    assert waiting(timeline).seconds < 3 * 2**0.5 * SIGMA / 8
    assert waiting(timeline).deviation == pytest.approx(2**0.5 * SIGMA / 12, rel=0.3)


def test_equal_draws_for_equally_many_gpus(toy_cluster, toy_prices) -> None:
    cohort = Cohort({}, [Op("compute", block(1.0))])
    once, again = (waiting(varied(program(cohort, dp=4), toy_cluster(4), toy_prices())) for _ in range(2))
    assert once == again


def test_a_step_told_from_few_microbatches_waits_as_long_as_all_of_them() -> None:
    plan = {"pp": 4, "accumulation": 200, "sequence": 2048}
    job = read_job(model=SMALL | {"hidden": 4096, "heads": 32}, cluster="dgx-a100", plan=plan)
    told, played = predict(job), summarise(simulate(job))
    assert from_some_microbatches(job, job.resolve(), prices_of(job)) is not None
    assert told.ideal_seconds == pytest.approx(played.ideal_seconds, rel=1e-9)
    assert told.variability
    assert played.variability
    assert told.step_seconds == pytest.approx(played.step_seconds, rel=1e-3)


def test_ideal_takes_gpus_as_alike(tmp_path) -> None:
    plan = {"data_parallel": "zero1", "accumulation": 2, "sequence": 1024}
    usual, ideal = (predict(read_job(model=SMALL, cluster="dgx-h100", plan=plan, **more)) for more in ({}, {"variability": 0}))
    assert ideal.variability is None
    assert VARIABILITY not in ideal.breakdown
    assert usual.variability
    assert usual.variability.gpus == load_profile("h100").variability
    assert usual.ideal_seconds == pytest.approx(ideal.step_seconds, rel=1e-12)
    assert usual.step_seconds > ideal.step_seconds
    (tmp_path / "job.yaml").write_text(json.dumps({"model": SMALL, "cluster": "dgx-h100", "plan": plan}))
    words = ["simulate", str(tmp_path / "job.yaml"), "--json"]
    for more in (["--ideal"], ["--set", "variability=0"]):
        answer = json.loads(CliRunner().invoke(shardyard.main, [*words, *more]).stdout)
        assert answer["step_seconds"] == ideal.step_seconds


def test_what_varies_more_is_waited_for_longer() -> None:
    plan = {"data_parallel": "zero1", "accumulation": 2, "sequence": 1024}
    steps = [
        predict(read_job(model=SMALL, cluster="dgx-h100", plan=plan, variability=each)).step_seconds for each in (0, 0.01, 0.05)
    ]
    assert steps == sorted(steps)
    assert steps[0] < steps[1] < steps[2]


def test_gpus_of_two_kinds_vary_too() -> None:
    cluster = Path(__file__).parents[3] / "examples/clusters/a100-and-h100.yaml"
    job = read_job(model=SMALL, cluster=str(cluster), plan={"accumulation": 2, "sequence": 1024})
    assert predict(job).variability is not None


@pytest.mark.parametrize("value", [-0.1, 1.5, "much", True])
def test_a_variability_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"job: variability=.*: must be a number from 0 \(all GPUs alike\) to 1"):
        read_job(model=SMALL, cluster="dgx-h100", variability=value)


def test_shipped_profiles_of_gpus_say_how_these_vary_and_by_what_source() -> None:
    for name in profile_names():
        profile = load_profile(name)
        if not profile.synchronous:
            assert profile.variability
            assert "arXiv:2208.11035" in profile.provenance["variability"].source
