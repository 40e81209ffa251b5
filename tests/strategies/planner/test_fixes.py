"""What is proposed when a job does not fit does fit, and is no more than is needed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import shardyard
from sim.analysis.summary import Summary
from strategies.frameworks.settings import EVERYTHING
from strategies.job import Job
from strategies.planner.fixes import _ideas, fixes


def answer(job: Job) -> Summary:
    return shardyard.summarise(shardyard.simulate(job))


def test_states_that_a_node_cannot_hold_need_more_nodes() -> None:
    """Llama-3.1 70B has 16 bytes of states per parameter: 1.13 TB, more than the 684 GB of 8 H100 however they are divided."""
    given = {"model": "llama-3.1-70b", "cluster": "dgx-h100"}
    plan = {"tp": 8, "sequence_parallel": True, "sequence": 2048, "global_batch": 16, "kernels": "compiled"}
    job = shardyard.read_job(nodes=1, plan=plan, **given)
    (fix,) = fixes(job, answer(job), answer)
    nodes = fix.changes["nodes"]
    assert nodes >= 2
    changed = {name: value for name, value in fix.changes.items() if name != "nodes"}
    assert answer(shardyard.read_job(nodes=nodes, plan=plan | changed, **given)).fits


def test_changes_of_the_plan_come_before_more_nodes() -> None:
    """Llama-3.1 8B by DDP: 128 GB of states fit no H100, but shards of them do."""
    job = shardyard.read_job(
        model="llama-3.1-8b", cluster="dgx-h100", nodes=1, plan={"auto": False, "sequence": 4096, "kernels": "compiled"}
    )
    proposals = fixes(job, answer(job), answer)
    assert proposals
    assert all("nodes" not in fix.changes for fix in proposals)
    assert any(fix.changes.get("data_parallel", "").startswith("zero") for fix in proposals)


def test_what_is_offloaded_may_be_more_than_the_optimizer() -> None:
    """A sharded job whose optimizer is on the CPUs already fits when its parameters are there, too."""
    plan = {"data_parallel": "zero3", "offload": {"optimizer": "cpu"}}
    job = shardyard.read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=1, plan=plan)

    def pretended(changed: Job) -> Any:
        fits = changed.plan.offload == EVERYTHING
        return SimpleNamespace(fits=fits, events=1, tokens_per_second=1.0, worst=SimpleNamespace(peak=1.0))

    assert {"offload": EVERYTHING} in [fix.changes for fix in fixes(job, pretended(job), pretended, effort=50)]


Fits = Callable[[Job], bool]


def pretending(
    fits: Fits, peak: Callable[[Job], float] = lambda job: 1.0, events: int = 1
) -> tuple[Callable[[Job], Any], list[Job]]:
    """An answer without a simulation, and the jobs that it is asked for; its speed is microbatch · tp."""
    asked: list[Job] = []

    def answer(job: Job) -> Any:
        asked.append(job)
        speed = float(job.plan.microbatch * job.plan.tp)
        return SimpleNamespace(fits=fits(job), events=events, tokens_per_second=speed, worst=SimpleNamespace(peak=peak(job)))

    return answer, asked


def degrees(job: Job) -> tuple[int, int, int]:
    return job.plan.tp, job.plan.pp, job.plan.microbatch


def gpt(model: str = "gpt-1.7b", **plan: Any) -> Job:
    """24 layers on the 8 GPUs of a node."""
    return shardyard.read_job(
        model=model, cluster="dgx-h100", nodes=1, plan={"auto": False, "global_batch": 64, "sequence": 1024} | plan
    )


SHARDED = {"data_parallel": "zero3", "recompute": "full", "sequence_parallel": True}


@pytest.mark.parametrize(
    ("given", "ideas"),
    [
        (
            {"data_parallel": "ddp", "microbatch": 4, "attention": "materialised"},
            [
                {"data_parallel": "zero1"},
                {"data_parallel": "zero3"},
                {"attention": "flash"},
                {"recompute": "full"},
                {"microbatch": 2},
                {"tp": 2, "sequence_parallel": True},
                {"pp": 2},
            ],
        ),
        (
            {"data_parallel": "zero3", "recompute": "full", "tp": 4},
            [{"sequence_parallel": True}, {"tp": 8, "sequence_parallel": True}, {"pp": 2}],
        ),
        ({"tp": 8, "recompute": "full"}, [{"sequence_parallel": True}]),  # one rank has each part: nothing to shard
        ({"pp": 8, "recompute": "full", "microbatch": 2}, [{"microbatch": 1}]),
        (
            {"data_parallel": "zero1", "cp": 4, "recompute": "selective"},
            [
                {"data_parallel": "zero2"},
                {"data_parallel": "zero3"},
                {"recompute": "full"},
                {"tp": 2, "sequence_parallel": True},
                {"pp": 2},
            ],
        ),
        ({"data_parallel": "zero3", "recompute": "selective", "tp": 8, "sequence_parallel": True}, [{"recompute": "full"}]),
    ],
)
def test_single_changes_that_lower_memory(given: dict[str, Any], ideas: list[dict[str, Any]]) -> None:
    """tp stays inside the node, and what divides dp further needs an even dp."""
    assert list(_ideas(gpt(**given))) == ideas


def test_no_more_stages_than_layers() -> None:
    def three_layers(**plan: Any) -> Job:
        return shardyard.read_job(overrides={"model.layers": 3}, model="gpt-1.7b", cluster="dgx-h100", nodes=1, plan=plan)

    assert {"pp": 2} in _ideas(three_layers())
    assert not any("pp" in idea for idea in _ideas(three_layers(pp=2)))


def test_experts_are_spread_over_more_ranks_as_long_as_dp_has_them() -> None:
    """8 ranks; with whole experts ep counts tp ranks, too: ep 4 of tp 2 is 2 of 4 dp ranks."""
    moe = "mixtral-8x7b"
    assert {"ep": 8} in _ideas(gpt(moe, ep=4))
    assert not any("ep" in idea for idea in _ideas(gpt(moe, ep=8)))
    assert {"ep": 8} in _ideas(gpt(moe, tp=2, sequence_parallel=True, ep=4, expert_tp=1))
    assert not any("ep" in idea for idea in _ideas(gpt(moe, tp=2, sequence_parallel=True, ep=8, expert_tp=1)))
    assert not any("ep" in idea for idea in _ideas(gpt()))


def test_the_fastest_of_those_that_fit_are_named_once_there_are_twice_as_many() -> None:
    """Half the microbatch fits. Rounds: from tp 4 all three single changes, then from tp 8, then from pp 2."""
    job = gpt(tp=4, microbatch=4, **SHARDED)
    answer, asked = pretending(lambda other: other.plan.microbatch == 2)
    wide, plain = {"tp": 8, "sequence_parallel": True, "microbatch": 2}, {"microbatch": 2}
    assert [fix.changes for fix in fixes(job, answer(job), answer, limit=1)] == [wide]
    assert list(map(degrees, asked)) == [(4, 1, 4), (4, 1, 2), (8, 1, 4), (4, 2, 4), (8, 1, 2)]
    asked.clear()
    assert [fix.changes for fix in fixes(job, answer(job), answer, limit=2)] == [wide, plain]
    assert list(map(degrees, asked))[-1] == (4, 2, 2)


def test_the_search_goes_on_from_the_least_memory() -> None:
    job = gpt(tp=2, microbatch=4, **SHARDED)
    answer, asked = pretending(lambda other: False, lambda other: 9.0 - 4 * (other.plan.pp == 2))
    fixes(job, answer(job), answer, effort=4)
    assert list(map(degrees, asked))[:5] == [(2, 1, 4), (2, 1, 2), (4, 1, 4), (2, 2, 4), (2, 2, 2)]


def test_no_more_is_simulated_than_the_effort_allows() -> None:
    """10, 20 and 30 events of changes of the plan, and again of those with offloading; then larger clusters."""
    job = gpt(microbatch=8)
    answer, asked = pretending(lambda other: False, events=10)
    assert fixes(job, answer(job), answer, effort=25) == []
    assert len([job for job in asked[1:] if job.cluster.nodes == 1]) == 2 * 3
    assert {job.cluster.nodes for job in asked} == {1, 2, 4, 8, 16}


def test_more_nodes_are_as_few_as_possible_with_the_change_of_least_consequence() -> None:
    """At each size the plan as it is, then recomputation, ZeRO-1, ZeRO-3, and ZeRO-3 with recomputation; the batch is kept."""
    job = gpt(tp=8, sequence_parallel=True)

    def changes_of(fits: Fits) -> list[dict[str, Any]]:
        answer, asked = pretending(lambda other: other.cluster.nodes > 1 and fits(other))
        result = [fix.changes for fix in fixes(job, answer(job), answer, effort=1)]
        assert {job.plan.global_batch for job in asked} == {64}
        return result

    assert changes_of(lambda other: other.cluster.nodes >= 3) == [{"nodes": 4}]
    assert changes_of(lambda other: other.cluster.nodes == 16) == [{"nodes": 16}]
    assert changes_of(lambda other: other.cluster.nodes > 16) == []
    assert changes_of(lambda other: other.plan.recompute == "full") == [{"nodes": 2, "recompute": "full"}]
    assert changes_of(lambda other: other.plan.data_parallel == "zero3") == [{"nodes": 2, "data_parallel": "zero3"}]
    both = [{"nodes": 2, "data_parallel": "zero3", "recompute": "full"}]
    assert changes_of(lambda other: other.plan.data_parallel == "zero3" and other.plan.recompute == "full") == both


def test_a_layer_that_is_too_large_is_cut_into_tiles() -> None:
    """A GPT-like layer of hidden size 32,768 has 12 h² = 12.9e9 parameters: 52 GB with its gradients, of 80 GB; a quarter of 80
    has room for a third of it, so that 4 tiles do.
    """
    large = {"model.hidden": 32768, "model.ffn": 4 * 32768, "model.heads": 256}
    plan = {"sequence": 1024, "global_batch": 64, "recompute": "full"}
    job = shardyard.read_job(
        model="gpt-1.7b", overrides=large, cluster="dgx-h100", nodes=1, plan=plan | {"data_parallel": "zero3"}
    )
    (tiled,) = [idea["deepspeed"] for idea in _ideas(job) if "deepspeed" in idea]
    assert tiled.tiles == 4
    assert not any("deepspeed" in idea for idea in _ideas(job.__class__(job.name, job.model, gpt().plan, job.cluster)))
    assert not any("deepspeed" in idea for idea in _ideas(gpt(data_parallel="zero3")))
