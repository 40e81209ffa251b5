"""What-ifs move as physics and arithmetic say."""

from __future__ import annotations

import json
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import shardyard
from shardyard import read_job
from strategies.job import Job
from strategies.planner.search.space import parse_axis
from strategies.planner.search.workers.executors import Engine
from strategies.planner.sensitivity import Play
from strategies.planner.whatif import Case, _batch, ask, batched, combinations, crossovers, scaling, sizes
from topologies.reading import UserError

MODEL = "gpt2-1.5b"


def read(changes: dict[str, Any]) -> Any:
    return read_job(
        overrides=changes, model=MODEL, cluster="dgx-a100", nodes=2, plan={"global_batch": 64, "data_parallel": "zero1"}
    )


def asked(cases: list[tuple[dict[str, Any], str, dict[str, Any]]], price: float | None = None) -> list[Case]:
    with ThreadPoolExecutor(1) as threads:
        return ask(read, cases, Engine(threads), 1e9, price)


def test_a_slower_network_costs_time_and_another_price_only_money() -> None:
    slow, base, cheap = asked([({"cluster.node.nic": "1 GB/s"}, "", {}), ({}, "", {}), ({"price": 1.0}, "", {})])
    assert slow.summary.step_seconds > base.summary.step_seconds == cheap.summary.step_seconds
    assert cheap.training.usd == pytest.approx(cheap.training.gpu_hours)
    assert slow.training.joules / base.training.joules == pytest.approx(slow.summary.step_seconds / base.summary.step_seconds)


def test_twice_as_fast_on_the_page_is_what_a_what_if_says() -> None:
    """Both choose collectives anew: with a network of 4 GB/s others are cheapest than with one of 2 GB/s."""
    (base,) = asked([({"cluster.node.nic": "4 GB/s", "plan.bucket": "1 MB"}, "", {})])
    play = Play.of(read({"cluster.node.nic": "2 GB/s", "plan.bucket": "1 MB"}))
    faster = dict(play.faster(2.0))
    assert faster["bandwidth between nodes"] == pytest.approx(base.summary.ideal_seconds, rel=1e-9)


def test_weak_scaling_grows_the_batch_and_strong_scaling_keeps_it() -> None:
    axis = parse_axis("nodes=1,2,4")
    assert [changes["plan.global_batch"] for changes in scaling(read, axis, weak=True)] == [32, 64, 128]
    assert [changes["plan.global_batch"] for changes in scaling(read, axis, weak=False)] == [64, 64, 64]
    odd = {"plan.pp": 16, "plan.global_batch": 65}
    with pytest.raises(UserError, match="global_batch=65 of 2 nodes is no whole number at nodes=1"):
        scaling(lambda changes: read(odd | changes), axis, weak=True)


def test_the_winner_changes_where_the_network_stops_to_matter() -> None:
    """Two stages reduce half the gradients each but wait for each other: they win on a slow network only."""
    plans: dict[str, dict[str, Any]] = {"one stage": {}, "two stages": {"plan.pp": 2}}
    inputs = combinations([parse_axis("cluster.node.nic=500 MB/s,25 GB/s,50 GB/s")])
    cases = asked([(case, name, plan) for case in inputs for name, plan in plans.items()])
    changes = crossovers(cases, lambda case: case.training.gpu_hours)
    assert [(before.plan, after.plan) for before, after in changes] == [("two stages", "one stage")]
    assert changes[0][0].changes == {"cluster.node.nic": "500 MB/s"}


def sized(nodes: int, smaller: int = 3, larger: int = 2, **plan: Any) -> list[Any]:
    """Nodes of 8 GPUs, with so many NICs; below a node the GPUs and NICs that are left of it."""
    job = read_job(model="gpt-1.7b", cluster="dgx-a100", nodes=nodes, plan=plan)
    axis = sizes(job, smaller, larger)
    assert axis.name == "nodes"
    return [choice["nodes"] if len(choice) == 1 else tuple(choice.values()) for choice in axis.choices]


