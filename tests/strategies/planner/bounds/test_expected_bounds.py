"""No bound exceeds the expected step of GPUs that are not quite alike, whose draws it knows; and it comes as near to it as other
bounds come to the step of GPUs that are alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardyard import read_job, simulate
from sim.pricing.prices import Prices
from sim.replay.draws import drawn, samples_of, slowest_of_places
from sim.replay.places import Places, axes_inside
from strategies.job import Job
from strategies.lowering.lower import lower
from strategies.planner.bounds.every_plan import bounds
from strategies.planner.bounds.layer_cost_table import kinds_of
from strategies.planner.bounds.longest_path import expected_path
from strategies.planner.bounds.single_plan import Refiner
from strategies.planner.search.candidates import candidates
from strategies.planner.search.space import Axis, Space
from strategies.predict import predict, prices_of
from tests.strategies.planner.bounds.test_bounds import CPU, GPU, LINKS, OLDER, OVERHEAD, every_bound, jobs
from topologies.reading import UserError


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "pp": 4, "schedule": "interleaved", "chunks": 2, "data_parallel": "zero1"},
        {"tp": 2, "pp": 2, "schedule": "zb-v", "data_parallel": "ddp"},
        {"tp": 2, "data_parallel": "zero3", "shard": 4},
        {"tp": 2, "pp": 2, "cp": 2, "data_parallel": "zero2", "overlap": False},
    ],
)
def test_an_order_of_ranks_changes_the_grid_and_no_op(plan: dict[str, Any]) -> None:
    """So that plans that differ in it share the longest path's program."""
    given = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": 2, "overrides": {"model.layers": 8}}
    orders = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-tp-cp-ep-dp")
    asked = [read_job(**given, plan=plan | {"order": order, "accumulation": 8}) for order in orders]
    usual, *others = (lower(job.model, job.resolve()) for job in asked)
    assert len({usual.grid, *(other.grid for other in others)}) > 1
    for other in others:
        assert repr([cohort.ops for cohort in other.cohorts]) == repr([cohort.ops for cohort in usual.cohorts])
        assert [(cohort.at, cohort.resident, cohort.steady) for cohort in other.cohorts] == [
            (cohort.at, cohort.resident, cohort.steady) for cohort in usual.cohorts
        ]


def expected_bounds(job: Job, prices: Prices) -> list[float]:
    """By the slowest rank alone, by the schedule with the first rank's exchange, by the longest path; 0: not bounded so."""
    plans = candidates(job, Space((Axis("plan.tp", ({"plan.tp": job.plan.tp},)),)))
    kinds = kinds_of(plans, prices)
    finer = Refiner(plans, kinds, bounds(plans, kinds, prices), prices)
    longest = expected_path(job, job.resolve(), prices)
    return [finer.waiting(0), finer.expected_exchange(0), longest[0] if longest else 0.0]


@given(job=jobs(), deviation=st.sampled_from([0.01, 0.05, 0.3]), more=st.sampled_from([1, 1, 20]))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
)
def test_no_bound_exceeds_the_expected_step(toy_job, toy_profile, job, deviation, more) -> None:
    """more: as many microbatches again, of which only some are played."""
    profile = toy_profile(
        links=LINKS,
        launch="1 us",
        slowdown=1.2 if job["slow"] else 1.0,
        collective_launch="3 us",
        overhead=OVERHEAD,
        older=OLDER,
        variability=deviation,
    )
    node = {"nvlink": "9 GB/s", "nic": "1 GB/s" if job["slow"] else "5 GB/s", "cpu": CPU, "gpu": GPU}
    plan = job["plan"] | {"accumulation": more * job["plan"].get("accumulation", 1)}
    try:
        example = toy_job(*job["shape"], model=job["model"], node=node, **plan)
        answer = predict(example, profile)
    except UserError:
        assume(False)
        raise
    prices = Prices(profile, example.cluster.node.gpu)
    assert max(*every_bound(example, prices)[0], *expected_bounds(example, prices)) <= answer.step_seconds


# Thousandths of the expected step: by the slowest rank alone, by the schedule with the first rank's exchange, the longest path |
# model, nodes of H100, the plan
TABLE: list[tuple[list[float], str, int, dict[str, Any]]] = [
    ([981, 985, 993], "llama-3.1-70b", 16, {"tp": 8, "pp": 4, "accumulation": 4, "sequence_parallel": True}),
    ([873, 925, 974], "llama-3.1-70b", 8, {"tp": 8, "data_parallel": "zero3", "accumulation": 4}),
    ([952, 983, 997], "llama-3.1-8b", 1, {"data_parallel": "zero1", "accumulation": 2}),
    ([995, 0, 0], "llama-3.1-70b", 8, {"tp": 4, "pp": 4, "accumulation": 64, "data_parallel": "zero1"}),
]


@pytest.mark.parametrize(("parts", "model", "nodes", "plan"), TABLE)
def test_parts_of_the_expected_step(parts: list[float], model: str, nodes: int, plan: dict[str, Any]) -> None:
    """0: steps of which only some microbatches are played."""
    job = read_job(model=model, cluster="dgx-h100", nodes=nodes, plan=plan)
    step = predict(job).step_seconds
    assert [1000 * bound / step for bound in expected_bounds(job, prices_of(job))] == pytest.approx(parts, abs=0.6)


def test_kernels_alone_take_what_the_slowest_gpu_takes(toy_job, toy_profile) -> None:
    """Gradients over links without end of bandwidth: the mean of the slowest of 8 GPUs in 64 draws, and no other path."""
    profile = toy_profile(variability=0.1)
    job = toy_job(8, node={"nvlink": "1000 PB/s"}, accumulation=1, data_parallel="ddp", overlap=False)
    ideal, expected = predict(job, toy_profile()).step_seconds, predict(job, profile).step_seconds
    slowest = np.exp(0.1 * np.random.default_rng(0).standard_normal((8, 64))).max(axis=0).mean()
    assert expected == pytest.approx(ideal * slowest, rel=1e-3)
    assert expected_bounds(job, Prices(profile, job.cluster.node.gpu))[-1] == pytest.approx(expected, rel=1e-3)


def test_bounds_and_replays_draw_alike() -> None:
    """Groups of any axes, in any order: the same ranks meet."""
    plan = {"tp": 2, "cp": 2, "pp": 4, "ep": 2, "accumulation": 4, "order": "cp-pp-ep-tp-dp", "sequence_parallel": True}
    model = {"name": "small", "hidden": 1024, "layers": 8, "heads": 16, "vocabulary": 32000, "context": 2048}
    job = read_job(model=model | {"experts": {"experts": 4, "chosen": 2, "ffn": 512}}, cluster="dgx-h100", nodes=8, plan=plan)
    timeline = simulate(job)
    places, grid = Places(timeline.program, timeline.op_costs.lane), timeline.program.grid
    factors = drawn(64, samples_of(places.count), 0.1)
    assert factors.shape == (64, 64)
    expected = places.slowest(factors)
    assert expected is not None
    bounded = slowest_of_places(grid, tuple(sorted(axes_inside(timeline.program))), 0.1)
    assert np.sort(bounded, axis=1).tolist() == np.sort(np.array(expected), axis=1).tolist()
    assert bounded.sum(axis=0).max() == np.array(expected).sum(axis=0).max()  # a place has one number on all pipeline ranks
