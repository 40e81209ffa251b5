"""The busiest rank of random loads: closed forms of extreme cases, and what is played."""

from __future__ import annotations

import math

import pytest

from shardyard import read_job, simulate, summarise
from sim.program import Block, Collective
from strategies.plan.routing import busiest_rank, distinct
from topologies.reading import UserError


def test_many_tokens_of_a_balanced_router_are_balanced() -> None:
    assert busiest_rank(256, 8, 10**9, 0.0) == pytest.approx(1, abs=1e-3)
    assert busiest_rank(256, 1, 1000, 2.0) == 1


@pytest.mark.parametrize(("ranks", "largest"), [(2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (8, 1.42360)])
def test_random_choice_spreads_as_the_largest_of_normal_variables(ranks, largest) -> None:
    """Loads are multinomial: a rank's has a variance of c/n·(1 − 1/n), any two −c/n² in common, so that the differences are those
    of independent normal variables of variance c/n, of whose maximum the mean is known.
    """
    copies = 40_000
    expected = 1 + largest * math.sqrt(ranks / copies)
    assert busiest_rank(24, ranks, copies, 0.0) - 1 == pytest.approx(expected - 1, rel=0.12)


def test_a_spread_of_experts_is_averaged_over_those_of_a_rank() -> None:
    """With m experts on a rank its load has 1/√m of their spread."""
    few, many = (busiest_rank(8 * each, 8, 10**9, 0.1) - 1 for each in (1, 16))
    assert few == pytest.approx(1.42360 * 0.1, rel=0.1)
    assert many == pytest.approx(few / 4, rel=0.15)


def test_what_is_played_is_between_balance_and_the_same_imbalance() -> None:
    given = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "nodes": 1}
    plan = {"ep": 8, "sequence": 4096, "global_batch": 8, "data_parallel": "zero1"}

    def volume(**more) -> tuple[float, float]:
        summary = summarise(simulate(read_job(**given, plan=plan | more)))
        return summary.volume["ep"].bytes, summary.step_seconds

    (even, quick), (spread, slow) = volume(), volume(expert_spread=0.2)
    load = busiest_rank(8, 8, 8 * 2 * 4096, 0.2)
    assert spread == pytest.approx(load * even)
    assert slow > quick
    assert volume(imbalance=load) == (spread, slow)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"expert_spread": 0.2}, "expert_spread=0.2 needs ep > 1"),
        ({"ep": 8, "expert_spread": 0, "imbalance": 1.5}, "contradicts imbalance=1.5"),
    ],
)
def test_refusals(plan, reason) -> None:
    with pytest.raises(UserError, match=reason):
        read_job(model="mixtral-8x7b", cluster="dgx-h100", nodes=1, plan=plan).resolve()


@pytest.mark.parametrize(("experts", "ranks", "chosen"), [(8, 8, 2), (256, 8, 8), (256, 32, 8), (64, 2, 6)])
def test_ranks_of_a_token(experts, ranks, chosen) -> None:
    """Counted over random tokens; one expert per rank: as many ranks as experts."""
    import numpy as np

    generator = np.random.default_rng(3)
    chosen_experts = generator.random((20_000, experts)).argsort(axis=1)[:, :chosen]
    counted = np.mean([len(set(row)) for row in (chosen_experts // (experts // ranks)).tolist()])
    assert distinct(experts, ranks, chosen) == pytest.approx(counted, rel=0.01)
    assert distinct(ranks, ranks, min(chosen, ranks)) == pytest.approx(min(chosen, ranks))


def test_deepep_sends_a_token_once_to_a_rank() -> None:
    """Mixtral's two of eight experts on four ranks: 8 · 7 ordered pairs, of which 8 are on one rank; so 2 − 1/7 ranks."""
    given = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "nodes": 1}
    plan = {"ep": 4, "sequence": 4096, "global_batch": 8, "data_parallel": "zero1"}

    def volume(**more) -> float:
        return summarise(simulate(read_job(**given, plan=plan | more))).volume["ep"].bytes

    assert volume(token_dispatcher="deepep") == volume(token_dispatcher="hybridep")
    assert volume(token_dispatcher="deepep") / volume() == pytest.approx((2 - 1 / 7) / 2)
    with pytest.raises(UserError, match="token_dispatcher=deepep needs ep > 1"):
        volume(ep=1, token_dispatcher="deepep")


def test_multiprocessors_of_exchanges_are_taken_from_kernels_beside_them() -> None:
    """20 of 132 (DeepEP's and Megatron-LM's default): kernels beside take 132/112 times as long, beside NCCL's 1.1256 times."""
    given = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "nodes": 2}
    plan = {"ep": 4, "pp": 4, "schedule": "1f1b-overlapped", "sequence": 4096, "accumulation": 8, "data_parallel": "zero1"}

    def slowed(**more) -> float:
        summary = summarise(simulate(read_job(**given, plan=plan | {"token_dispatcher": "deepep"} | more)))
        return summary.breakdown["slowdown"]

    free = slowed(dispatcher_sms=0)  # what other collectives slow down
    assert slowed(dispatcher_sms=20) == slowed()
    assert slowed(token_dispatcher="hybridep") == slowed(dispatcher_sms=16)
    assert slowed(dispatcher_sms=60) > slowed() > slowed(dispatcher_sms=16) > free
    job = read_job(**given, plan=plan | {"token_dispatcher": "deepep"})
    exchange = Collective("all_to_all", 1e6, "ep", "dispatch", sms=20)
    assert simulate(job).op_costs.prices.slowing(exchange) == 132 / 112
    for ep, rule in ((1, "dispatcher_sms=8 needs ep > 1"), (4, "dispatcher_sms=8 needs token_dispatcher")):
        with pytest.raises(UserError, match=rule):
            slowed(dispatcher_sms=8, token_dispatcher="alltoall", ep=ep)


@pytest.mark.parametrize(("nodes", "dispatch", "combine"), [(2, 90, 81), (4, 61, 61)])
def test_exchanges_between_nodes_take_what_deepep_measured(nodes, dispatch, combine) -> None:
    """github.com/deepseek-ai/DeepEP, normal kernels on H100 with ConnectX-7, GB/s of tokens that go to nodes, their own counted:
    dispatch in fp8, combine in bf16. No price was fitted to it; NCCL's exchange is a little slower.
    """
    plan = {"ep": 8 * nodes, "ep_nodes": nodes, "routed_nodes": min(4, nodes), "token_dispatcher": "deepep", "sequence": 4096}
    plan |= {"global_batch": 8 * nodes, "data_parallel": "zero1", "fp8": {"dispatch": True}}
    small = {"model.layers": 4, "model.experts.first_dense": 0}
    timeline = simulate(read_job(model="deepseek-v3", cluster="dgx-h100", nodes=nodes, plan=plan, overrides=small))
    rates = {}
    for op in timeline.program.cohorts[0].ops:
        for _, work in op.work.items() if isinstance(op.work, Block) else ():
            if isinstance(work, Collective) and work.label.endswith("across nodes"):
                rates[work.width] = work.bytes / timeline.op_costs.collective(work, 0).alone / 1e9
    assert rates[1] == pytest.approx(dispatch, rel=0.18)
    assert rates[2] == pytest.approx(combine, rel=0.18)
