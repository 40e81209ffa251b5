"""Sharded gradients reduced once in a step: how often what is gathered and reduced, and what is kept for it."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.analysis.memory import ledger
from sim.analysis.volume import volumes
from sim.engine.player import run
from sim.program import Collective
from strategies.data_parallel.hook import hook_of
from strategies.lowering.lower import lower
from strategies.read_job import read_job
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
    counts = counted(played(gradient_sync="last", reshard=reshard, **plan))
    assert counts == {"all_gather": units * gathers, "reduce_scatter": units}


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 2 * 4), (False, 4)])
def test_every_microbatch_gathers_where_backward_passes_release_parameters(played, reshard, gathers) -> None:
    counts = counted(played(gradient_sync="last", reshard_after_backward=True, reshard=reshard))
    assert counts == {"all_gather": 6 * gathers, "reduce_scatter": 6}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"data_parallel": "zero2"}, "reshard_after_backward=true contradicts data_parallel=zero2; it is a choice of zero3"),
        ({}, "reshard_after_backward=true needs gradient_sync=last"),
        ({"gradient_sync": "last", "pp": 2}, "reshard_after_backward=true contradicts pp=2"),
    ],
)
def test_what_releases_nothing_after_backward_passes(played, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        played(reshard_after_backward=True, **plan)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"reshard": False},
        {"gradient_sync": "last"},
        {"gradient_sync": "last", "reshard": False},
        {"gradient_sync": "last", "reshard_after_backward": True},
        {"gradient_sync": "last", "reshard": False, "reshard_after_backward": True},
        {"data_parallel": "zero2"},
        {"data_parallel": "zero2", "gradient_sync": "last"},
        {"data_parallel": "zero1"},
    ],
)
def test_what_bounds_count_as_moved_is_what_is_played(played, toy_job, plan) -> None:
    """Full buffers of a step, in bytes per parameter: ZeRO-3 with the last reduction of 4 microbatches gathers 4 + 1 times."""
    timeline, job = played(**plan), toy_job(4, 1, **FSDP | plan)
    resolved = job.resolve()
    moves = hook_of(resolved.data_parallel).moves(resolved)
    every = [op.work for op in timeline.program.cohorts[0].ops if isinstance(op.work, Collective)]
    moved = {kind: sum(work.bytes for work in every if work.operation == kind) for kind in ("all_gather", "reduce_scatter")}
    assert moved["all_gather"] == (moves.gathered + moves.last) * job.model.parameters
    assert moved["reduce_scatter"] == moves.reduced * job.model.parameters


def test_whole_gradients_and_parameters_are_kept_for_it(played) -> None:
    """When the last backward pass begins: bf16 gradients and parameters of everything, 2 + 2 bytes a parameter."""
    every, last = (ledger(played(pp=2, gradient_sync=sync), 0).at_peak["temporary"] for sync in ("every", "last"))
    assert last > every
    stage = 512 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 32 * 64
    assert last >= 2 * stage


STAGE = 512 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 32 * 64  # parameters of the first of two stages


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize(("sync", "times"), [("every", 4), ("last", 1)])
def test_zero2_reduces_each_bucket_once_or_in_every_microbatch(played, schedule, sync, times) -> None:
    """A bucket for all gradients: a reduction per microbatch or one per step, and one gather of parameters after the update."""
    plan = {"data_parallel": "zero2", "pp": 2, "schedule": schedule, "bucket": "1 GB"}
    assert counted(played(gradient_sync=sync, **plan)) == {"reduce_scatter": times, "all_gather": 1}


def test_zero2_keeps_whole_gradients_between_microbatches(played) -> None:
    """bf16 gradients of the stage, besides the rank's half of them; a reduction per microbatch keeps but a bucket or two."""
    plan = {"data_parallel": "zero2", "pp": 2, "bucket": "1 kB"}
    every, last = (ledger(played(gradient_sync=sync, **plan), 0).at_peak["gradient"] for sync in ("every", "last"))
    assert last == 2 * (STAGE + STAGE / 2)
    assert every < 2 * (STAGE / 2 + 3 * 512 * 64)


