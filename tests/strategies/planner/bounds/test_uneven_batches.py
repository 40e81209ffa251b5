"""Searches of plans whose dp ranks have different numbers of microbatches: bounds hold, the best is the best of all."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from shardyard import UserError, predict
from strategies.planner.search.objective import objective
from strategies.planner.search.search import Search
from strategies.planner.search.space import read_space
from tests.strategies.planner.conftest import here, read

SPACE: dict[str, list[Any]] = {
    "plan.tp": [1, 2, 4],
    "plan.pp": [1, 2],
    "plan.microbatch": [1, 2],
    "plan.data_parallel": ["ddp", "zero1", "zero3"],
}


@pytest.mark.parametrize("batch", [34, 38])
def test_the_best_plan_of_a_batch_that_does_not_divide(batch: int) -> None:
    def uneven(changes: dict[str, Any]) -> Any:
        return read(changes, global_batch=batch, uneven_batch="join")

    steps = {}
    for values in product(*SPACE.values()):
        changes = dict(zip(SPACE, values, strict=True))
        try:
            steps[values] = predict(uneven(changes)).step_seconds
        except UserError:
            continue
    assert len(steps) > 8
    answer = Search(uneven, read_space(SPACE, "space"), objective("step"), here()).run()
    assert answer.best is not None
    assert answer.best["value"] == min(steps.values())
