"""A machine that has drifted since its calibration."""

from types import SimpleNamespace

import pytest

from calibration.drift import anchors_of, drift, drifted
from calibration.execute.measured import timing
from calibration.samples import Sample, merge
from sim.pricing.shipped import load_profile
from strategies.predict import predict
from strategies.read_job import read_job


def test_anchors_are_what_all_visits_of_a_calibration_read():
    visits = [Sample(part="anchor", case={"kind": "layer"}, value=value) for value in (0.02, 0.05, 0.03)]
    disturbed = Sample(part="anchor", case={"kind": "layer"}, value=0.2, foreign=0.5)
    layer = Sample(part="layer", case={"hidden": 512.0, "tokens": 256.0, "layers": 1.0, "passes": "forward"}, value=0.04)
    exchange = Sample(part="anchor", case={"kind": "all_reduce"}, value=0.003)
    assert anchors_of(merge([*visits, disturbed, layer, exchange])) == {"layer": 0.03, "all_reduce": 0.003}
    assert anchors_of(merge([layer])) == {}


def test_drift_is_the_median_of_what_was_read_over_the_calibration():
    profile = load_profile("cpu-gloo").model_copy(update={"anchors": {"layer": 0.02, "all_reduce": 0.003}})
    readings = [
        {"layer": 0.022, "all_reduce": 0.003},
        {"layer": 0.024, "all_reduce": 0.0045},
        {"layer": 0.05, "all_reduce": 0.006},
    ]
    assert drift(profile, readings) == pytest.approx({"layer": 1.2, "all_reduce": 1.5})
    assert drift(profile, [{"layer": 0.022}, {}]) == {}
    assert drift(profile, []) == {}


def test_a_machine_twice_as_slow_takes_twice_the_compute_and_its_collectives_their_own():
    model = {"name": "small", "layers": 2, "hidden": 256, "heads": 4, "vocabulary": 1024, "context": 64}
    job = read_job(cluster="cpu-gloo", model=model, plan={"precision": "fp32", "data_parallel": "ddp"})
    profile = load_profile("cpu-gloo")
    before = predict(job).breakdown
    slower = predict(job, drifted(profile, {"layer": 2.0})).breakdown
    busy = predict(job, drifted(profile, {"all_reduce": 3.0})).breakdown
    for name in ("forward", "backward"):
        assert slower[name] == pytest.approx(2 * before[name], rel=1e-3)
        assert busy[name] == pytest.approx(before[name], rel=1e-9)
    assert predict(job, drifted(profile, {})).breakdown == pytest.approx(before)


def test_anchors_are_visited_before_between_and_after_the_blocks_of_steps(monkeypatch):
    """Seconds on a clock that only blocks of steps move: visits and the steps after them are in no block."""
    clock, log = [0.0], []

    def block(runner, size):
        clock[0] += 0.3
        log.append("block")
        return 0.1, 0.0, 0.0

    monkeypatch.setattr(timing, "_block", block)
    monkeypatch.setattr(timing, "_steps_per_block", lambda runner, seconds: 3)
    monkeypatch.setattr(timing, "_agreed", lambda wanted, runner: wanted)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    runner = SimpleNamespace(setup=SimpleNamespace(resolved=SimpleNamespace(local_steps=1)), step=lambda: log.append("step"))
    times = timing.measure(runner, 1.5, lambda: log.append("visit"))
    assert log == [*["step"] * 2, "visit", "step", *["block"] * 3, "visit", "step", *["block"] * 2, "visit"]
    assert (times.step, times.kept) == (0.1, 5)
