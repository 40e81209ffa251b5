"""dp ranks with different numbers of microbatches, against the same ranks with equal numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from shardyard import UserError, read_job, simulate, summarise
from sim.analysis.breakdown import breakdowns
from sim.replay.step import StepReplay
from sim.timeline import Timeline
from strategies.job import Job
from strategies.predict import predict
from tests.conftest import SMALL

NODE: dict[str, Any] = {"wiring": "switch", "nvlink": "100 GB/s", "pcie": "100 GB/s", "nics": 4, "nic": "10 GB/s", "gpus": 4}
MODEL = SMALL | {"hidden": 512, "layers": 8, "context": 512, "vocabulary": 4096}


@pytest.fixture
def job() -> Callable[..., Job]:
    """A small model on equal nodes of four H100."""

    def make(nodes: int = 2, **plan: Any) -> Job:
        cluster = {"name": "small", "node": NODE | {"gpu": "h100-sxm"}, "fabric": {"kind": "single"}}
        return read_job(None, model=MODEL, cluster=cluster, nodes=nodes, plan={"sequence": 512, "data_parallel": "zero1"} | plan)

    return make


def compute_ends(timeline: Timeline, lane: int, until: float = inf) -> list[float]:
    ends = [timeline.end[number] for number, op in timeline.ops(lane) if op.stream == "compute" and op.microbatch >= 0]
    return [end for end in ends if end < until]


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 4},
        {"tp": 2, "pp": 2},
        {"pp": 4, "schedule": "gpipe"},
        {"pp": 4, "schedule": "interleaved", "chunks": 2},
        {"pp": 4, "schedule": "zb-h1"},
        {"tp": 4, "kernels": "torch", "data_parallel": "ddp"},
        {"cp": 2, "tp": 2},
        {"tp": 4, "data_parallel": "zero2", "kernels": "torch", "gradient_sync": "last"},
    ],
)
def test_each_replica_does_what_it_does_among_its_like(job, plan: dict[str, Any]) -> None:
    """Eight GPUs are two replicas: the step is that of the busier one, and both compute and hold what they would with as many
    microbatches on all replicas.
    """
    few, many = (simulate(job(**plan, accumulation=count)) for count in (4, 8))
    both = simulate(job(**plan, microbatches_per_replica=(4, 8)))
    assert both.step == many.step
    lanes = {lane.rank: number for number, lane in enumerate(both.lanes)}
    meeting = min(few.start[number] for lane in range(len(few.lanes)) for number, op in few.ops(lane) if op.stream == "dp")
    for number, lane in enumerate(few.lanes):  # until gradients are on the links; blocks may be cut where replicas differ
        ends = compute_ends(both, lanes[lane.rank])  # of kernels beside collectives to a microsecond: sim/pricing/block_costs.py
        assert all(min(abs(end - other) for other in ends) < 1e-6 for end in compute_ends(few, number, meeting))
    stages = {stage.rank: stage for stage in summarise(both).memory}
    for equal, ranks in ((few, [lane.rank for lane in few.lanes]), (many, [])):
        for stage in summarise(equal).memory:
            if stage.rank in ranks:
                assert stages[stage.rank].kinds == stage.kinds
    for parts in breakdowns(both):
        assert sum(parts.values()) == both.step
    assert simulate(job(**plan, microbatches_per_replica=(4, 8)), fold=False).step == both.step


def test_tokens_and_flops_are_those_of_all_replicas(job) -> None:
    equal, uneven = predict(job(tp=4, accumulation=6)), predict(job(tp=4, microbatches_per_replica=(4, 8)))
    assert uneven.tokens_per_second * uneven.step_seconds == pytest.approx(12 * 512, rel=1e-12)
    assert uneven.mfu * uneven.step_seconds == pytest.approx(equal.mfu * equal.step_seconds, rel=1e-12)


def test_equal_numbers_are_an_accumulation(job) -> None:
    assert simulate(job(tp=4, microbatches_per_replica=(4, 4))).end == simulate(job(tp=4, accumulation=4)).end


def test_join_gives_the_first_ranks_one_more(job) -> None:
    joined = job(nodes=1, global_batch=14, uneven_batch="join")
    assert joined.resolve().allotted == (4, 4, 3, 3)
    assert simulate(joined).step == simulate(job(nodes=1, accumulation=4)).step
    assert job(nodes=1, global_batch=16, uneven_batch="join").resolve().allotted == ()


def test_drop_last_leaves_sequences_out_and_says_so(job) -> None:
    fewer = job(nodes=1, global_batch=14, uneven_batch="drop_last")
    assert fewer.resolve().global_batch == 12
    assert predict(fewer).step_seconds == predict(job(nodes=1, global_batch=12)).step_seconds
    assert "uneven_batch=drop_last: 2 of 14 sequences of a step are not trained on" in fewer.notes


def passes(timeline: Timeline, lane: int, microbatch: int) -> list[float]:
    """Seconds of the blocks of a microbatch."""
    ops = [number for number, op in timeline.ops(lane) if op.stream == "compute" and op.microbatch == microbatch]
    return [timeline.end[number] - timeline.start[number] for number in ops]


def test_a_last_microbatch_that_is_not_full(job) -> None:
    """11 sequences are microbatches of 4, 4 and 3, each as long as among its like; tokens and FLOPs are of 11."""
    partial = simulate(job(nodes=1, tp=4, microbatch=4, global_batch=11, uneven_batch="partial"))
    full, short = (simulate(job(nodes=1, tp=4, microbatch=size, accumulation=3)) for size in (4, 3))
    assert [passes(partial, 0, each) for each in (0, 1)] == [passes(full, 0, each) for each in (0, 1)]
    assert passes(partial, 0, 2) == passes(short, 0, 2) != passes(full, 0, 2)
    assert full.step - partial.step == pytest.approx(sum(passes(full, 0, 2)) - sum(passes(short, 0, 2)), rel=1e-9)
    assert partial.program.tokens == 11 * 512
    assert partial.program.model_flops == pytest.approx(11 / 12 * full.program.model_flops, rel=1e-12)
    assert summarise(partial).memory == summarise(full).memory


PARTIAL: list[dict[str, Any]] = [
    {},
    {"tp": 2, "pp": 2},
    {"pp": 4, "schedule": "gpipe"},
    {"pp": 4, "schedule": "zb-h1"},
    {"pp": 2, "schedule": "interleaved", "chunks": 2},
    {"data_parallel": "zero3", "kernels": "torch"},
    {"data_parallel": "zero3"},
    {"data_parallel": "zero2", "tp": 2},
    {"cp": 2, "data_parallel": "ddp"},
]


@pytest.mark.parametrize("plan", PARTIAL, ids=str)
def test_dp_ranks_have_equally_many_sequences_or_one_more(job, plan: dict[str, Any]) -> None:
    """The step is that of the ranks that have more; the others compute as among ranks that have as many as they."""
    resolved = job(**plan, microbatch=4, accumulation=1).resolve()
    dp, pp = resolved.dp, resolved.pp
    sizes = 4 * pp + 3 if pp > 1 else 11, 4 * pp + 2 if pp > 1 else 10
    batches = dp * sizes[0], dp * sizes[0] - dp // 2, dp * sizes[1]
    many, both, few = (simulate(job(**plan, microbatch=4, global_batch=size, uneven_batch="partial")) for size in batches)
    assert both.step == pytest.approx(many.step, rel=1e-12)
    assert len(both.lanes) == 2 * len(many.lanes)
    for each in (many, few):  # until gradients are on the links; blocks may be cut where dp ranks differ
        starts = [
            each.start[at] for lane in range(len(each.lanes)) for at, op in each.ops(lane) if op.stream in ("dp", "replica")
        ]
        for lane in range(len(each.lanes)):
            ends = compute_ends(each, lane, min(starts))
            found = [compute_ends(both, other) for other in range(len(both.lanes))]
            assert any(all(min(abs(end - mine) for mine in other) < 1e-6 for end in ends) for other in found)
    for parts in breakdowns(both):
        assert sum(parts.values()) == both.step
    assert simulate(job(**plan, microbatch=4, global_batch=batches[1], uneven_batch="partial"), fold=False).step == both.step
    assert StepReplay(both).times().steps == pytest.approx(both.step, rel=1e-12)


def test_fewer_sequences_than_a_microbatch_each(job) -> None:
    """10 among 4 ranks are 3, 3, 2 and 2."""
    few = job(nodes=1, microbatch=4, global_batch=10, uneven_batch="partial")
    assert few.resolve().dealt == ((1, 3), (1, 3), (1, 2), (1, 2))
    assert simulate(few).step == simulate(job(nodes=1, microbatch=3, accumulation=1)).step
    said = "2 of 4 dp ranks have 3 sequences in a step, the others 2; the last microbatch of 4 is not full"
    assert f"uneven_batch=partial: {said}" in few.notes
    whole = job(nodes=1, microbatch=4, global_batch=32, uneven_batch="partial")
    assert (whole.resolve().dealt, simulate(whole).end) == ((), simulate(job(nodes=1, microbatch=4, accumulation=2)).end)


def test_faster_gpus_that_take_more_shorten_the_step() -> None:
    """Both replicas are busy for as long when microbatches are in the ratio of speeds: 4 · 2 t = 8 · t, in place of 6 · 2 t."""
    gpu = {"sms": 1, "memory": "1 TB", "peak": {"bf16": "1 TFLOP/s"}, "memory_bandwidth": "1 TB/s"}
    fast = gpu | {"peak": {"bf16": "2 TFLOP/s"}, "memory_bandwidth": "2 TB/s"}
    nodes = [{"count": 1, "node": NODE | {"gpu": each | {"name": name}}} for name, each in (("slow", gpu), ("fast", fast))]

    def step(**plan: Any) -> Timeline:
        fields = {"sequence": 512, "data_parallel": "ddp", "tp": 4, "kernels": "compiled"} | plan
        cluster = {"name": "mixed", "nodes": nodes, "fabric": {"kind": "single"}}
        return simulate(read_job(None, model=MODEL, cluster=cluster, plan=fields))

    even, uneven = step(accumulation=6), step(microbatches_per_replica=(4, 8))
    slow, fast_lane = (compute_ends(uneven, lane)[-1] for lane in range(2))
    assert fast_lane == pytest.approx(slow, rel=0.05)  # launches and latencies do not scale
    assert uneven.step < even.step
    assert compute_ends(even, 0)[-1] / slow == pytest.approx(6 / 4, rel=0.02)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tp": 4, "microbatches_per_replica": (1, 2, 3)}, "microbatches_per_replica has 3 numbers, and dp=2"),
        (
            {"tp": 4, "microbatches_per_replica": (1, 2), "accumulation": 2},
            "microbatches_per_replica and accumulation=2 both say",
        ),
        ({"tp": 4, "microbatches_per_replica": (1, 2), "global_batch": 4}, "global_batch=4 ≠ microbatch · the sum"),
        ({"tp": 4, "microbatches_per_replica": (1, 2), "data_parallel": "zero3"}, "with data_parallel=zero3 they meet in each"),
        ({"tp": 4, "global_batch": 7}, "global_batch=7 is not a multiple of dp·microbatch = 2·1; 6 and 8 are"),
        ({"tp": 4, "global_batch": 1, "uneven_batch": "join"}, "global_batch=1 is not a multiple of dp·microbatch = 2·1; 2 is"),
        (
            {"tp": 4, "global_batch": 7, "microbatch": 2, "uneven_batch": "join"},
            "global_batch=7 is not a multiple of microbatch=2",
        ),
        ({"global_batch": 3, "uneven_batch": "partial"}, "global_batch=3 is not a multiple of dp·microbatch = 8·1; 8 is"),
        (
            {"microbatch": 2, "global_batch": 23, "accumulation": 2, "uneven_batch": "partial"},
            "uneven_batch=partial and accumulation=2 both say how many microbatches",
        ),
        (
            {"microbatch": 2, "global_batch": 23, "uneven_batch": "partial", "pp": 8, "schedule": "dualpipe-v"},
            "uneven_batch=partial is not simulated with schedule=dualpipe-v, in which kernels of two microbatches take turns",
        ),
        (
            {"microbatch": 2, "global_batch": 23, "uneven_batch": "partial", "schedule": "pipedream", "data_parallel": "ddp"},
            "uneven_batch=partial is not simulated with schedule=pipedream",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(job, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        simulate(job(**plan))
    assert message in str(error.value)


def test_plans_that_say_nothing_of_it_are_written_as_before(job) -> None:
    assert not {"microbatches_per_replica", "uneven_batch"} & set(job(tp=4).plan.model_dump())
    assert job(tp=4, microbatches_per_replica=(1, 2)).hash != job(tp=4, microbatches_per_replica=(2, 1)).hash
