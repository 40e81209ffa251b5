"""Sets of jobs, the command line of execution, and what people see of it."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
from click.testing import CliRunner

from calibration.execute import Execution
from calibration.execute.limits import ready
from calibration.machine import elsewhere
from calibration.validate import Row, Validated, validate
from calibration.validation_set import read_set
from reports.figures.validation import validation as draw
from reports.tables.execution import execution, validation
from shardyard import main
from sim.pricing.shipped import load_profile
from strategies.predict import predict
from topologies.reading import UserError

TIMES = {"step": 0.5, "spread": 0.02, "blocks": [0.5, 0.51], "kept": 2, "steps_per_block": 3, "disturbed": 1, "foreign": 0.01}
COMPARED = {"loss": 0.0, "buffers": None, "gradient": 1e-6, "update": 1e-6, "losses": [8.0, 7.0], "tolerance": 1e-3}
EXECUTE = ["execute", "--model", "llama-3.1-8b", "--cluster", "cpu-gloo"]
TINY = ["model.hidden=32", "model.heads=4", "model.layers=4", "model.vocabulary=64", "model.context=16"]


@pytest.fixture
def validated():
    """Two jobs as if measured: one predicted 4 % too short, one 30 % too long."""
    result = []
    for job, factor in zip(read_set(None, TINY, ["DDP", "1F1B"]), (0.96, 1.3), strict=True):
        machine = {"machine": "a machine", "versions": "torch", "date": "a day"}
        run = Execution(job.name, 2, COMPARED, TIMES, {0: 1e6}, {"dp": 1e6}, {"dp": 2e6}, [], machine, ("a note",))
        rows = (
            Row(job.name, "step", "", 0.5 * factor, 0.5),
            Row(job.name, "volume", "dp", 1e6, 1e6),
            Row(job.name, "memory", "0", 1e6, 2e6),
        )
        result.append(Validated(job, run, predict(ready(job)), rows))
    return result


def printed(renderable):
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_every_variant_of_the_shipped_set_can_be_executed():
    jobs = [ready(job) for job in read_set(None, ())]
    assert len({job.name for job in jobs}) == len(jobs) > 12
    assert {job.resolve().global_batch for job in jobs} == {8}


def test_the_work_of_a_set_grows_with_the_processes():
    """Its batch is for two: eight GPUs have four times as much, and one GPU has what does not cut the model."""
    eight = read_set(None, (), cluster="dgx-h100")
    assert {job.name for job in eight} == {job.name for job in read_set(None, ())}
    assert {job.plan.global_batch for job in eight} == {32}
    for job in eight:
        job.resolve()
    one = read_set(None, ["cluster.node.gpus=1"])
    assert {job.plan.global_batch for job in one} == {4}
    assert {job.resolve().grid.world for job in one} == {1}
    assert "tensor parallel" not in {job.name for job in one}


def test_sets_say_what_they_do_not_have(tmp_path):
    with pytest.raises(UserError, match="no variant 'DPP'; did you mean 'DDP'?"):
        read_set(None, (), ["DPP"])
    path = tmp_path / "set.yaml"
    path.write_text("model: llama-3.1-8b\ncluster: cpu-gloo\nvariant: {}\n")
    with pytest.raises(UserError, match=r"set.yaml: (field 'variants' is required|unknown field 'variant')"):
        read_set(str(path), ())


def test_the_table_has_errors_and_their_median(validated):
    text = printed(validation(validated))
    assert "−4.0 %" in text
    assert "step time: median error 17.0 %, worst 30.0 % (1F1B)" in text
    assert "volume: 2 of 2 equal to the byte" in text
    assert "memory: median error 50.0 %" in text


def test_one_job_on_one_screen(validated):
    text = printed(execution(validated[0]))
    assert "DDP on 2 processes of a machine: 500 ms per step" in text
    assert "on the wire, by gloo's algorithms: dp 2.00 MB" in text
    assert "2 blocks of 3 steps, spread ±2.0 %, 1 more disturbed" in text
    checked = replace(validated[0], execution=replace(validated[0].execution, times=None))
    assert "per step" not in printed(execution(checked))


def test_the_figure_is_the_same_twice(validated, tmp_path):
    first, second = (draw(validated, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    for said in ("1F1B", "−4.0 %", "+30.0 %", "−50.0 %", "bytes sent equal in 2 of 2"):
        assert said in first.decode()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([*EXECUTE, "--staleness", "async"], "--staleness and --steps need --servers"),
        (["validate", "--output", "/dev/null"], "--output /dev/null: cannot be written there"),
        (["execute", "examples/demo.yaml", "--output", "/dev/null/x.json"], "--output /dev/null/x.json: cannot be written"),
        (["validate", "--plot", "x.pdf"], "must end in .png or .svg"),
        (["validate", "--seconds", "0", "--plot", "x.png"], "--seconds 0 measures none"),
        ([*EXECUTE, "--set", "plan.precision=bf16"], "precision='bf16' is not possible"),
    ],
)
def test_mistakes_are_one_line(arguments, line):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert line in result.output


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), 130, "interrupted: 1 of 4 are done; not done: ZeRO-3, tensor"),
        (lambda: signal.raise_signal(signal.SIGTERM), 143, "interrupted by SIGTERM: 1 of 4 are done"),
        (lambda: fail("rank 1 of 2 failed"), 2, "error: rank 1 of 2 failed; 1 of 4 are done"),
    ],
)
def test_what_is_done_is_kept_when_the_rest_is_not(end, code, line, validated, monkeypatch, tmp_path):
    def interrupted(jobs, seconds, hear, launches):
        hear({"done": 1, "job": validated[0].job.name, "validated": validated[0]})
        end()

    monkeypatch.setattr("calibration.validate.validate", interrupted)
    result = CliRunner().invoke(main, ["validate", "--quick", "--output", str(tmp_path / "v.json")])
    assert result.exit_code == code
    assert line in result.stderr
    assert "−4.0 %" in result.stdout
    assert len(json.loads((tmp_path / "v.json").read_text())) == 1


def test_launches_that_are_missing_are_said(validated, monkeypatch):
    def interrupted(jobs, seconds, hear, launches):
        for number, row in enumerate(validated, 1):
            hear({"done": number, "job": row.job.name, "validated": row})
        raise KeyboardInterrupt

    monkeypatch.setattr("calibration.validate.validate", interrupted)
    result = CliRunner().invoke(main, ["validate", "--only", "DDP", "--only", "1F1B"])
    assert "2 of 2 are done; not all launches are" in result.stderr


def fail(line):
    raise UserError(line)


def test_prices_of_another_machine_are_said():
    profile = load_profile("cpu-gloo")
    there = profile.provenance["gemm"]
    assert elsewhere(profile, {"machine": there.machine, "versions": there.versions}) is None
    said = elsewhere(profile, {"machine": "8 × something else", "versions": there.versions})
    assert said.startswith(f"profile cpu-gloo was measured on {there.machine}, not 8 × something else: measure this machine")
    assert (
        elsewhere(load_profile("h100"), {"machine": "NVIDIA H100", "versions": "torch 3"}) is None
    )  # not measured by this project


def test_launch_commands_of_a_job():
    result = CliRunner().invoke(main, [*EXECUTE[:-1], "dgx-h100", "--nodes", "4", "--print-launch", "slurm"])
    assert "#SBATCH --nodes=4" in result.output
    assert "--nproc-per-node=8" in result.output


def test_of_several_launches_the_median_counts(validated, monkeypatch):
    """Launches take turns over the jobs, share the seconds of each, and the execution in the middle is the one that is told."""
    steps, asked = iter([0.5, 0.9, 0.4, 0.7, 0.6, 0.8]), []

    def execute(jobs, seconds, heard, nodes):
        for number, (job, row) in enumerate(zip(jobs, validated, strict=True), 1):
            asked.append((job.name, seconds))
            times = {**row.execution.times, "step": next(steps)}
            heard({"done": number, "job": job.name, "execution": replace(row.execution, times=times)})

    monkeypatch.setattr("calibration.validate.execute", execute)
    messages = []
    done = validate([row.job for row in validated], 6.0, messages.append, launches=3)
    assert asked == [(row.job.name, 2.0) for _ in range(3) for row in validated]
    assert [row.launches for row in done] == [(0.5, 0.4, 0.6), (0.9, 0.7, 0.8)]
    assert [row.execution.times["step"] for row in done] == [0.5, 0.8]
    assert [message["done"] for message in messages] == [1, 2, 3, 4, 5, 6]
    assert "launches: 3 of each, of which the median counts; slowest over fastest +39" in printed(validation(done))


def test_a_drift_of_the_machine_is_said_and_taken_out(validated):
    """The anchors took 10 % and 40 % longer beside the second job than in the calibration."""
    profile = load_profile("cpu-gloo").model_copy(update={"anchors": {"layer": 0.02, "all_reduce": 0.004}})
    read = ({"layer": 0.021, "all_reduce": 0.005}, {"layer": 0.023, "all_reduce": 0.0062})
    still, moved = validated
    run = replace(moved.execution, anchors=read)
    moved = replace(moved, execution=run, every=(run,), profile=profile)
    assert moved.drift == pytest.approx({"layer": 1.1, "all_reduce": 1.4})
    plain = predict(moved.job, profile).step_seconds
    assert 1.09 * plain < moved.corrected.predicted < 1.4 * plain
    assert moved.to_dict()["corrected"]["error"] == pytest.approx(moved.corrected.predicted / 0.5 - 1)
    text = printed(validation([still, moved]))
    assert "without drift" in text
    assert "a layer's forward pass × 1.10 (1.10 to 1.10); an all-reduce of 16 MiB × 1.40 (1.40 to 1.40)" in text
    assert "drift" not in printed(validation([still]))


def test_each_launch_is_compared_as_the_machine_was_by_then(validated):
    """In the first launch the machine was as slow as when it was calibrated, in the second half as fast, and so was the step; the
    third was slow for another reason.
    """
    profile = load_profile("cpu-gloo").model_copy(update={"anchors": {"layer": 0.02, "all_reduce": 0.004}})
    usual = predict(validated[0].job, profile).step_seconds
    every = [
        replace(
            validated[0].execution,
            anchors=({"layer": factor * 0.02, "all_reduce": factor * 0.004},),
            times={**TIMES, "step": times * usual},
        )
        for factor, times in ((1.0, 1.02), (2.0, 2.0), (1.0, 1.8))
    ]
    done = replace(validated[0], execution=every[2], every=tuple(every), profile=profile)
    assert [each["layer"] for each in done.drifts] == pytest.approx([1.0, 2.0, 1.0])
    assert done.drift == pytest.approx({"layer": 1.0, "all_reduce": 1.0})
    assert done.corrected.measured == 1.02 * usual
    assert done.corrected.predicted == pytest.approx(usual)
