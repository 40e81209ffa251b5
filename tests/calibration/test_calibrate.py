"""`shardyard calibrate`: one real quick run, and the mistakes that it refuses."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from click.testing import Result

from calibration import calibrate
from calibration.devices import Kind
from calibration.fit.machine.tables import Point
from calibration.from_logs import from_logs
from calibration.launch.place import Place
from calibration.request import Request
from calibration.samples import Sample, read_journal
from sim.pricing.shipped import load_profile
from tests.calibration.conftest import MODEL, call, with_small_caches
from topologies.reading import UserError


class Outcome(NamedTuple):
    """Of a command."""

    exit_code: int
    output: str


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, unsearched: None) -> tuple[Path, Outcome]:
    """Two processes over gloo, the smallest collectives, products and memory, one round of each and no second try; its time is
    over at once, so that cases are repeated as little as can be. Once for all workers of pytest.
    """
    pytest.importorskip("torch")
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    path, outcome = shared / "calibrated" / "mine.yaml", shared / "calibrated.json"
    with (shared / "calibrated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not outcome.exists():
            path.parent.mkdir()
            result = _calibrated(path)
            outcome.write_text(json.dumps([result.exit_code, result.output]))
    return path, Outcome(*json.loads(outcome.read_text()))


def _calibrated(path: Path) -> Result:
    parts = "gemm,memory,launch,collective,overlap,company,wrapping,footprint"
    rounds = calibrate.measure
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calibrate, "measure", lambda request, hear: rounds(request, hear, -2))
        patched.setattr(calibrate, "POOR", 1e9)
        patched.setattr("calibration.measure.session.measure", with_small_caches)
        few = ("--quick", "--ranks", "2", "--largest", "2KiB", "--minutes", "0.01")
        return call("calibrate", *few, "--parts", parts, "--output", str(path))


def test_one_command_writes_profile_machine_and_plot(calibrated: tuple[Path, Outcome]) -> None:
    path, result = calibrated
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "mine.cluster.yaml",
        "mine.png",
        "mine.samples.jsonl",
        "mine.yaml",
    ]
    assert "others wait: product × " in " ".join(result.output.split())
    profile = load_profile(path)
    measured = {table.operation for table in profile.tables}
    assert measured == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "all_to_all",
        "gather",
        "scatter",
        "send",
        "barrier",
    }
    assert profile.provenance["links"].source == "measured by `shardyard calibrate`"
    assert profile.provenance["gemm"].heldout_error is not None
    assert set(profile.wrapping) >= {"dp/all_reduce", "dp/all_gather", "tp/all_reduce", "pp/weight_gradient", "pp/pass"}
    assert 1e-5 < profile.wrapping["pp/pass"].fixed < 0.02
    assert profile.overhead.context > 50e6
    assert profile.slowdown >= 1


def test_its_profile_and_machine_make_a_prediction(calibrated: tuple[Path, Outcome]) -> None:
    path, _ = calibrated
    job = path.with_name("job.yaml")
    plan = {"precision": "fp32", "global_batch": 2}
    job.write_text(
        json.dumps({"model": MODEL, "cluster": str(path.with_suffix(".cluster.yaml")), "profile": str(path), "plan": plan})
    )
    result = call("simulate", str(job), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert answer["step_seconds"] > 0
    assert "mine" in answer["profile"]


def test_what_is_fitted_badly_is_measured_again_and_said(
    calibrated: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, samples, _ = read_journal(calibrated[0].with_suffix(".samples.jsonl"))
    asked = []

    def measure(request: Request, hear: calibrate.Hear, extra: int = 0, only: Any = ()) -> tuple[dict[str, Any], list[Sample]]:
        asked.append((request.parts, extra, {key[0] for key in only}))
        return head, samples

    request = Request(tmp_path / "p.yaml", parts=("gemm", "memory"), quick=True)
    fitted = calibrate.fit(request, head, samples)
    monkeypatch.setattr(calibrate, "fit", lambda *_: deepcopy(fitted))  # the samples are always these
    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr(calibrate, "POOR", -1.0)
    heard: list[dict[str, Any]] = []
    result = calibrate.calibrate(request, heard.append)
    assert result is not None
    assert asked == [(("gemm", "memory"), 0, set()), (("gemm",), 1, {"gemm"}), (("gemm",), 2, {"gemm"})]
    assert [message["note"][-21:] for message in heard] == ["%): measured once more"[-21:]] * 2
    assert "gemm: prices are off by" in result.fitted.notes[-1]
    assert result.fitted.notes[-1].endswith("measure again when the machine is quiet, or without --quick")
    monkeypatch.setattr(calibrate, "POOR", 1e9)
    again = calibrate.calibrate(request, heard.append)
    assert again is not None
    assert len(asked) == 4
    assert not any("kept out" in note for note in again.fitted.notes)


def test_of_collectives_only_those_are_measured_again_whose_table_is_poor(
    calibrated: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of three sizes half of what was measured is predicted, and of sends all of it."""
    head, samples, _ = read_journal(calibrated[0].with_suffix(".samples.jsonl"))
    asked = []

    def measure(request: Request, hear: calibrate.Hear, extra: int = 0, only: Any = ()) -> tuple[dict[str, Any], list[Sample]]:
        asked.append((request.parts, {dict(key[2])["operation"] for key in only}))
        return head, samples

    def fitted(*_: Any) -> Any:
        points = [
            Point(f"{name} 2", 2048.0, 1.0, price, True) for name, price in (("all_reduce", 0.5), ("send", 1.0), ("reduce", 0.8))
        ]
        return SimpleNamespace(fitted=SimpleNamespace(points={"links": points}, notes=[]))

    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr(calibrate, "fit", fitted)
    monkeypatch.setattr(calibrate, "AGAIN", 1)
    calibrate.calibrate(Request(tmp_path / "p.yaml", parts=("collective",), quick=True), lambda _: None)
    assert asked == [(("collective",), set()), (("collective",), {"all_reduce", "reduce"})]


