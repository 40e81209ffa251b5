"""What a plan that says nothing has by its cluster: a global batch, a precision."""

from __future__ import annotations

import pytest

from strategies.plan.defaults import with_batch
from strategies.plan.plan import Plan
from strategies.read_job import stated_job
from topologies.reading import UserError


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


def computing(cluster: str, **plan: str) -> tuple[str, list[str]]:
    """The precision of a job, and what is said of it."""
    asked = stated_job(model="gpt2-1.5b", cluster=cluster, plan=plan)
    return asked.plan.precision, [note for note in asked.notes if note.startswith("precision: ")]


@pytest.mark.parametrize(
    ("cluster", "precision", "without"),
    [("dgx-a100", "bf16", ""), ("dgx-1v", "fp16", "v100-sxm2-32gb"), ("cpu-gloo", "fp32", "cpu-core")],
)
def test_a_plan_that_says_no_precision_has_one_that_the_gpus_compute_in(cluster: str, precision: str, without: str) -> None:
    found, notes = computing(cluster, data_parallel="zero1")
    assert found == precision
    said = f"precision: {precision} by default, as {without} does not compute in bf16; plan.precision says otherwise"
    assert notes == ([said] if without else [])


def test_a_precision_that_is_said_stays() -> None:
    assert computing("dgx-1v", precision="fp32") == ("fp32", [])
    with pytest.raises(UserError, match="precision='bf16' is not possible"):
        stated_job(model="gpt2-1.5b", cluster="dgx-1v", plan={"precision": "bf16"}).resolve()


def test_of_gpus_that_are_not_alike_all_compute_in_it() -> None:
    """And an A100 alone in its own again, when the job is read once more."""
    nodes = [{"count": 1}, {"count": 1, "node": {"gpu": "v100-sxm2-32gb"}}]
    mixed = stated_job(model="gpt2-1.5b", cluster="dgx-a100", nodes=nodes, plan={})
    assert mixed.plan.precision == "fp16"
    assert mixed.source is not None
    assert mixed.source({"nodes": 1}).plan.precision == "bf16"
