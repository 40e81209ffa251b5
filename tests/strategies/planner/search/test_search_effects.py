"""Searches of jobs with effects."""

from __future__ import annotations

from typing import Any

import pytest

import shardyard
from shardyard import UserError, predict, read_job, simulate, summarise
from sim.analysis.breakdown import breakdowns
from sim.pricing.shipped import load_profile
from strategies.planner.effects_cost import with_effects
from strategies.planner.search.objective import objective
from strategies.planner.search.search import Search
from strategies.planner.search.space import read_space
from tests.strategies.planner.conftest import MODEL, here

SPACE = {"plan.tp": [1, 2, 4], "plan.pp": [1, 2], "plan.data_parallel": ["ddp", "zero1"]}


def job(changes: dict[str, Any], effects: list[str]):
    return read_job(overrides=changes, model=MODEL, cluster="dgx-h100", plan={"auto": False, "global_batch": 32}, effects=effects)


def search(effects: list[str]):
    return Search(lambda changes: job(changes, effects), read_space(SPACE, "space"), objective("step"), here()).run()


def test_the_best_plan_with_a_slow_gpu_is_the_best_of_all() -> None:
    effects = ["gpu 3: speed 0.4"]
    answer = search(effects)
    steps = {
        (tp, pp, hook): predict(job({"plan.tp": tp, "plan.pp": pp, "plan.data_parallel": hook}, effects)).step_seconds
        for tp in SPACE["plan.tp"]
        for pp in SPACE["plan.pp"]
        for hook in SPACE["plan.data_parallel"]
    }
    assert answer.rows[0]["step"] == min(steps.values())


def test_what_is_drawn_at_random_proves_nothing() -> None:
    with pytest.raises(UserError, match="proves by lower bounds"):
        search(["all: jitter 0.1"])


def test_the_answer_says_what_effects_cost_and_whom_everybody_waits_for() -> None:
    asked = job({"plan.tp": 2}, ["gpu 5: speed 0.5", "gpu 0: speed 0.99"])
    timeline = simulate(asked)
    summary = with_effects(asked, timeline, summarise(timeline))
    cost = summary.effects
    assert cost is not None
    assert cost.step_without == summarise(simulate(job({"plan.tp": 2}, []))).step_seconds
    assert cost.without["gpu 5: speed 0.5"] < cost.without["gpu 0: speed 0.99"] <= summary.step_seconds
    assert cost.critical_rank == 5
    assert cost.critical_idle < cost.mean_idle
    assert f"the others wait for rank {cost.critical_rank}" in summary.notes[0]
    assert summary.to_dict()["effects"]["critical_rank"] == 5
    assert "effects" not in summarise(timeline).to_dict()


def test_what_effects_cost_of_one_kernel_by_hand(toy_job: Any) -> None:
    """Idle seconds are what is neither compute nor slowed compute: of the rank that is idle least, and the mean of all."""
    alone = predict(job({"plan.tp": 2}, [])).step_seconds
    asked = job({"plan.tp": 2}, ["gpu 5: speed 0.5"])
    timeline = simulate(asked)
    cost = with_effects(asked, timeline, summarise(timeline)).effects
    assert cost is not None
    assert (cost.step_without, cost.without) == (alone, {})
    busy = {"forward", "backward", "recompute", "optimizer", "slowdown", "slower GPU"}
    idle = {
        lane.rank: (lane.ranks, sum(seconds for name, seconds in parts.items() if name not in busy))
        for lane, parts in zip(timeline.lanes, breakdowns(timeline), strict=True)
    }
    assert cost.critical_idle == pytest.approx(idle[5][1])
    assert cost.critical_idle == pytest.approx(min(seconds for _, seconds in idle.values()))
    assert cost.mean_idle == pytest.approx(sum(ranks * seconds for ranks, seconds in idle.values()) / 8)
    assert sum(ranks for ranks, _ in idle.values()) == 8


def test_of_a_slow_link_its_own_rank_is_named() -> None:
    """Two stages of two ranks, a node each: whose NIC has half its rate sends to the next stage for longer than its neighbour."""
    nodes = [{"count": 2, "node": {"gpus": 2, "nics": 2}}]
    asked = read_job(
        model=MODEL,
        cluster="dgx-h100",
        nodes=nodes,
        plan={"tp": 2, "pp": 2, "global_batch": 8},
        effects=["node 0 nic 1: rate 0.5"],
    )
    timeline = simulate(asked)
    summary = with_effects(asked, timeline, summarise(timeline))
    cost = summary.effects
    assert cost is not None
    assert cost.critical_rank == 1
    across = [0.0] * len(timeline.lanes)  # seconds of sends, and of the all-reduce of the tied embedding's gradients
    for row in timeline.rows():
        across[row.lane] += (row.end - row.start) * (row.kind in ("send", "all_reduce"))
    assert [lane.rank for lane in timeline.lanes] == [0, 1, 2, 3]
    assert cost.critical_transfers == pytest.approx(across[1] - across[0])
    assert f"the others wait for transfers of rank 1, which last {cost.critical_transfers:.3g} s longer" in summary.notes[0]


def test_the_note_says_the_cost_and_the_worst_effect() -> None:
    asked = job({"plan.tp": 2}, ["gpu 5: speed 0.5", "gpu 0: speed 0.99"])
    timeline = simulate(asked)
    summary = with_effects(asked, timeline, summarise(timeline))
    cost = summary.effects
    assert cost is not None
    more = 100 * (summary.step_seconds / cost.step_without - 1)
    left = summarise(simulate(job({"plan.tp": 2}, ["gpu 0: speed 0.99"]))).step_seconds
    assert summary.notes[0].startswith(
        f"effects make the step {more:.1f} % longer: {summary.step_seconds:.4g} s, without {cost.step_without:.4g} s; "
        f"without 'gpu 5: speed 0.5' alone {left:.4g} s; the others wait for rank 5, which is idle for "
    )


def test_the_note_says_when_effects_cost_nothing() -> None:
    """The host launches far ahead of its GPU."""
    asked = job({"plan.tp": 2}, ["gpu 5: preempted 1 us at 1 ms"])
    timeline = simulate(asked)
    summary = with_effects(asked, timeline, summarise(timeline))
    assert summary.notes[0].startswith("effects do not change the step: ")


def test_of_many_effects_none_is_left_out_alone() -> None:
    """Up to eight."""
    for count in (8, 9):
        asked = job({"plan.tp": 2}, [f"gpu 5: speed {0.5 + 0.01 * number:.2f}" for number in range(count)])
        timeline = simulate(asked)
        cost = with_effects(asked, timeline, summarise(timeline)).effects
        assert cost is not None
        assert len(cost.without) == (count if count <= 8 else 0)


def test_effects_cost_what_they_cost_by_the_profile_that_is_given() -> None:
    asked, slower = job({"plan.tp": 2}, ["gpu 5: speed 0.5", "gpu 0: speed 0.99"]), load_profile("a100")
    cost = shardyard.predict(asked, slower, interval=True).effects
    assert cost is not None
    assert cost.step_without == predict(job({"plan.tp": 2}, []), slower).step_seconds
    assert cost.without["gpu 5: speed 0.5"] == predict(job({"plan.tp": 2}, ["gpu 0: speed 0.99"]), slower).step_seconds