def test_sizes_of_a_cluster_are_halved_as_long_as_a_copy_of_the_model_is_left() -> None:
    """tp 4 · pp 1: a copy takes 4 GPUs."""
    assert sized(4, tp=4) == [(1, 4, 4), 1, 2, 4, 8, 16]
    assert sized(4, smaller=9, tp=4) == [(1, 4, 4), 1, 2, 4, 8, 16]
    assert sized(4, smaller=9) == [(1, 1, 1), (1, 2, 2), (1, 4, 4), 1, 2, 4, 8, 16]
    assert sized(4, smaller=9, tp=8, pp=2) == [2, 4, 8, 16]
    assert sized(4, smaller=1, larger=0) == [2, 4]
    assert sized(6, smaller=9, larger=1) == [3, 6, 12]  # three nodes have no half
    assert sized(3) == [3, 6, 12]


def test_smaller_nodes_keep_their_nics_as_far_as_they_have_gpus_for_them() -> None:
    job = read_job(model="gpt-1.7b", cluster={"based_on": "dgx-a100", "node": {"gpus": 8, "nics": 2}}, nodes=1, plan={})
    choices = sizes(job, 3, 0).choices
    assert [tuple(choice.values()) for choice in choices] == [(1, 1, 1), (1, 2, 2), (1, 4, 2), (1,)]
    assert choices[0] == {"nodes": 1, "cluster.node.gpus": 1, "cluster.node.nics": 1}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(shardyard.main, list(arguments))


JOB = ("--model", MODEL, "--cluster", "dgx-a100", "--plan", "{auto: false, global_batch: 64}", "--workers", "1")


def test_the_command_tells_a_table_and_data(tmp_path: Path) -> None:
    table = call("whatif", *JOB, "--vary", "plan.microbatch=1,2", "--plot", str(tmp_path / "curve.svg"))
    assert table.exit_code == 0
    assert "microbatch=2" in table.output
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    rows = json.loads(call("whatif", *JOB, "--vary", "plan.microbatch=1,3", "--json").output)
    assert [bool(row["refused"]) for row in rows] == [False, False, True]


def test_a_value_that_is_refused_everywhere_is_told_with_the_reason() -> None:
    wrong = call("whatif", *JOB, "--vary", "plan.microbatch=1,3")
    assert wrong.exit_code == 2
    assert "refused, plan.microbatch=3: plan: global_batch=64 is not a multiple of dp·microbatch = 8·3" in wrong.output
    axes = ("--vary", "plan.pp=1,5", "--vary", "plan.microbatch=1,2")
    stages = call("whatif", *JOB, *axes)
    assert stages.exit_code == 2
    assert "refused, plan.pp=5, plan.microbatch=1; plan.pp=5, plan.microbatch=2: " in stages.output
    some = call("whatif", *JOB, "--vary", "plan.pp=1,8", "--vary", "plan.schedule=1f1b,pipedream")
    assert some.exit_code == 0


LINES = ("--model", MODEL, "--cluster", "dgx-a100", "--nodes", "4", "--set", "plan.data_parallel=zero1", "--workers", "1")


def rows(*words: str) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = json.loads(call("whatif", *LINES, *words, "--json").stdout)
    return answer


def test_a_batch_is_kept_or_grows_with_the_gpus_in_whole_microbatches() -> None:
    """5 nodes of 8 GPUs, microbatches of 2: a multiple of 80 sequences."""
    vary = ("--set", "plan.microbatch=2", "--set", "plan.global_batch=192", "--vary", "nodes=2,x1.2")
    told, kept = (rows(*vary, *more) for more in ((), ("--batch", "keep")))
    assert [row["global_batch"] for row in told] == [row["global_batch"] for row in kept] == [192, 192, None]
    grown = rows(*vary, "--batch", "scale")
    assert [(row["changes"].get("nodes"), row["global_batch"]) for row in grown] == [(None, 192), (2, 96), (5, 240)]
    text = call("whatif", *LINES, *vary).output
    assert "nodes=x1.2: 4 times 1.2 is 4.8, rounded to 5" in text
    assert "--batch scale takes a batch that grows with the GPUs" in text


