"""The order of plans: what fits, the least value, the fewest fields that are not at their defaults, memory, hash."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from strategies.plan.plan import Plan
from strategies.planner.ranking import Key, order, rank, rank_row
from strategies.predict import predict
from strategies.read_job import read_job
from topologies.reading import build


def key(fits: bool = True, value: float = 1.0, memory: float = 1.0, identity: str = "a", **plan: Any) -> Key:
    return order(fits, value, plan, memory, identity)


def test_each_criterion_decides_where_those_before_are_equal() -> None:
    """A ladder: each key is worse than the one before by one criterion and better by all that come after it."""
    ladder = [
        key(identity="a", tp=2),
        key(identity="b", tp=2),
        key(memory=2.0, identity="a", tp=2),
        key(memory=1.0, identity="a", tp=2, cp=2),
        key(value=2.0, memory=0.5, identity="a"),
        key(fits=False, value=1.0, memory=0.5, identity="a"),
    ]
    assert all(better < worse for better, worse in pairwise(ladder))


@pytest.mark.parametrize(
    ("plan", "number"),
    [
        ({}, 0),
        ({"tp": 1, "data_parallel": "ddp", "overlap": True, "schedule": "1f1b"}, 0),  # defaults that are written out
        ({"tp": 2, "data_parallel": "zero1", "overlap": False}, 3),
        ({"dp": 8, "sequence": 256, "global_batch": 64, "accumulation": 8, "layers_per_stage": (2, 2)}, 0),  # filled in
        ({"nodes": 4, "bucket": None}, 0),  # no field of a plan; a default of None
        ({"bucket": 25e6}, 1),
    ],
)
def test_fields_that_are_not_at_their_defaults_are_counted(plan: dict[str, Any], number: int) -> None:
    assert order(True, 1.0, plan, 1.0, "")[2] == number


def test_options_that_are_equal_to_the_default_s_are_at_their_default() -> None:
    """Written out as a mapping or as the object that it is read to."""
    whole = dict(build(Plan, {"tp": 2}, "plan"))
    assert order(True, 1.0, whole, 1.0, "")[2] == 1


def test_a_simulated_job_is_placed_by_gpu_seconds_per_token() -> None:
    """Twice the tokens per second per GPU are half the value."""
    job = read_job(model="gpt2-1.5b", cluster="dgx-a100", plan={"data_parallel": "zero1", "global_batch": 8, "sequence": 64})
    answer = replace(predict(job), tokens_per_second_per_gpu=4.0)
    assert rank(answer, {"tp": 2}, "me") == (not answer.fits, 0.25, 1, answer.worst.peak, "me")
    assert rank(replace(answer, tokens_per_second_per_gpu=8.0), {"tp": 2}, "me") < rank(answer, {"tp": 2}, "me")


def test_a_row_is_placed_by_its_value_and_the_plan_s_fields_among_its_changes() -> None:
    """Neither the number of nodes nor a model's field of the name of a plan's is one of them."""
    changes = {"plan.tp": 2, "plan.cp": 1, "nodes": 4, "model.tp": 4, "tp": 8, "plan.dp": 4}
    row = {"changes": changes, "fits": 1, "memory": 5.0, "hash": "me"}
    assert rank_row(row, 3.0) == (False, 3.0, 1, 5.0, "me")
    assert rank_row(row | {"fits": False}, 3.0) == (True, 3.0, 1, 5.0, "me")
