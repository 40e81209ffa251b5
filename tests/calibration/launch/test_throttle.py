"""Ranks that others slow down."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calibration.execute.limits import ready, throttled
from calibration.launch.throttle import WEIGHTS, beside
from strategies.read_job import read_job
from topologies.reading import UserError

MODEL = {"name": "small", "layers": 2, "hidden": 64, "heads": 4, "vocabulary": 64, "context": 16}


def job(*effects, **plan):
    return read_job(model=MODEL, cluster="cpu-gloo", plan={"auto": False, "precision": "fp32", **plan}, effects=effects)


@pytest.mark.parametrize("speed", [0.1, 0.25, 0.5, 0.7, 0.9, 0.97])
def test_weights_beside_a_rank_leave_it_its_part(speed):
    others = sum(WEIGHTS[nice] for nice in beside(speed))
    assert WEIGHTS[0] / (WEIGHTS[0] + others) == pytest.approx(speed, abs=0.01)


def test_a_rank_at_its_usual_speed_is_left_alone():
    assert list(beside(1.0)) == []


def test_what_throttles_a_process_computes_beside_it_and_ends_with_it():
    code = (
        "import time\n"
        "from calibration.launch.throttle import spent, throttle\n"
        "print(*[each.pid for each in throttle(0.4)], flush=True)\n"
        "while spent() < 0.2:\n    time.sleep(0.02)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    started = ended.stdout.split()
    assert len(started) == len(list(beside(0.4))) * len(os.sched_getaffinity(0)) > 0
    for _ in range(500):
        if not any(Path(f"/proc/{process}").exists() for process in started):
            break
        time.sleep(0.02)
    else:
        pytest.fail("they go on without it")


def test_speeds_by_rank():
    assert throttled(job()) == {}
    assert throttled(job("gpu 1: speed 0.5")) == {1: 0.5}
    assert throttled(job("all: speed 0.8", "gpu 0: speed 0.5")) == {0: 0.4, 1: 0.8}


@pytest.mark.parametrize(
    ("effect", "reason"),
    [
        ("gpu 1: speed 0.5 from 1 s", "of effects only a speed all the time is"),
        ("all: jitter 0.1", "of effects only a speed all the time is"),
        ("gpu 1: speed 0.05", "less than the 0.1 that a process is throttled to"),
    ],
)
def test_other_effects_are_refused(effect, reason):
    with pytest.raises(UserError, match=reason):
        ready(job(effect))


def test_gpus_are_not_throttled():
    with pytest.raises(UserError, match="only processes on this machine's cores are throttled"):
        ready(read_job(model=MODEL, cluster="dgx-h100", plan={"auto": False, "precision": "fp32"}, effects=["gpu 1: speed 0.5"]))