def test_a_batch_that_grows_with_the_gpus_is_a_microbatch_of_each_replica_at_least() -> None:
    """64 sequences on 16 GPUs are 32 on 8, and 96 on 24: whole microbatches of 8 or 24 replicas."""
    inputs: list[dict[str, Any]] = [{"nodes": 1}, {"nodes": 1, "plan.microbatch": 16}, {"nodes": 3}, {"nodes": 3, "plan.tp": 8}]
    grown = batched(read, inputs, "scale")
    assert [each["plan.global_batch"] for each in grown] == [32, 16 * 8, 96, 96]


def test_a_batch_that_varies_takes_the_place_of_accumulation() -> None:
    answer = rows("--set", "plan.accumulation=2", "--vary", "plan.global_batch=64,128")
    assert [row["global_batch"] for row in answer] == [64, 64, 128]
    assert "plan.accumulation=null" in answer[2]["arguments"]
    back = rows("--set", "plan.global_batch=64", "--vary", "plan.accumulation=1,4")
    assert [row["global_batch"] for row in back] == [64, 32, 128]


def test_why_a_change_does_nothing() -> None:
    """DGX A100: 25 GB/s of NICs, PCIe of 31.5 GB/s; no NVLink is too slow for a model of one rank's size on one node's NICs."""
    text = call(
        "whatif",
        *LINES,
        "--vary",
        "cluster.node.nic=50 GB/s, 200 Gb/s",
        "--vary",
        "cluster.node.cpu.memory=4 TB",
        "--one-at-a-time",
    )
    assert "cluster.node.nic=200 Gb/s: what the job has already" in text.output
    assert "cluster.node.nic=50 GB/s: node.nic: 50 GB/s of NICs are more than " in text.output
    assert "cluster.node.cpu.memory=4 TB: the step is the same to the bit: nothing in it waits for this" in text.output


def test_a_plan_is_found_anew_at_every_point() -> None:
    vary = ("--vary", "nodes=1,2", "--replan")
    answer, text = rows(*vary), call("whatif", *LINES, *vary).output
    own, again = answer[0]["summary"], answer[1]["summary"]
    assert again["step_seconds"] < own["step_seconds"]  # ZeRO-1 of microbatch 1 is not the best
    for row in answer[1:]:
        words = shlex.split(row["arguments"])
        simulated = json.loads(call("simulate", *LINES[:-2], *words, "--json").stdout)
        assert simulated["step_seconds"] == row["summary"]["step_seconds"]
        assert row["arguments"] in text
    both = call("whatif", *LINES, *vary, "--also", "plan.tp=2")
    assert both.exit_code == 2
    assert "--replan, --also: only one of them says the plans" in both.output


def test_a_plan_that_is_found_anew_keeps_the_fields_that_are_varied_or_said() -> None:
    words = ["whatif", "--model", "llama-3.1-8b", "--cluster", "dgx-a100", "--workers", "1", "--replan", "--json"]
    said = ["--plan", "auto", "--set", "plan.microbatch=2"]
    vary = ["--vary", "plan.tp=1,4", "--vary", "plan.sequence=512"]
    answer = json.loads(CliRunner().invoke(shardyard.main, [*words, *said, *vary]).stdout)
    rows = [row for row in answer if "plan.tp" in row["changes"]]
    assert ["plan.tp=4" in row["arguments"] for row in rows] == [False, True]
    assert not any("plan.microbatch" in row["arguments"] for row in rows)  # as it was said
    assert rows[0]["summary"]["volume"].get("tp") is None
    assert rows[1]["summary"]["volume"]["tp"]["bytes"] > 0