def test_cases_that_others_disturbed_in_every_round_are_measured_again(
    calibrated: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, samples, _ = read_journal(calibrated[0].with_suffix(".samples.jsonl"))
    calm = [sample.model_copy(update={"foreign": 0.0}) for sample in samples]
    sends = {sample.key for sample in calm if sample.case.get("operation") == "send"}
    busy = [sample.model_copy(update={"foreign": 0.2}) if sample.key in sends else sample for sample in calm]
    once = next(iter(sends))
    left = [*busy, *(sample.model_copy(update={"round": 5}) for sample in calm if sample.key in sends - {once})]
    rounds = iter([(head, busy), (head, left)])
    asked = []

    def measure(request: Request, hear: calibrate.Hear, extra: int = 0, only: Any = None) -> tuple[dict[str, Any], list[Sample]]:
        asked.append((request.parts, extra, only))
        return next(rounds)

    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr(calibrate, "POOR", 1e9)
    monkeypatch.setattr(calibrate, "DISTURBED", 1 / len({sample.key for sample in samples if sample.part == "collective"}))
    heard: list[dict[str, Any]] = []
    parts = ("gemm", "memory", "collective")
    calibrate.calibrate(Request(tmp_path / "p.yaml", parts=parts), heard.append)
    assert asked == [(parts, 0, None), (("collective",), 1, sends)]  # the one that is left is not many
    assert f"(collective {len(sends)}): these are measured once more" in heard[0]["note"]


def test_no_other_cases_are_measured_again(
    calibrated: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibration.measure.session.measure", with_small_caches)
    journal = tmp_path / "mine.samples.jsonl"
    journal.write_bytes(calibrated[0].with_suffix(".samples.jsonl").read_bytes())
    _, samples, _ = read_journal(journal)
    send = next(sample.key for sample in samples if sample.case.get("operation") == "send")
    request = Request(tmp_path / "mine.yaml", quick=True, ranks=2, parts=("collective",), largest=2048.0)
    measured = calibrate.measure(request, lambda _: None, -1, {send})
    assert measured is not None
    again = [sample for sample in measured[1][len(samples) :] if sample.part != "anchor"]
    assert [(sample.key, sample.round) for sample in again] == [(send, 1)]


def alone(session: Callable[..., Any], ranks: int, *arguments: Any, device: Kind, hear: calibrate.Hear) -> None:
    """A session of this process, which is the only rank."""
    import torch.distributed as dist

    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            session(Place(0, 1, 0, device, (), hear), *arguments)
        finally:
            dist.destroy_process_group()


def test_when_its_minutes_are_over_nothing_is_measured_a_second_time(
    calibrated: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a second round that was never begun; it is known from the journal what the first one measured."""
    monkeypatch.setattr(calibrate, "launch", alone)
    monkeypatch.setattr("calibration.measure.session.LARGEST", 0.0)
    journal = tmp_path / "mine.samples.jsonl"
    journal.write_bytes(calibrated[0].with_suffix(".samples.jsonl").read_bytes())
    _, samples, _ = read_journal(journal)
    parts = ("gemm", "memory", "collective", "launch")
    request = Request(tmp_path / "mine.yaml", quick=True, ranks=2, parts=parts, largest=2048.0, until=time.monotonic())
    measured = calibrate.measure(request, lambda _: None, -1)
    assert measured is not None
    assert len(measured[1]) == len(samples)


@pytest.mark.parametrize(("left", "cases", "part"), [(1.0, 1.0, 1.0), (0.6, 0.5, 1.0), (0.25, 0.5, 0.5), (-0.1, 0.2, 0.2)])
def test_a_calibration_that_is_late_repeats_its_cases_less(left: float, cases: float, part: float) -> None:
    from calibration.measure.bench import Bench
    from calibration.measure.session import pace

    assert pace(left, cases) == part
    place = Place(0, 1, 0, "cpu", (), lambda _: None)
    counts = [Bench(place, 0.0, each).repetitions(lambda: None, least=40)[0] for each in (1.0, part)]
    assert counts == [40, 40 * part]


def test_samples_can_be_fitted_again(calibrated: tuple[Path, Outcome], tmp_path: Path) -> None:
    path, _ = calibrated
    result = call("calibrate", "--from", str(path.with_suffix(".samples.jsonl")), "--output", str(tmp_path / "again.yaml"))
    assert result.exit_code == 0, result.output
    assert load_profile(tmp_path / "again.yaml").tables == load_profile(path).tables


def test_samples_of_a_cpu_make_no_profile_of_gpus(calibrated: tuple[Path, Outcome], tmp_path: Path) -> None:
    journal = calibrated[0].with_suffix(".samples.jsonl")
    with pytest.raises(UserError, match=r"mine\.samples\.jsonl: samples are of a CPU .* cluster dgx-h100 is another sort"):
        from_logs(Request(tmp_path / "p.yaml", cluster="dgx-h100"), [journal])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "p.txt"], "--output p.txt: a profile is a .yaml file"),
        (["--output", "p.yaml", "--parts", "gem"], "unknown part 'gem'; did you mean 'gemm'"),
        (["--output", "p.yaml", "--largest", "4"], "--largest 4: needs a unit"),
        (["--output", "p.yaml", "--profile", "h20"], "did you mean 'h200'"),
        (["--output", "p.yaml", "--from", "x.log"], "--from: needs --cluster"),
        (["--output", "p.yaml", "--from", "x.log", "--cluster", "dgx-h100"], "x.log: cannot be read"),
        (["--output", "/dev/null/p.yaml"], "cannot be written there"),
        (["--output", "p.yaml", "--ranks", "1", "--parts", "collective"], "--parts collective: needs at least 2 ranks"),
        (["--output", "p.yaml", "--parts", "launch"], "--parts: gemm and memory are needed"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("calibrate", *arguments)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert message in result.output


def test_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = call("calibrate", "--output", str(tmp_path / "p.yaml"))
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "torch is not installed" in result.output


def test_ready_commands_for_a_cluster(tmp_path: Path) -> None:
    result = call("calibrate", "--output", "p.yaml", "--ranks", "8", "--nodes", "2", "--print-launch", "slurm")
    assert "#SBATCH --nodes=2" in result.output
    assert "--nproc-per-node=8" in result.output
