"""A day with a GPU: stages in the order of their worth, one folder, and what is done is not done again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calibration import gpu_day
from calibration.execute.limits import ready
from calibration.gpu_day import STATE, Done, read_state, report, run
from calibration.gpu_day.stages import SETS, Stage, stages
from calibration.launch.place import available_cores
from calibration.machine import describe
from calibration.samples import Journal, Sample
from calibration.validation_set import read_set, read_variants
from strategies.predict import predict
from topologies.reading import UserError

VERSION = Stage("version", ("--version",), 60.0)
BROKEN = Stage("broken", ("simulate", "no-such-job.yaml"), 60.0)
LATER = Stage("later", ("--version",), 60.0, needs=("profile.yaml",))


def test_a_failure_costs_one_stage_and_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    said: list[str] = []
    first = run([BROKEN, VERSION, LATER], tmp_path, 120.0, said.append)
    assert [each.ended for each in first] == [
        "failed: error: no-such-job.yaml: cannot be read: No such file or directory",
        "done",
    ]
    assert said[-1] == "later: left out, for want of profile.yaml"
    assert "shardyard" in (tmp_path / "logs" / "version.txt").read_text()
    (tmp_path / "profile.yaml").write_text("")
    said.clear()
    run([BROKEN, VERSION, LATER], tmp_path, 120.0, said.append)
    assert [line.split(":")[0] for line in said] == ["broken", "version", "later"]
    assert said[1] == "version: done before"
    assert "later: done (" in said[2]


def test_a_stage_with_another_command_is_done_anew(tmp_path: Path) -> None:
    run([VERSION], tmp_path, 60.0, lambda _: None)
    said: list[str] = []
    run([Stage("version", ("--help",), 60.0)], tmp_path, 60.0, said.append)
    assert said[0].startswith("version: done (")


def test_when_the_time_is_over_nothing_begins_and_what_runs_is_ended(tmp_path: Path) -> None:
    said: list[str] = []
    assert run([VERSION], tmp_path, 1.0, said.append) == []
    assert said == ["version: no time left"]
    long = Stage("long", ("validate", "--only", "DDP", "--seconds", "3000"), 6.0)
    (ended,) = run([long], tmp_path, 60.0, said.append)
    assert ended.ended == "out of time"


@pytest.mark.parametrize(("seconds", "minutes"), [(3600.0, "10"), (360.0, "4")])
def test_a_calibration_measures_nothing_twice_after_two_thirds_of_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, minutes: str
) -> None:
    """It is the same stage, whatever is left, and not done again."""
    monkeypatch.setattr(gpu_day, "START", "import sys; print(*sys.argv[1:])")
    calibration = Stage("calibration", ("calibrate",), 900.0, once=600.0)
    (done,) = run([calibration], tmp_path, seconds, lambda _: None)
    assert (tmp_path / "logs" / "calibration.txt").read_text() == f"calibrate --minutes {minutes}\n"
    assert done.command == calibration.command


def test_a_folder_is_at_work_for_one_call_at_a_time(tmp_path: Path) -> None:
    """Also while a stage runs that has outlived its call: it holds the lock itself."""
    held: list[str] = []

    def hear(line: str) -> None:
        with pytest.raises(UserError, match="still at work in it"):
            run([VERSION], tmp_path, 60.0, lambda _: None)
        held.append(line)

    run([VERSION], tmp_path, 60.0, hear)
    assert len(held) == 1
    assert run([VERSION], tmp_path, 60.0, lambda _: None)[0].ended == "done"


def test_a_day_that_is_killed_in_the_middle_ends_its_stage_and_goes_on(tmp_path: Path) -> None:
    """SIGTERM, as of a scheduler, in the first stage, a calibration that goes on with the samples of an earlier one, when some
    more are there, however long that takes: its ranks end, and nobody holds the folder.
    """
    pytest.importorskip("torch")
    samples = tmp_path / "quick-profile.samples.jsonl"
    earlier = Journal(samples, describe("cpu", 1) | {"quick": True, "cores": len(available_cores())})
    earlier.add(Sample(part="footprint", case={"kind": "context"}, value=1e8))
    before = samples.read_text()
    command = [sys.executable, "-m", "calibration.gpu_day", "--output", str(tmp_path), "--minutes", "10", "--devices", "1"]
    day = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while samples.read_bytes().count(b"\n") <= before.count("\n") + 3:
            assert day.poll() is None
            time.sleep(0.1)
        day.send_signal(signal.SIGTERM)
        assert day.wait(timeout=300) == 128 + signal.SIGTERM
    finally:
        day.kill()
    assert samples.read_text().startswith(before)
    with gpu_day._alone(tmp_path):  # raises where a stage is still there
        assert not (tmp_path / STATE).exists()


def test_a_file_that_is_no_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / STATE).write_text('[{"name": 3}]')
    with pytest.raises(UserError, match="delete it to begin anew"):
        read_state(tmp_path)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_the_order_is_that_of_worth(devices: int) -> None:
    names = [stage.name for stage in stages("cuda", devices)]
    assert len(set(names)) == len(names)
    strategies = [name for name in names if name.startswith("strategy")]
    assert [name.removeprefix("strategy ") for name in strategies] == read_variants(None, devices)
    assert ("strategy tensor parallel" in names) == (devices > 1)  # one GPU cannot cut a model
    assert names[len(strategies) :] == [
        "quick calibration",
        "steps of gpt2 by the quick profile",
        "steps of llama by the quick profile",
        "calibration",
        "steps of gpt2 by the full profile",
        "steps of llama by the full profile",
    ]


@pytest.mark.parametrize("path", sorted(SETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_set_can_be_executed_and_fits_a_gpu_of_80_gb(path: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("node: {gpu: h100-sxm, gpus: 1, wiring: bare}\n")
    given = {} if path.stem.startswith("cpu") else {"cluster": str(cluster)}
    jobs = read_set(str(path), (), **given)
    assert len(jobs) >= 2
    for job in jobs:
        assert predict(ready(job)).fits


def test_the_report_has_every_prediction_beside_its_measurement(tmp_path: Path) -> None:
    rows = [{"what": "step", "of": "", "predicted": 0.9, "measured": 1.0, "error": -0.1}]
    (tmp_path / "steps.json").write_text(json.dumps([{"job": "DDP", "rows": rows}]))
    done = [Done("steps", "done", 12.0, ("validate", "x.yaml", "--output", "steps.json")), Done("other", "failed: no", 3.0, ())]
    text = report(tmp_path, {"name": "NVIDIA H200"}, done)
    assert "* name: NVIDIA H200" in text
    assert "| other | failed: no | 3 |" in text
    assert "| steps | DDP | step | 0.9 | 1 | -10.0% |" in text