def test_a_faster_network_has_no_worse_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that stops early finds different plans, the worse one for the faster network: the other point's is tried there."""
    searched = {50e9: {"tp": 8, "data_parallel": "zero1"}, 25e9: {"data_parallel": "zero3"}}

    def found(job: Job, kept: frozenset[str] = frozenset()) -> Job:
        return replace(job, plan=job.plan.model_copy(update=searched[job.cluster.node.nic]))

    monkeypatch.setattr("strategies.planner.replanned.with_auto_plan", found)
    words = ["whatif", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--nodes", "2", "--plan", "{sequence: 1024}"]
    words += ["--workers", "1", "--replan", "--json", "--vary", "cluster.node.nic=25 GB/s,50 GB/s"]
    _, _, slow, fast = json.loads(CliRunner().invoke(shardyard.main, words).stdout)
    assert "plan.data_parallel=zero3" in fast["arguments"]
    assert fast["summary"]["step_seconds"] <= slow["summary"]["step_seconds"]


def test_how_far_it_is_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.terminal.throttled.__defaults__", (-1.0,))
    words = ["whatif", "--model", MODEL, "--cluster", "dgx-a100", "--plan", "{sequence: 512}", "--workers", "1"]
    result = CliRunner().invoke(shardyard.main, [*words, "--vary", "plan.sequence=256,512", "--replan"])
    assert result.stderr.splitlines()[:3] == ["1 of 1 simulated", "1 of 2 plans found", "2 of 2 plans found"]


def test_a_job_whose_own_plan_is_found_again_is_one_row() -> None:
    words = ["whatif", "--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--workers", "1"]
    output = CliRunner().invoke(shardyard.main, [*words, "--vary", "plan.global_batch=32,64", "--replan"]).output
    rows = [line for line in output.splitlines() if line.startswith("the job  ")]
    assert len(rows) == 1
    assert "the job's plan" not in output
    assert "change is of the days, as batches differ" in output


def test_prices_that_differ_are_told_by_what_they_are_of() -> None:
    words = ["whatif", "--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--set", "plan.tp=1", "--workers", "1", "--vary"]
    two = CliRunner().invoke(shardyard.main, [*words, "cluster=dgx-h100"]).output
    assert "\nthe job: $1.95 per GPU-hour (" in two
    assert "\ncluster=dgx-h100: $3.90 per GPU-hour (" in two
    assert "\n$1.95 per GPU-hour (" in CliRunner().invoke(shardyard.main, [*words, "plan.microbatch=2"]).output


def test_what_is_not_set_has_no_multiple() -> None:
    words = [
        "whatif",
        "--model",
        "gpt2-1.5b",
        "--cluster",
        "dgx-a100",
        "--set",
        "plan.tp=1",
        "--vary",
        "plan.layers_per_stage=x2",
    ]
    answer = CliRunner().invoke(shardyard.main, words)
    assert answer.exit_code == 2
    assert "plan.layers_per_stage is not set here, of which there is no multiple" in answer.output


def test_a_curve_has_one_unit(tmp_path: Path) -> None:
    plot = ("--plot", str(tmp_path / "curve.svg"))
    assert call("whatif", *JOB, "--vary", "cluster.node.nic=25 GB/s,50 GB/s", *plot).exit_code == 0
    assert "cluster.node.nic (GB/s)" in (tmp_path / "curve.svg").read_text()
    assert call("whatif", *JOB, "--vary", "cluster.node.nic=x2", *plot).exit_code == 0
    ticks = re.findall(r">([\d.]+)</text>", (tmp_path / "curve.svg").read_text())
    assert {"25", "50"} <= set(ticks)  # what the job has stands beside what was asked
    mixed = call("whatif", *JOB, "--vary", "cluster.node.nic=25 GB/s,400 Gb/s", *plot)
    assert "--plot: cluster.node.nic is given in GB/s and in Gb/s: give all in one" in mixed.output
    assert mixed.exit_code == 2


def test_a_tornado_has_the_largest_effect_first() -> None:
    lines = call("whatif", *JOB, "--vary", "price=1,1.9", "--vary", "plan.recompute=full", "--one-at-a-time").output.splitlines()
    assert next(line for line in lines if "%" in line).startswith("price=1 ")


@pytest.mark.parametrize("options", [(), ("--vary", "nodes=1"), ("--vary", "nodes=1,2", "--weak", "--strong"), ("--vary", "x=1")])
def test_mistakes_are_one_line(options: tuple[str, ...]) -> None:
    result = call("whatif", *JOB, *options, *(["--weak"] if options == ("--vary", "nodes=1") else []))
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1


def test_plan_proves_its_answer_and_its_arguments_simulate_to_it() -> None:
    space = ("--vary", "plan.tp=1,2", "--vary", "plan.pp=1", "--vary", "plan.cp=1", "--vary", "plan.schedule=1f1b")
    data = json.loads(call("plan", *JOB, *space, "--json").stdout)
    assert data["proven"] >= 1
    changes = data["best"]["changes"].items()
    again = [text for name, value in changes if value is not None for text in ("--set", f"{name}={json.dumps(value)}")]
    answer = json.loads(call("simulate", *JOB[:-2], *again, "--json").output)
    assert answer["step_seconds"] == data["best"]["step"]
    assert answer["interval"] == data["interval"]
    assert ", microbatch 2, " in call("plan", *JOB, *space, "--vary", "plan.microbatch=2").output.splitlines()[0]
    assert call("plan", *JOB, *space, "--max-memory", "1 GB").exit_code == 2


WRONG = (
    "--objective fun",
    "--objective cost",
    "--max-memory 7",
    "--results x.txt",
    "--vary plan.speed=1",
    "--space nowhere.yaml",
)


@pytest.mark.parametrize("text", WRONG)
def test_mistakes_of_plan_are_one_line(text: str) -> None:
    options = text.split()
    result = call("plan", *JOB, *options)
    assert result.exit_code == 2
    assert result.output.strip().splitlines()[-1].startswith("error: ")


def over_days(cases: list[tuple[dict[str, Any], str, dict[str, Any]]], **options: Any) -> list[Case]:
    with ThreadPoolExecutor(1) as threads:
        return ask(read, cases, Engine(threads), 1e10, None, **{"seed": 0} | options)


def test_runs_of_alternatives_meet_the_same_failures() -> None:
    """Half the failures deliver sooner, another price costs only money, and without failures days are those of the steps."""
    failing, rare, cheap, never = over_days(
        [
            ({"run.failures.mtbf_factor": 0.002}, "", {}),
            ({"run.failures.mtbf_factor": 0.004}, "", {}),
            ({"run.failures.mtbf_factor": 0.004, "price": 1.0}, "", {}),
            ({"run.failures": "none", "run.initialization": "0 s"}, "", {}),
        ]
    )
    (alone,) = asked([({}, "", {})])
    assert failing.run.failures.mean > rare.run.failures.mean > 2
    assert failing.training.seconds > rare.training.seconds > 10 * alone.training.seconds * 1.0001
    assert (cheap.run.days, cheap.run.outcomes) == (rare.run.days, rare.run.outcomes)
    assert cheap.training.usd == pytest.approx(cheap.training.gpu_hours)
    assert never.training.seconds == pytest.approx(10 * alone.training.seconds, rel=1e-12)
    assert never.run.goodput.mean == 1.0
    assert over_days([({"run.failures.mtbf_factor": 0.004}, "", {})])[0].run == rare.run


def test_a_job_that_cannot_be_run_over_days_is_refused_alone() -> None:
    fits, none = over_days([({}, "", {}), ({"run.checkpoint.policy": "multi_tier", "cluster.node.cpu": None}, "", {})])
    assert fits.run is not None
    assert (none.summary, none.run) == (None, None)
    assert "needs node.cpu.disk" in none.refused


def test_what_ifs_over_days_on_one_screen() -> None:
    job = str(Path(__file__).parents[3] / "examples" / "run-llama-3.1-405b.yaml")
    words = ["whatif", job, "--runs", "--tokens", "1e11", "--workers", "1", "--vary", "run.spares=0,2"]
    table = CliRunner().invoke(shardyard.main, words)
    assert table.exit_code == 0, table.output
    assert "goodput" in table.output
    assert "failures and checkpoints included: 20 runs each, with the same failures" in table.output
    tornado = CliRunner().invoke(shardyard.main, [*words, "--one-at-a-time"])
    assert "failures and checkpoints included (20 runs each)" in tornado.output
    data = json.loads(CliRunner().invoke(shardyard.main, [*words, "--json"]).output)
    assert [case["run"]["runs"] for case in data] == [20, 20, 20]
    assert data[1]["run"]["goodput"]["mean"] > data[2]["run"]["goodput"]["mean"]  # idle spares count
    assert data[1]["training"]["days"] == data[1]["run"]["days"]["mean"]
    refused = CliRunner().invoke(shardyard.main, ["whatif", job, "--seed", "3", "--vary", "run.spares=0,2"])
    assert (refused.exit_code, "--seed is of --runs" in refused.output) == (2, True)


def test_jobs_are_compared_over_days() -> None:
    job = str(Path(__file__).parents[3] / "examples" / "run-llama-3.1-405b.yaml")
    words = ["compare", job, "--also", "run.spares=0", "--tokens", "1e11"]
    alone, runs = (CliRunner().invoke(shardyard.main, [*words, *more]).output for more in ((), ("--runs",)))
    assert "failures included" in runs
    assert "goodput" not in alone
    days = [[line.split()[-1] for line in text.splitlines() if line.split()[:2] == ["days", "of"]] for text in (alone, runs)]
    assert float(days[0][0]) < float(days[1][0])
    data = json.loads(CliRunner().invoke(shardyard.main, [*words, "--runs", "--json"]).output)
    assert data[1]["run"]["goodput"]["mean"] > data[0]["run"]["goodput"]["mean"]


def test_a_batch_that_scales_is_a_multiple_of_what_replicas_take_at_once() -> None:
    """64 sequences on 16 GPUs. On 24 GPUs 96; of 12 replicas of 2 GPUs with microbatches of 5 it is 2 · 60; never less than one
    of each.
    """

    def scaled(how: str = "scale", **changes: Any) -> int:
        return _batch(read, {name.replace("__", "."): value for name, value in changes.items()}, 64, 16, how)

    assert scaled(nodes=3) == 96
    assert scaled(nodes=3, plan__tp=2, plan__microbatch=5) == 120
    assert scaled(nodes=3, plan__pp=4, plan__microbatch=5) == 90
    assert scaled(nodes=1, plan__microbatch=16) == 128
    assert scaled("keep", nodes=3) == 64
    assert scaled(nodes=3, plan__microbatch=-1) == 64  # refused: its simulation says why


def test_what_else_says_a_batch_is_set_aside() -> None:
    """Of a job of 16 ranks along dp, whose batch is said by microbatches of each; what a change says itself stays."""

    def of(plan: dict[str, Any]) -> Any:
        return lambda changes: read_job(overrides=changes, model=MODEL, cluster="dgx-a100", nodes=2, plan=plan)

    accumulated, several = {"plan.accumulation": 2}, {"plan.accumulation": 2, "plan.dp": 8, "plan.tp": 2}
    inputs = [{"nodes": 4}, {"plan.dp": 8, "plan.tp": 2}, accumulated, several, {"plan.global_batch": 32}]
    assert batched(of({"dp": 16, "accumulation": 4}), inputs, None) == [
        {"nodes": 4, "plan.dp": None},
        {"plan.dp": 8, "plan.tp": 2},
        accumulated | {"plan.global_batch": None, "plan.dp": None},
        several | {"plan.global_batch": None},
        {"plan.global_batch": 32, "plan.accumulation": None, "plan.dp": None},
    ]
    assert batched(of({"global_batch": 64}), [{"nodes": 4}], None) == [{"nodes": 4}]