@pytest.mark.parametrize(
    ("fields", "sync"),
    [
        ({}, "every"),  # Megatron-LM's FSDP
        ({"kernels": "torch"}, "last"),  # torch.distributed.pipelining
        ({"kernels": "compiled"}, "last"),
        ({"kernels": "torch", "pp": 1}, "every"),  # set_requires_gradient_sync is the script's to call
        ({"kernels": "torch", "gradient_sync": "every"}, "every"),
    ],
)
@pytest.mark.parametrize("hook", ["zero2", "zero3"])
def test_what_is_done_by_default_is_what_the_framework_does(played, hook, fields, sync) -> None:
    fields = {"pp": 2, "bucket": "1 GB"} | fields
    units = (6 // fields["pp"]) if hook == "zero3" else 1
    assert counted(played(data_parallel=hook, **fields))["reduce_scatter"] == units * (4 if sync == "every" else 1)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"data_parallel": "zero2", "pp": 2}, True),
        ({"data_parallel": "zero2", "pp": 2, "gradient_sync": "every"}, False),
        ({"data_parallel": "zero2", "pp": 2, "kernels": "torch"}, False),
        ({"data_parallel": "zero2"}, False),
        ({"data_parallel": "zero1", "pp": 2}, False),
    ],
)
def test_the_answer_says_that_every_microbatch_reduces(plan, said) -> None:
    """Where nobody asked for it, and a pipeline has many microbatches."""
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", plan=plan)
    note = "gradients are reduced in every microbatch; plan.gradient_sync=last reduces them once"
    assert any(note in text for text in job.notes) == said


def test_deepspeeds_pipelines_are_refused_with_sharded_gradients() -> None:
    """deepspeed/runtime/pipe/engine.py: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism."""
    plan = {"pp": 2, "deepspeed": {}, "data_parallel": "zero2"}
    with pytest.raises(UserError, match="contradicts pp=2: DeepSpeed's pipelines are incompatible with ZeRO-2 and ZeRO-3"):
        read_job(model="llama-3.1-8b", cluster="dgx-h100", plan=plan).resolve()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"data_parallel": "zero1"}, "contradicts data_parallel=zero1"),
        ({"data_parallel": "zero2", "deepspeed": {}}, "contradicts deepspeed"),
        ({"deepspeed": {}}, "contradicts deepspeed"),
        ({"offload": {"optimizer": "cpu"}}, "contradicts offload"),
    ],
)
def test_refused(plan, message) -> None:
    fields = {"data_parallel": "zero3", "gradient_sync": "last"} | plan
    with pytest.raises(UserError, match=f"gradient_sync=last {message}"):
        read_job(model="llama-3.1-8b", cluster="dgx-h100", plan=fields).resolve()


def test_a_pipelines_gradients_are_reduced_after_its_last_backward_pass(played) -> None:
    """torch 2.13's `perform_reduce_grad`, in a pipeline of two stages already; without one they are reduced beside that pass."""

    def first_reduction_and_last_pass(**plan) -> tuple[float, float]:
        rows = [row for row in played(gradient_sync="last", **plan).rows() if row.lane == 0]
        return (
            min(row.start for row in rows if row.kind == "reduce_scatter"),
            max(row.end for row in rows if row.kind == "backward"),
        )

    reduced, passed = first_reduction_and_last_pass(pp=2)
    assert reduced >= passed
    reduced, passed = first_reduction_and_last_pass()
    assert reduced < passed


@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize("hook", ["zero2", "zero3"])
def test_gradients_are_given_back_as_often_as_they_are_made(played, hook: str, sync: str) -> None:
    ops = played(data_parallel=hook, gradient_sync=sync).program.cohorts[0].ops
    allocated, given = (
        sum(size for op in ops for kind, size in getattr(op, way) if kind == "gradient") for way in ("allocate", "free")
    )
    assert allocated == given


@pytest.mark.parametrize("hook", ["zero2", "zero3"])
@pytest.mark.parametrize(("kernels", "sync", "times"), [("megatron", "every", 1), ("torch", "every", 4), ("torch", "last", 1)])
def test_replicas_of_megatrons_shards_sum_once(played, hook, kernels, sync, times) -> None:
    """Two replicas of shards on two ranks each: an all-reduce of 2 · (2 − 1)/2 of a shard, Ψ/2 in bf16. Megatron-LM's FSDP
    passes outer_fsdp_group_grad_reduce in the last microbatch (megatron_fsdp.py); FSDP2 all-reduces whatever it reduces.
    """
    timeline = played(data_parallel=hook, shard=2, kernels=kernels, gradient_sync=sync)
    size, _ = volumes(timeline)[0]["replica"]
    assert size == times * 2 * timeline.program.parameters / 2
