"""A day with a GPU: stages in the order of their worth, one folder, and what is done is not done again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

import calibration.gpu_day.__main__ as day
from calibration import gpu_day
from calibration.devices.cuda import CudaDevice
from calibration.execute.limits import ready
from calibration.gpu_day import STATE, Done, read_state, report, run
from calibration.gpu_day.stages import SETS, Stage, refused, sets, stages
from calibration.launch.place import available_cores
from calibration.machine import describe, part_of
from calibration.samples import Journal, Sample
from calibration.validation_set import read_set, read_variants
from sim.pricing.profile_file import yaml_text
from strategies.predict import predict
from tests.calibration.devices.test_devices import a_gpu
from topologies.cluster_files import load_cluster
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
    """SIGTERM, as of a scheduler, in the first stage, a calibration that goes on with the samples of an earlier one, when one
    more is there, however long that takes: its ranks end, and nobody holds the folder.
    """
    pytest.importorskip("torch")
    samples = tmp_path / "quick-profile.samples.jsonl"
    earlier = Journal(samples, describe("cpu", 1) | {"quick": True, "cores": 1})
    earlier.add(Sample(part="footprint", case={"kind": "context"}, value=1e8))
    before = samples.read_text()
    command = [sys.executable, "-m", "calibration.gpu_day", "--output", str(tmp_path), "--minutes", "10", "--devices", "1"]
    one = partial(os.sched_setaffinity, 0, {min(available_cores())})  # threads of a rank would wait for each other beside others
    day = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=one)
    try:
        while samples.read_bytes().count(b"\n") <= before.count("\n"):
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


def test_a_board_of_16_gb_executes_what_fits_in_the_precision_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A V100 has no bf16, and no room for four layers of Llama 3.1 8B with their states: what is left out is in no command."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml_text(part_of("v100-sxm2-16gb", 1)))
    monkeypatch.setattr(CudaDevice, "count", lambda self: 1)
    monkeypatch.setattr(CudaDevice, "free", lambda self, ranks: 16_150 * 2.0**20)  # of 16,160 MiB, that nobody has yet
    gpt2, llama = sets("cuda")
    without = {path: refused(path, "cuda", cluster) for path in (gpt2, llama)}
    assert set(without[llama]) == set(read_variants(str(llama), 1))
    assert "a GPU needs" in next(iter(without[llama].values()))
    left = [name for name in read_variants(str(gpt2), 1) if name not in without[gpt2]]
    assert left == ["DDP, fp32", "DDP, 8 microbatches", "DDP, recomputed"]
    precisions = {job.name: job.plan.precision for job in read_set(str(gpt2), (), left, cluster=str(cluster))}
    assert precisions == {name: "fp32" if "fp32" in name else "fp16" for name in left}
    steps = [stage for stage in stages("cuda", 1, without) if stage.name.startswith("steps")]
    assert [stage.name for stage in steps] == ["steps of gpt2 by the quick profile", "steps of gpt2 by the full profile"]
    words = steps[0].command
    assert [words[at + 1] for at, word in enumerate(words) if word == "--only"] == left


def test_a_day_begins_with_what_the_machine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine with two H100: facts, a cluster of two, what the driver says; then the stages, which are not run here."""
    torch = pytest.importorskip("torch")
    a_gpu(monkeypatch, "NVIDIA H100 80GB HBM3", 79.1 * 2.0**30, count=2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=0: (78.5 * 2.0**30, 79.1 * 2.0**30))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "said $*"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    asked: list[Stage] = []
    monkeypatch.setattr(day, "ENDING", ())  # whose handlers would stay
    monkeypatch.setattr(day, "run", lambda stages, *_: asked.extend(stages) or [])
    result = CliRunner().invoke(day.main, ["--output", str(tmp_path / "gpu")])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "gpu"
    files = {"machine.json", "cluster.yaml", "nvidia-smi.txt", "topology.txt", "README.md"}
    assert {path.name for path in folder.iterdir()} == files
    facts = json.loads((folder / "machine.json").read_text())
    assert (facts["devices"], facts["capability"]) == (2, "9.0")
    assert "NCCL 2.27.5" in facts["versions"]
    assert load_cluster(str(folder / "cluster.yaml")).gpus == 2
    assert (folder / "topology.txt").read_text() == "said topo -m\n"
    assert [stage.command for stage in asked] == [stage.command for stage in stages("cuda", 2)]
    a_gpu(monkeypatch, "NVIDIA A100-PCIE-40GB", 39.4 * 2.0**30)
    refused = CliRunner().invoke(day.main, ["--output", str(tmp_path / "other")])
    assert (refused.exit_code, "is not in the catalogue" in refused.output) == (2, True)


def test_cores_are_not_measured_in_silence_where_a_driver_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day, "ENDING", ())
    monkeypatch.setattr(day, "unseen", lambda: "nvidia-smi is installed")
    result = CliRunner().invoke(day.main, ["--output", str(tmp_path / "gpu")])
    assert (result.exit_code, result.output) == (2, "error: nvidia-smi is installed\n")


def test_jobs_that_were_done_before_a_set_failed_are_reported(tmp_path: Path) -> None:
    rows = [{"what": "step", "of": "", "predicted": 0.9, "measured": 1.0, "error": -0.1}]
    (tmp_path / "steps.json").write_text(json.dumps([{"job": "DDP", "rows": rows}]))
    failed = Done("steps", "failed: error: rank 0 of 1 failed", 12.0, ("validate", "x.yaml", "--output", "steps.json"))
    assert "| steps | DDP | step | 0.9 | 1 | -10.0% |" in report(tmp_path, {}, [failed])


def test_the_report_has_every_prediction_beside_its_measurement(tmp_path: Path) -> None:
    rows = [{"what": "step", "of": "", "predicted": 0.9, "measured": 1.0, "error": -0.1}]
    (tmp_path / "steps.json").write_text(json.dumps([{"job": "DDP", "rows": rows}]))
    done = [Done("steps", "done", 12.0, ("validate", "x.yaml", "--output", "steps.json")), Done("other", "failed: no", 3.0, ())]
    text = report(tmp_path, {"name": "NVIDIA H200"}, done)
    assert "* name: NVIDIA H200" in text
    assert "| other | failed: no | 3 |" in text
    assert "| steps | DDP | step | 0.9 | 1 | -10.0% |" in text
