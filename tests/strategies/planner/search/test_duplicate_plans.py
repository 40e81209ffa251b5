"""What a search counts once is one plan: combinations that play alike, and schedules of pipelines that have one rank."""

from __future__ import annotations

from typing import Any

import pytest

from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.pricing.prices import Prices
from strategies.job import Job
from strategies.lowering.lower import lower
from strategies.planner.search.candidates import candidates
from strategies.planner.search.space import read_space

ORDERS = ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-dp-tp-cp-ep", "dp-pp-tp-cp-ep"]


def step(job: Job, profile: Any) -> float:
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), Prices(profile, job.cluster.node.gpu))
    return summarise(timeline).step_seconds


@pytest.mark.parametrize(
    ("plan", "axis", "plans"),
    [
        ({"tp": 2}, {"plan.order": ORDERS}, 2),
        ({"tp": 2, "pp": 2}, {"plan.order": ORDERS}, 2),
        ({"pp": 4}, {"plan.order": ORDERS}, 1),
        ({"pp": 4}, {"plan.data_parallel": ["ddp", "zero1", "zero2", "zero3"], "plan.overlap": [True, False]}, 1),
        ({"pp": 2}, {"plan.data_parallel": ["ddp", "zero1"], "plan.overlap": [True, False]}, 4),
        ({"pp": 4, "cp": 1}, {"plan.cp_method": ["ring", "ulysses"]}, 1),
    ],
)
def test_twins_play_alike(toy_job: Any, toy_profile: Any, plan: dict[str, Any], axis: dict[str, Any], plans: int) -> None:
    job = toy_job(2, 2, model={"layers": 4}, accumulation=2, **plan)
    plans_of = candidates(job, read_space(axis, "space"))
    assert len(plans_of) == plans
    assert plans_of.same == len(list(every(axis))) - plans
    kept = {step(plans_of.job_of(number), toy_profile()) for number in range(plans)}
    assert kept == {
        step(toy_job(2, 2, model={"layers": 4}, accumulation=2, **plan | example), toy_profile()) for example in every(axis)
    }


def every(axis: dict[str, Any]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = [{}]
    for field, values in axis.items():
        result = [example | {field.removeprefix("plan."): value} for example in result for value in values]
    return result


def test_without_a_pipeline_1f1b_stands_for_its_schedules(toy_job: Any) -> None:
    schedules = ["zb-h1", "1f1b", {"plan.schedule": "interleaved", "plan.chunks": 2}, "gpipe"]
    axes = {"plan.pp": [1, 2], "plan.schedule": schedules}
    plans = candidates(toy_job(2, 2, model={"layers": 4}, accumulation=2), read_space(axes, "space"))
    schedules_of = {(plans.changes(number)["plan.pp"], plans.changes(number)["plan.schedule"]) for number in range(len(plans))}
    assert schedules_of == {(1, "1f1b"), (2, "zb-h1"), (2, "1f1b"), (2, "interleaved"), (2, "gpipe")}


def test_without_the_plain_one_nothing_stands_for_others(toy_job: Any) -> None:
    plans = candidates(
        toy_job(2, 2, model={"layers": 4}, accumulation=2), read_space({"plan.schedule": ["gpipe", "zb-h1"]}, "space")
    )
    assert len(plans) == 2
