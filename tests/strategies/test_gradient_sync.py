"""FSDP2's gradients reduced once in a step: how often what is gathered and reduced, and what is kept for it."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.memory import ledger
from sim.run import run
from strategies.job import read_job
from strategies.lower import lower
from topologies.reading import UserError

MODEL = {"hidden": 64, "layers": 4, "heads": 8, "vocabulary": 512, "context": 32, "tied": False}
FSDP = {"data_parallel": "zero3", "accumulation": 4, "model": MODEL}


@pytest.fixture
def played(toy_job, toy_prices):
    def play(gpus: int = 4, **plan):
        job = toy_job(gpus, 1, **FSDP | plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())

    return play


def counted(timeline, stage: int = 0) -> Counter[str]:
    return Counter(row.kind for row in timeline.rows() if row.lane == stage and row.kind in ("all_gather", "reduce_scatter"))


@pytest.mark.parametrize("plan", [{}, {"pp": 2}, {"pp": 2, "schedule": "gpipe"}, {"pp": 2, "schedule": "zb-h1"}])
@pytest.mark.parametrize(("reshard", "gathers"), [(True, 4 + 1), (False, 1)])
def test_m_plus_one_gathers_and_one_reduction(played, plan, reshard, gathers) -> None:
    """Embedding, layers and head are a unit each: 6 in all, 3 on each of 2 stages."""
    units = 6 // plan.get("pp", 1)
    found = counted(played(gradient_sync="last", reshard=reshard, **plan))
    assert found == {"all_gather": units * gathers, "reduce_scatter": units}


def test_whole_gradients_and_parameters_are_kept_for_it(played) -> None:
    """When the last backward pass begins: bf16 gradients and parameters of everything, 2 + 2 bytes a parameter."""
    every, last = (ledger(played(pp=2, gradient_sync=sync), 0).at_peak["temporary"] for sync in ("every", "last"))
    assert last > every
    stage = 512 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 32 * 64
    assert last >= 2 * stage


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"data_parallel": "zero2"}, "contradicts data_parallel=zero2"),
        ({"deepspeed": {}}, "contradicts deepspeed"),
        ({"offload": {"optimizer": "cpu"}}, "contradicts offload"),
    ],
)
def test_refused(plan, message) -> None:
    fields = {"data_parallel": "zero3", "gradient_sync": "last"} | plan
    with pytest.raises(UserError, match=f"gradient_sync=last {message}"):
        read_job(model="llama-3.1-8b", cluster="dgx-h100", plan=fields).resolve()
