"""What a training loop does beside its steps, each worked out by hand or asked from another command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import shardyard
from calibration.bench import bench
from reports.tables.loop import cut_points
from shardyard import UserError, predict, read_job
from sim.runs import ledger
from sim.runs.replications import replicate
from strategies.resilience.run_spec import Prepared, prepare
from strategies.resilience.runs import alternatives
from strategies.resilience.settings import read_run

ROOT = Path(__file__).parents[3]
JOB = {
    "model": "gpt2-1.5b",
    "cluster": "dgx-a100",
    "nodes": 2,
    "plan": {"data_parallel": "ddp", "recompute": "full", "microbatch": 4, "global_batch": 128},
}


def prepared(run: dict[str, Any], changes: dict[str, Any] | None = None, **how: float) -> Prepared:
    job = read_job(JOB, changes or {})
    given = {"failures": "none", "initialization": "0 s", **run}
    return prepare(job, read_run(given, "run"), **(how or {"days": 1.0}))


def test_a_copy_of_a_microbatch_takes_its_bytes_at_the_slots_rate() -> None:
    """4 sequences of 1,024 tokens and labels of 8 B at 32 GB/s, and 1 us; two GPUs on a PCIe switch halve the rate of each."""
    node = read_job(JOB).cluster.node
    alone = node.latency.pcie + 4 * 1024 * 16 * (node.gpus_per_switch or 1) / node.pcie
    loop = prepared({"input": {"sample": "0 s", "pinned": False}}).loop.input
    assert loop.copying == pytest.approx(2 * alone)  # 8 sequences of each replica are two microbatches
    assert loop.exposed == pytest.approx(2 * alone)
    assert prepared({"input": {"sample": "0 s"}}).loop.input.exposed == 0.0
    large = prepared({"input": {"sample": "0 s", "copy_bytes": "100 GB"}}).loop.input  # as of video: more than a step hides
    step = predict(read_job(JOB)).step_seconds
    assert large.exposed == pytest.approx(large.copying - step)
    staged = prepared({"input": {"sample": "0 s", "pinned": False}}, {"plan.pp": 2, "plan.microbatch": 4}).loop.input
    tokens = node.latency.pcie + 4 * 1024 * 8 * (node.gpus_per_switch or 1) / node.pcie
    assert staged.copying == pytest.approx(4 * tokens)  # dp is 8: 16 sequences; labels go to the last stage at the same time


def test_a_gpu_without_pcie_takes_no_time_to_copy_to() -> None:
    """Of processes on CPUs."""
    model = {"name": "small", "hidden": 64, "layers": 2, "heads": 2, "vocabulary": 100, "context": 16}
    job = read_job(model=model, cluster="cpu-gloo", plan={"auto": False, "precision": "fp32"})
    run = {"failures": "none", "initialization": "0 s", "input": {"sample": "0 s", "pinned": False}}
    loop = prepare(job, read_run(run, "run"), days=1.0).loop.input
    assert (loop.copying, loop.exposed) == (0.0, 0.0)


def test_sums_and_broadcasts_have_the_prices_of_collectives() -> None:
    """A buffer of 48 MB from one of 16 ranks, and 4 bytes from all, as `shardyard collective` has them."""

    def price(operation: str, size: str) -> float:
        data, _ = bench(operation, cluster="dgx-a100", nodes=2, sizes=f"{size}:{size}")
        return data.prices[0][0].seconds

    loop = prepared(
        {"buffers": "48 MB", "loss": {"wait": False}, "metrics": {"steps": 10, "values": 12_000_000, "wait": False}}
    ).loop
    assert loop.buffers == pytest.approx(price("broadcast", "48 MB"), rel=1e-6)
    assert loop.loss == pytest.approx(price("all_reduce", "4 B"), rel=1e-6)
    assert loop.metrics == pytest.approx(price("all_reduce", "48 MB"), rel=1e-6)


def test_reading_a_loss_costs_the_launch_of_the_next_kernel() -> None:
    from strategies.predict import profile_of

    waits, logs = (prepared({"loss": {"wait": wait}}).loop.loss for wait in (True, False))
    assert waits - logs == pytest.approx(profile_of(read_job(JOB)).launching(True), rel=1e-9)
    alone = prepared(
        {"loss": {"wait": False}}, {"nodes": 1, "cluster.node.gpus": 1, "cluster.node.nics": 1, "plan.microbatch": 1}
    )
    assert alone.loop.loss == 0.0


def test_an_evaluation_of_a_batch_is_as_long_as_its_forward_passes() -> None:
    """One GPU, nothing overlapped: the forward part of the step's breakdown."""
    one = {"nodes": 1, "cluster.node.gpus": 1, "cluster.node.nics": 1}
    job = read_job(JOB, one)
    forward, rest = predict(job).breakdown["forward"], predict(job).breakdown["launch"]
    loop = prepared({"evaluation_sequences": 128, "evaluation_steps": 10, "metrics": {"wait": False, "steps": 10}}, one).loop
    assert forward <= loop.evaluation <= 1.005 * (forward + rest)  # GPUs that are not quite alike lengthen a step a little
    twice = prepared({"evaluation_sequences": 256, "evaluation_steps": 10, "metrics": {"wait": False, "steps": 10}}, one).loop
    assert twice.evaluation == pytest.approx(2 * loop.evaluation)


