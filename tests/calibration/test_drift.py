"""A machine that has drifted since its calibration."""

import pytest

from calibration.drift import anchors_of, drift, drifted
from calibration.samples import Merged
from sim.pricing.shipped import load_profile
from strategies.predict import predict
from strategies.read_job import read_job


def sample(part, context, value, **case):
    return Merged(part, case, context, value, value, 0.0, 1, 0)


def test_anchors_are_what_was_measured_of_them():
    layer = {"hidden": 512.0, "tokens": 256.0, "layers": 1.0, "passes": "forward"}
    exchange = {"operation": "all_reduce", "bytes": 2.0**24, "ranks": 2.0, "nodes": 1.0}
    rows = [
        sample("layer", "alone", 0.02, **layer),
        sample("layer", "alone", 0.05, **layer | {"passes": "backward"}),
        sample("collective", "alone", 0.001, **exchange),
        sample("collective", "step", 0.003, **exchange),
        sample("collective", "step", 0.009, **exchange | {"ranks": 4.0}),
    ]
    assert anchors_of(rows, 2) == {"layer": 0.02, "all_reduce": 0.003}
    assert anchors_of(rows[:2], 2) == {"layer": 0.02}


def test_drift_is_the_mean_of_before_and_after_over_the_calibration():
    profile = load_profile("cpu-gloo").model_copy(update={"anchors": {"layer": 0.02, "all_reduce": 0.003}})
    readings = [{"layer": 0.022, "all_reduce": 0.003}, {"layer": 0.026, "all_reduce": 0.006}]
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
