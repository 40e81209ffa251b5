"""Searches of jobs with effects."""

from __future__ import annotations

from typing import Any

import pytest

from shardyard import UserError, predict, read_job
from strategies.planner.search.objective import objective
from strategies.planner.search.search import Search
from strategies.planner.search.space import read_space
from tests.strategies.planner.conftest import MODEL, here

SPACE = {"plan.tp": [1, 2, 4], "plan.pp": [1, 2], "plan.data_parallel": ["ddp", "zero1"]}


def job(changes: dict[str, Any], effects: list[str]):
    return read_job(overrides=changes, model=MODEL, cluster="dgx-h100", plan={"global_batch": 32}, effects=effects)


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