@pytest.mark.parametrize("variability", [0.02, 0.001])
def test_what_a_loop_spends_is_in_the_ledger(variability: float) -> None:
    """1,000 steps: 1,000 losses, 99 sums of metrics and 9 evaluations (nothing is done after the last step). With the second
    variability a step's tokens are less than a whole number, as the product of their rate and its seconds.
    """
    run = {
        "loss": {"steps": 1},
        "metrics": {"steps": 10, "values": 8},
        "evaluation": "30 s",
        "evaluation_steps": 100,
        "input": {"sample": "5 s"},
    }
    ready = prepared(run, {"variability": variability}, tokens=1000 * 128 * 1024)
    (outcome,) = replicate(ready.spec, 0, 1)
    spent = {cause: seconds / ready.spec.gpus for cause, seconds in outcome.gpu_seconds.items()}
    assert spent[ledger.EVALUATION] == pytest.approx(9 * 30.0)
    assert spent[ledger.REDUCTION] == pytest.approx(999 * ready.loop.loss + 99 * ready.loop.metrics)
    assert spent[ledger.LOADING] == pytest.approx(999 * ready.loop.input.exposed + ready.loop.input.first)
    assert ready.loop.input.exposed == pytest.approx(8 * 5.0 - ready.summary.step_seconds)
    total = sum(spent.values())
    exposed = sum(point.exposed for point in cut_points(ready))
    assert total == pytest.approx(1000 * exposed, rel=2e-3)


def test_the_command_shows_seven_cut_points() -> None:
    words = ("loop", str(ROOT / "examples" / "training-loop.yaml"))
    result = CliRunner().invoke(shardyard.main, words)
    assert result.exit_code == 0, result.output
    data = json.loads(CliRunner().invoke(shardyard.main, (*words, "--json")).output)
    names = [point["name"] for point in data["cut_points"]]
    assert names == ["input pipeline", "model", "training loop", "aggregation", "losses", "metrics", "checkpoint"]
    assert all(point["name"] in result.output for point in data["cut_points"])
    assert sum(point["exposed"] for point in data["cut_points"]) > data["step_seconds"]
    empty = CliRunner().invoke(shardyard.main, ("loop", "--model", "gpt2-1.5b", "--cluster", "dgx-a100"))
    assert empty.output.count("not described") == 3


@pytest.mark.parametrize(
    ("run", "changes", "message"),
    [
        ({"buffers": "1 MB"}, {"plan.data_parallel": "zero1"}, "run.buffers: are broadcast by DDP; data_parallel=zero1 does not"),
        ({"evaluation": "1 min", "evaluation_sequences": 3, "evaluation_steps": 2}, {}, "only one of them says how long"),
        ({"evaluation_sequences": 3}, {}, "evaluation_steps belong together"),
        ({"loss": {"steps": 0}}, {}, "loss.steps=0"),
        ({"metrics": {"value": 3}}, {}, "did you mean 'values'"),
    ],
)
def test_mistakes_are_one_line(run: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepared(run, changes)


def test_advice_names_input_where_input_is_waited_for() -> None:
    """Workers that take 40 s for a step's sequences: twice as many are the first thing to change."""
    ready = prepared({"input": {"sample": "5 s"}, "failures": "rsc-1"})
    assert alternatives(ready, 1.0, None)[0].change == "twice as many input workers"
