"""Functions of Python answer what the commands of their names answer."""

from __future__ import annotations

import json
import pickle
import shlex
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import shardyard
from reports.api.jobs import reader
from shardyard import UserError

GIVEN = {"model": "gpt2-1.5b", "cluster": "dgx-a100", "nodes": 2}
WORDS = ("--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--nodes", "2")
FEW = {"plan.tp": [1], "plan.pp": [1, 2], "plan.schedule": ["1f1b"], "plan.microbatch": [4], "plan.overlap": [True]}


def asked(*words: str) -> Any:
    """What a command prints as JSON."""
    return json.loads(CliRunner().invoke(shardyard.main, [*words, "--json"]).stdout)


def plain(data: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(data))


@pytest.fixture(scope="module")
def job() -> shardyard.Job:
    return shardyard.read_job(**GIVEN)


def test_advise(job: shardyard.Job) -> None:
    answer, printed = shardyard.advise(job), asked("advise", *WORDS)["candidates"]
    assert [row["name"] for row in answer] == [row["name"] for row in printed]
    assert answer.arguments == printed[0]["arguments"]
    assert answer.best is not None
    assert shardyard.predict(answer.best).step_seconds == printed[0]["step_seconds"]
    frame = answer.frame()
    assert len(frame) == len(answer) == len(printed)
    assert frame["training.usd"][0] == printed[0]["training"]["usd"]


def test_plan(job: shardyard.Job) -> None:
    vary = [word for name, values in FEW.items() for word in ("--vary", f"{name}={json.dumps(values)}")]
    answer, printed = shardyard.plan(job, vary=FEW), asked("plan", *WORDS, *vary, "--workers", "1")
    assert (answer[0]["step"], answer.arguments) == (printed["best"]["step"], printed["arguments"])
    again = shardyard.read_job(None, shlex.split(answer.arguments)[1::2], **GIVEN)
    assert answer.best is not None
    assert shardyard.predict(answer.best).step_seconds == shardyard.predict(again).step_seconds == printed["best"]["step"]
    assert "proven best of " in repr(answer)


