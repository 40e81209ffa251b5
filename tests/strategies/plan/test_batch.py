"""The global batch of a plan that says none."""

from __future__ import annotations

import pytest

from strategies.plan.batch import with_batch
from strategies.plan.plan import Plan


@pytest.mark.parametrize(
    ("plan", "gpus", "batch"),
    [
        ({}, 8, 4 * 8),
        ({"tp": 2, "pp": 2}, 8, 4 * 8),  # for each GPU, not for each of 2 replicas
        ({"microbatch": 3}, 8, 2 * 3 * 8),  # 24 are fewer than 32
        ({"microbatch": 16}, 8, 16 * 8),
        ({"cp": 8}, 8, 4 * 8),
    ],
)
def test_four_sequences_for_each_gpu_in_whole_microbatches(plan: dict[str, int], gpus: int, batch: int) -> None:
    filled, (note,) = with_batch(Plan(**plan), gpus)
    assert filled.global_batch == batch
    assert f"global_batch: {batch} sequences by default, {'at least ' * (batch > 4 * gpus)}4 for each GPU" in note


@pytest.mark.parametrize("plan", [{"global_batch": 5}, {"accumulation": 2}, {"tp": 16}], ids=str)
def test_a_plan_that_says_one_or_needs_more_gpus_stays(plan: dict[str, int]) -> None:
    assert with_batch(Plan(**plan), 8) == (Plan(**plan), ())


def test_a_framework_accumulates_nothing_unless_it_is_said() -> None:
    assert with_batch(Plan(), 8, framework=True) == (Plan(accumulation=1), ())
