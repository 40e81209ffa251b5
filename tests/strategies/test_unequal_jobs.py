"""Jobs on clusters whose nodes are not alike, through the commands that take them and those that do not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import shardyard
from shardyard import UserError, predict, read_job, simulate
from sim.engine.effects import read_effects
from strategies.job import Job
from strategies.planner.advise import advise
from topologies.cluster import UnequalCluster
from topologies.node_group import NodeGroup
from topologies.reading import build

MIXED = "examples/clusters/a100-and-h100.yaml"


def job(**fields: object) -> Job:
    plan = {"tp": 8, "data_parallel": "zero1", "sequence": 4096, "global_batch": 32}
    return read_job(None, model="llama-3.1-8b", cluster=MIXED, plan=plan | fields)


def shallow(asked: Job) -> Job:
    """With as many layers as four stages of two chunks need."""
    return replace(asked, model=asked.model.model_copy(update={"layers": 8}))


def test_no_faster_than_the_slow_half_and_no_slower_than_if_all_were_slow() -> None:
    """A batch is shared out equally: the step is that of A100 alone, with a synchronisation over H100 too."""
    step = predict(job()).step_seconds
    a100, h100 = (
        predict(read_job(None, model="llama-3.1-8b", cluster=name, nodes=8, plan=job().plan.model_dump(exclude_unset=True)))
        for name in ("dgx-a100", "dgx-h100")
    )
    assert h100.step_seconds < step
    assert step == pytest.approx(a100.step_seconds, rel=0.01)


@pytest.mark.parametrize("plan", [{}, {"tp": 2, "pp": 2}, {"tp": 4, "data_parallel": "zero3"}, {"pp": 4, "tp": 4}])
def test_folded_is_unfolded_to_the_bit(plan: dict) -> None:
    played = [simulate(shallow(job(**plan)), fold=fold) for fold in (True, False)]
    assert played[0].step == played[1].step
    assert len(played[0].lanes) < len(played[1].lanes)


def test_which_gpus_limit_is_said() -> None:
    answer = predict(shallow(job(tp=1, microbatch=32, global_batch=2048)))
    assert not answer.fits
    assert {kind.gpu for kind in answer.gpu_kinds} == {"a100-sxm-80gb", "h100-sxm"}
    assert sum(kind.ranks for kind in answer.gpu_kinds) == answer.gpus == 64
    assert (
        "out of memory"
        in CliRunner()
        .invoke(
            shardyard.main,
            [
                "simulate",
                "--model",
                "llama-3.1-8b",
                "--cluster",
                MIXED,
                "--set",
                "model.layers=8",
                "--set",
                "plan.microbatch=32",
                "--set",
                "plan.global_batch=2048",
            ],
        )
        .output.partition("(a100-sxm-80gb, node 0)")[0]
    )


def test_a_profile_is_for_the_gpus_that_it_names() -> None:
    usual, named = (
        predict(job()),
        predict(
            read_job(
                None, model="llama-3.1-8b", cluster=MIXED, profile="h100+a100", plan=job().plan.model_dump(exclude_unset=True)
            )
        ),
    )
    assert usual.step_seconds == named.step_seconds
    with pytest.raises(UserError, match="profile b200 is for b200-sxm, which the cluster has none of"):
        predict(read_job(None, model="llama-3.1-8b", cluster=MIXED, profile="b200", plan={"tp": 8, "global_batch": 32}))


def test_a_missing_gpu_leaves_63() -> None:
    nodes = [{"count": 7}, {"count": 1, "missing": ["gpu 7"]}]
    answer = predict(
        read_job(None, model="llama-3.1-8b", cluster="dgx-h100", nodes=nodes, plan={"data_parallel": "zero1", "microbatch": 1})
    )
    assert answer.gpus == 63
    assert answer.gpu_kinds == ()
    assert answer.interval is None


def test_json_has_the_kinds_of_gpus_only_where_there_are_several() -> None:
    base = ["simulate", "--model", "llama-3.1-8b", "--set", "plan.tp=8", "--set", "plan.global_batch=32", "--json"]
    mixed, usual = (
        json.loads(CliRunner().invoke(shardyard.main, [*base, *more]).stdout)
        for more in (["--cluster", MIXED], ["--cluster", "dgx-h100", "--nodes", "8"])
    )
    assert [kind["gpu"] for kind in mixed["gpu_kinds"]] == ["a100-sxm-80gb", "h100-sxm"]
    assert mixed["interval"]["low"] < mixed["step_seconds"] < mixed["interval"]["high"]
    assert mixed["interval"]["parts"].keys() == usual["interval"]["parts"].keys()
    assert set(mixed) - set(usual) == {"gpu_kinds"}
    assert set(mixed["memory"][0]) - set(usual["memory"][0]) == {"capacity"}


@pytest.mark.parametrize(
    "command",
    [
        "whatif --vary plan.schedule=1f1b,gpipe --workers 1",
        "compare examples/demo.yaml",
        "topology",
        "topology --json",
    ],
)
def test_commands_that_take_them(command: str) -> None:
    name, *options = command.split()
    source = [MIXED] if name == "topology" else ["examples/mixed-gpus.yaml"]
    result = CliRunner().invoke(shardyard.main, [name, *source, *options])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "command",
    [
        "plan examples/mixed-gpus.yaml --workers 1",
        "sensitivity examples/mixed-gpus.yaml --spread",
        "run examples/mixed-gpus.yaml --days 1",
        "loop examples/mixed-gpus.yaml",
        "server examples/mixed-gpus.yaml",
        "execute examples/mixed-gpus.yaml",
        "collective all_reduce --cluster examples/clusters/a100-and-h100.yaml",
        "simulate examples/mixed-gpus.yaml --nodes 9",
        "simulate examples/mixed-gpus.yaml --set cluster.node.nic=100Gb/s",
        "simulate examples/mixed-gpus.yaml --set plan.offload={optimizer: cpu}",
        "simulate examples/mixed-gpus.yaml --set plan.fp8={}",
        "whatif examples/mixed-gpus.yaml --vary cluster.node.nic=x2",
    ],
)
def test_the_others_say_so_in_one_line(command: str) -> None:
    words = command.split()
    if "--set" in words:
        at = words.index("--set")
        words = [*words[: at + 1], " ".join(words[at + 1 :])]
    result = CliRunner().invoke(shardyard.main, words)
    assert result.exit_code == 2, result.output
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, result.output
    assert lines[0].startswith("error: ")


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 8, "data_parallel": "zero1"},
        {"tp": 2, "pp": 2, "data_parallel": "ddp"},
        {"tp": 4, "data_parallel": "zero3", "kernels": "torch"},
        {"pp": 4, "tp": 4, "schedule": "interleaved"},
        {"cp": 2, "tp": 4, "data_parallel": "zero1"},
    ],
    ids=str,
)
def test_equal_nodes_told_apart_are_the_usual_cluster(plan: dict) -> None:
    """The ways of unequal clusters, walked with two groups of nodes that are equal."""
    usual = read_job(None, model="llama-3.1-8b", cluster="dgx-h100", nodes=4, plan=plan | {"sequence": 4096, "global_batch": 64})
    group = NodeGroup(count=2, node=usual.cluster.node)
    fields = {name: getattr(usual.cluster, name) for name in type(usual.cluster).model_fields} | {"every": (group, group)}
    apart = replace(usual, cluster=build(UnequalCluster, fields, "apart"))
    assert simulate(apart).step == pytest.approx(simulate(usual).step, rel=1e-9)
    assert predict(apart).memory[0].peak == predict(usual).memory[0].peak


@pytest.mark.parametrize(
    "plan", [{"tp": 8, "data_parallel": "zero1"}, {"tp": 4, "pp": 2}, {"tp": 2, "data_parallel": "zero3"}], ids=str
)
def test_a_newer_half_makes_no_step_longer(plan: dict) -> None:
    def step(*nodes: str) -> float:
        groups = [{"count": 2, "node": node} for node in nodes]
        cluster = {"nodes": groups, "fabric": {"kind": "single"}}
        fields = plan | {"sequence": 4096, "global_batch": 64}
        return predict(read_job(None, model="llama-3.1-8b", cluster=cluster, plan=fields)).step_seconds

    mixed = step("dgx-a100", "dgx-h100")
    assert 1.001 * step("dgx-a100", "dgx-a100") > mixed > step("dgx-h100", "dgx-h100")  # without LL128 between the halves
    assert step("dgx-h100", "dgx-a100") > step("dgx-h100", "hgx-b200")


@pytest.mark.parametrize(
    "effect",
    ["node 5 nic 2: lost", "node 0 nic 1: rate 0.5", "leaf 0 up: background 0.5", "gpu 40: speed 0.5", "node 2: throttle 0.5"],
)
def test_effects_act_on_them(effect: str) -> None:
    usual = simulate(job()).step
    assert simulate(replace(job(), effects=read_effects(effect, "effects"))).step >= usual


def test_advice_keeps_the_shares_of_the_jobs_own_plan() -> None:
    job = shallow(read_job("examples/mixed-gpus.yaml"))
    candidates = advise(job, predict, depth=2).candidates
    own = next(candidate for candidate in candidates if candidate.name == "the job's plan")
    assert own.job.plan.microbatches_per_replica == (9, 9, 23, 23)
    assert own.summary.step_seconds == predict(job).step_seconds >= candidates[0].summary.step_seconds


def test_advice_shares_layers_out_by_the_speed_of_the_gpus() -> None:
    """Stages on A100 and H100: equal shares wait for the A100, which have fewer layers in the best way."""
    plan = {"data_parallel": "zero1", "sequence": 4096, "global_batch": 32}
    mixed = read_job(
        None, model="llama-3.1-8b", cluster="dgx-h100", nodes=[{"count": 1, "node": "dgx-a100"}, {"count": 1}], plan=plan
    )
    candidates = {each.name: each for each in advise(mixed, predict, depth=2).candidates}
    equal = candidates["TP2 × PP2 + ZeRO-1"]
    shared = candidates["TP2 × PP2 + ZeRO-1, uneven layers"]
    first, last = shared.job.resolve().layers
    assert first < last
    assert shared.summary.step_seconds < 0.85 * equal.summary.step_seconds
    assert next(iter(candidates.values())).summary.step_seconds <= shared.summary.step_seconds


def test_advice_there_says_nothing_of_plan_which_refuses_them() -> None:
    options = ["advise", "--model", "llama-3.1-8b", "--cluster", MIXED, "--set", "plan.global_batch=64", "--set", "plan.tp=8"]
    output = CliRunner().invoke(shardyard.main, options).output
    assert "way to train" in output
    assert "`shardyard plan`" not in output