def test_a_search_ends_in_time_inside_a_simulation(job: shardyard.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which here would take ten times as long."""
    ended = []

    def long(_: Any) -> None:
        time.sleep(20)
        ended.append("a simulation")

    monkeypatch.setattr("strategies.planner.search.search.evaluate", long)
    answer = shardyard.plan(job, vary=FEW, seconds=2)
    assert (answer.best, len(answer), ended) == (None, 0, [])
    assert "none found yet (the time limit of 2 s" in repr(answer)


def test_whatif(job: shardyard.Job) -> None:
    answer = shardyard.whatif(job, {"nodes": [1, 4], "cluster.node.nic": ["x2"]})
    printed = asked("whatif", *WORDS, "--vary", "nodes=1,4", "--vary", "cluster.node.nic=x2", "--workers", "1")
    assert [row["summary"]["step_seconds"] for row in answer] == [row["summary"]["step_seconds"] for row in printed]
    assert answer.frame()["changes.nodes"].tolist()[1:] == [1, 4]


def test_compare(job: shardyard.Job, tmp_path: Path) -> None:
    """A job's fields and the name of a file are jobs, too."""
    file = tmp_path / "ddp.yaml"
    file.write_text(json.dumps(GIVEN | {"plan": {"microbatch": 4}}))
    answer = shardyard.compare(GIVEN | {"plan": {}}, job, str(file), tokens=1e11)
    assert answer.best is job
    steps = [shardyard.predict(read).step_seconds for read in (shardyard.read_job(**GIVEN, plan={}), job)]
    assert [row["step_seconds"] for row in answer][:2] == steps
    assert answer[2]["name"] == "ddp"
    assert all(row["interval"] for row in answer)
    assert answer[1]["training"]["days"] == pytest.approx(1e11 / answer[1]["tokens_per_second"] / 86400)


def test_run_and_what_else_is_asked_of_a_job(job: shardyard.Job) -> None:
    answer = shardyard.run(job, tokens=1e10, runs=2)
    assert {row["quantity"] for row in answer} >= {"days", "goodput", "usd"}
    assert answer.detail.runs == 2
    assert "--tensor-model-parallel-size" in shardyard.export(job, "megatron").text
    assert shardyard.checkpoint(job) == asked("checkpoint", *WORDS)
    assert plain(shardyard.memory(job).to_dict()) == asked("simulate", *WORDS, "--by-layer")["by_layer"]
    assert "sends along an axis" in shardyard.explain("volume")


def test_traces_and_topologies(job: shardyard.Job, tmp_path: Path) -> None:
    """The same bytes as the command's, and the same links."""
    for form, names in (("perfetto", ["trace.json.gz"]), ("kineto", ["rank0.json.gz"])):
        paths = shardyard.trace(job, tmp_path / form, form)
        assert [path.name for path in paths] == names
        printed = CliRunner().invoke(shardyard.main, ["trace", *WORDS, "--format", form, "--output", str(tmp_path / "printed")])
        assert printed.exit_code == 0
        assert paths[0].read_bytes() == (tmp_path / "printed" / names[0]).read_bytes()
    with pytest.raises(UserError, match="did you mean 'kineto'"):
        shardyard.trace(job, tmp_path, "kinetto")
    changed = asked("topology", "dgx-a100", "--nodes", "2", "--set", "node.nic=50 GB/s")
    assert plain(shardyard.topology("dgx-a100", 2, {"node.nic": "50 GB/s"})) == changed
    assert changed != asked("topology", "dgx-a100", "--nodes", "2")


def test_a_summary_has_its_interval_where_it_is_asked_for(job: shardyard.Job) -> None:
    summary = shardyard.predict(job, interval=True)
    assert shardyard.predict(job).interval is None
    assert summary.interval is not None
    assert summary.interval.low < summary.step_seconds < summary.interval.high
    assert plain(summary.to_dict()["interval"]) == asked("simulate", *WORDS)["interval"]


def test_objects_say_themselves_in_a_line_and_as_cards(job: shardyard.Job) -> None:
    summary, timeline = shardyard.predict(job), shardyard.simulate(job)
    assert repr(job) == "<Job gpt2-1.5b: gpt2-1.5b on 2 × dgx-a100, data_parallel=zero3, microbatch=4, global_batch=64>"
    assert repr(summary).startswith(f"<Summary {summary.step_seconds:.4g} s per step on 16 GPUs, MFU 5")
    assert repr(timeline).startswith(f"<Timeline of {len(timeline.start)} ops on 1 lanes, ")
    result = shardyard.compare(job)
    for card in (job._repr_html_(), summary._repr_html_(), result._repr_html_()):
        assert card.startswith("<div")
        assert card.count("<tr>") > 1
    bad = shardyard.read_job(
        **GIVEN | {"model": {"name": "<b>", "hidden": 64, "layers": 1, "heads": 1, "vocabulary": 9, "context": 8}}, plan={}
    )
    assert "<b><b>" not in bad._repr_html_()
    assert "&lt;b&gt;" in bad._repr_html_()


def test_figures(job: shardyard.Job, tmp_path: Path) -> None:
    timeline = shardyard.simulate(job)
    assert shardyard.figures.gantt(timeline).axes
    assert shardyard.figures.gantt(timeline, tmp_path / "gantt.svg").stat().st_size > 1000
    assert {"gantt", "memory", "pareto"} <= set(dir(shardyard.figures))
    with pytest.raises(AttributeError, match="no figure 'grantt': there are "):
        _ = shardyard.figures.grantt


def test_a_job_is_read_again_with_other_fields(job: shardyard.Job) -> None:
    read = reader(job)
    other = read({"nodes": 4, "cluster.node.nic": "10 GB/s"})
    assert (other.cluster.nodes, other.cluster.node.nic, other.plan.data_parallel) == (4, 1e10, "zero3")
    assert read({"plan.microbatch": 2}).plan.microbatch == 2
    assert read({}) is job
    elsewhere = pickle.loads(pickle.dumps(job))
    assert (elsewhere, elsewhere.source) == (job, None)
    assert reader(elsewhere)({"nodes": 4, "plan.microbatch": 2}).plan.microbatch == 2
    with pytest.raises(UserError, match="a job that read_job did not read has no other cluster"):
        reader(elsewhere)({"cluster.node.nic": "10 GB/s"})


def test_parts_of_training(job: shardyard.Job) -> None:
    words = ("collective", "all_reduce", "--cluster", "dgx-a100", "--nodes", "2", "--sizes", "1MiB:4MiB")
    sweep = shardyard.collective("all_reduce", "dgx-a100", nodes=2, sizes="1MiB:4MiB")
    assert list(sweep) == asked(*words)["rows"]
    assert (
        shardyard.schedule("gpipe", pp=2, microbatches=2)
        == asked("schedule", "gpipe", "--pp", "2", "--microbatches", "2")["ranks"]
    )
    assert [row["bubble"] for row in shardyard.teach("gpipe", "zb-v")] == [
        each["bubble"] for each in asked("teach", "gpipe", "zb-v")
    ]
    assert len(shardyard.ranks(2, 4, 2)) == 4
    assert plain(shardyard.loop(job)) == asked("loop", *WORDS)
    ddp = shardyard.read_job(**GIVEN, plan={})
    assert plain(shardyard.server(ddp, steps=3).to_dict()) == asked("server", *WORDS, "--steps", "3")
    trace = str(Path(__file__).parents[2] / "examples/traces/uneven-stages.parquet")
    assert plain(shardyard.straggler(trace)) == asked("straggler", trace)


OTHERWISE = {"calibrate", "execute", "validate", "explore", "mcp", "list", "report", "topology", "trace"}
"""Commands that measure machines, serve or write, or only print."""


def test_every_other_command_is_a_function() -> None:
    names = set(shardyard.main.list_commands(None)) - OTHERWISE
    assert names <= set(shardyard.__all__)


def test_version_and_types() -> None:
    from importlib.metadata import version

    assert shardyard.__version__ == version("shardyard")
    root = Path(__file__).parents[2]
    assert all((root / room / "py.typed").exists() for room in ("topologies", "sim", "strategies", "calibration", "reports"))


def test_commands_have_functions_of_their_names() -> None:
    """But for those that serve until they are stopped, and `list`, which is a function of Python."""
    context = click.Context(shardyard.main)
    assert {name for name in shardyard.main.list_commands(context) if not hasattr(shardyard, name)} == {"explore", "list", "mcp"}


def test_report(job: shardyard.Job, tmp_path: Path) -> None:
    paths = shardyard.report(job, tmp_path / "page", without=("runs", "scaling", "clusters", "sensitivity", "published"))
    assert paths[0].name == "report.html"
    assert all(path.exists() for path in paths)
    with pytest.raises(UserError, match="unknown part 'scalin'; did you mean 'scaling'"):
        shardyard.report(job, tmp_path, without=("scalin",))


def test_validate_published() -> None:
    answer = shardyard.validate(published=True, sources=("megatron-ci-2025",))
    errors = [row["error"] for row in answer if row["error"] is not None]
    assert len(errors) == 5
    assert max(map(abs, errors)) < 0.2
    assert answer.frame()["row"].is_unique


def test_calibrate_reads_logs(tmp_path: Path) -> None:
    log = Path(__file__).parents[1] / "data/nccl/all_reduce_2x8.log"
    answer = shardyard.calibrate(tmp_path / "mine.yaml", cluster="dgx-h100", logs=[log])
    assert answer is not None
    assert (tmp_path / "mine.yaml") in answer.files
