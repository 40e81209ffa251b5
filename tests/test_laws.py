"""Laws that hold for any job: random plans × clusters, played with prices in which everything costs something."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from sim.analysis.breakdown import breakdowns
from sim.analysis.memory import ledger
from sim.analysis.volume import volumes
from sim.engine.player import run
from sim.program import SIDE_STREAM, Collective
from sim.timeline import Timeline
from strategies.data_parallel import hooks
from strategies.lowering.lower import lower
from strategies.schedules import schedules
from topologies.reading import UserError

DEEPSPEED = (
    {"reduce_bucket_size": 50_000},
    {
        "reduce_bucket_size": 50_000,
        "stage3_prefetch_bucket_size": 60_000,
        "stage3_max_live_parameters": 150_000,
        "stage3_param_persistence_threshold": 100,
        "stage3_max_reuse_distance": 90_000,
    },
    {"zero_quantized_weights": True, "zero_quantized_gradients": True, "stage3_param_persistence_threshold": 0},
    {"tiles": 3, "reduce_bucket_size": 50_000, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 10_000},
)
CPU = {"memory": "1 TB", "memory_bandwidth": "9 GB/s", "disk": "1 TB", "disk_read": "3 GB/s", "disk_write": "2 GB/s"}
usual = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8]),
        "pp": st.sampled_from([1, 2, 4]),
        "sequence_parallel": st.booleans(),
        "cp": st.sampled_from([1, 1, 2, 4]),
        "cp_method": st.sampled_from(["ring", "ulysses"]),
        "overlap_tp": st.sampled_from([None, "none", "weight_gradient"]),
        "ep": st.sampled_from([1, 1, 2]),
        "schedule": st.sampled_from(list(schedules)),
        "data_parallel": st.sampled_from(list(hooks)),
        "microbatch": st.integers(1, 2),
        "accumulation": st.integers(1, 5),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "attention": st.sampled_from(["flash", "materialised"]),
        "overlap": st.booleans(),
        "overlap_p2p": st.booleans(),
        "bucket": st.sampled_from([None, "10 kB", "100 kB", "25 MB"]),
        "optimizer": st.sampled_from(["adam", "sgd"]),
        "precision": st.sampled_from(["bf16", "fp32"]),
        "gradients": st.sampled_from(["same", "fp32"]),
        "shard": st.sampled_from([None, 2, 4]),
        "reshard": st.booleans(),
        "order": st.sampled_from(["tp-cp-ep-dp-pp", "dp-tp-pp-cp-ep", "pp-tp-cp-ep-dp"]),
    }
)
zeros = st.fixed_dictionaries(
    {
        "data_parallel": st.sampled_from(["zero1", "zero2", "zero3", "zero3"]),
        "tp": st.sampled_from([1, 2]),
        "pp": st.just(1),
        "cp": st.just(1),
        "ep": st.just(1),
        "schedule": st.just("1f1b"),
        "shard": st.none(),
        "reshard": st.just(True),
        "order": st.just("tp-cp-ep-dp-pp"),
        "deepspeed": st.sampled_from([None, *DEEPSPEED]),
        "offload": st.sampled_from([None, {"optimizer": "cpu", "tile": 4096}, {"optimizer": "nvme", "parameters": "nvme"}]),
    }
)
hosted = st.builds(lambda plan, more: {name: value for name, value in plan.items() if name != "bucket"} | more, usual, zeros)
plans = st.one_of(usual, hosted)
EXPERTS = {"experts": 8, "chosen": 2, "ffn": 64, "shared": 1, "first_dense": 1}
models = st.fixed_dictionaries(
    {
        "layers": st.integers(4, 6),
        "tied": st.booleans(),
        "gated": st.booleans(),
        "experts": st.sampled_from([None, None, EXPERTS]),
    }
)
READ_FROM_DISK = {
    **{
        "tp": 2,
        "pp": 1,
        "sequence_parallel": False,
        "cp": 1,
        "cp_method": "ring",
        "overlap_tp": None,
        "ep": 1,
        "schedule": "1f1b",
    },
    **{"data_parallel": "zero3", "microbatch": 1, "accumulation": 1, "recompute": "none", "attention": "flash", "overlap": True},
    **{"overlap_p2p": False, "optimizer": "adam", "precision": "bf16", "gradients": "same", "shard": None, "reshard": True},
    **{"order": "tp-cp-ep-dp-pp", "deepspeed": None, "offload": {"optimizer": "nvme", "parameters": "nvme"}},
}
shapes = st.sampled_from([(8, 1), (4, 2), (8, 2), (2, 4)])
LINKS = {kind: {"efficiency": 0.9, "latency": "2 us"} for kind in ("nvlink", "pcie", "host", "nic", "leaf", "spine", "loopback")}
SOME = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
)


@pytest.fixture
def play(toy_job, toy_prices) -> Callable[..., Timeline]:
    """play(plan, model, (gpus, nodes), …): the timeline, or give up on plans that are refused."""

    def player(
        plan: dict, model: dict, shape: tuple[int, int], node: dict | None = None, fold: bool = True, **prices
    ) -> Timeline:
        try:
            job = toy_job(*shape, model=model, node={"cpu": CPU} | (node or {"nvlink": "9 GB/s"}), **plan)
            program = lower(job.model, job.resolve())
        except UserError:
            assume(False)
        priced = toy_prices(**{"links": LINKS, "launch": "1 us", "slowdown": 1.2, "collective_launch": "3 us"} | prices)
        return run(program, job.cluster.topology(), priced, fold=fold)

    return player


@given(plan=plans, model=models, shape=shapes)
@SOME
def test_every_timeline_is_consistent(play, plan, model, shape) -> None:
    timeline = play(plan, model, shape)
    for lane, parts in enumerate(breakdowns(timeline)):
        assert sum(parts.values()) == timeline.step
        assert min(parts.values()) >= 0
        streams: dict[str, float] = {}
        for number, op in timeline.ops(lane):
            assert timeline.start[number] >= streams.get(op.stream, 0.0)  # in order, one at a time
            assert all(timeline.end[timeline.offset[c] + o] <= timeline.start[number] for c, o in op.after)
            streams[op.stream] = timeline.end[number]
        held = ledger(timeline, lane).held
        assert held.min() >= -1e-6
        resident = sum(size for _, size in timeline.program.cohorts[timeline.lanes[lane].cohort].resident)
        assert held[-1].sum() == pytest.approx(resident)


@given(plan=plans.map(lambda plan: plan | {"data_parallel": "zero3"}), model=models, shape=shapes)
@SOME
def test_a_communicator_runs_one_collective_at_a_time(play, plan, model, shape) -> None:
    """NCCL runs the collectives of one process group one after the other, gathers and reductions alike."""
    timeline = play(plan, model, shape)
    for lane in range(len(timeline.lanes)):
        spans = sorted(
            (timeline.start[number], timeline.end[number], op.work.axes)
            for number, op in timeline.ops(lane)
            if isinstance(op.work, Collective) and not op.work.cohorts and op.work.operation != "all_to_all"
        )
        for axes in {axes for _, _, axes in spans}:
            mine = [(start, end) for start, end, of in spans if of == axes]
            assert all(before[1] <= after[0] for before, after in pairwise(mine))


@given(plan=plans, model=models, shape=shapes)
@example(plan=READ_FROM_DISK, model={"layers": 4, "tied": False, "gated": False, "experts": EXPERTS}, shape=(8, 1))
@SOME
def test_folded_equals_unfolded(play, plan, model, shape) -> None:
    """By rings, in which all members are alike; in a tree they are not, and ranks that one actor stands for differ a little.
    Where something contends the blocks of ranks by themselves are cut. The example's host is held up while a disk is still read,
    by a read that met nothing: the next one, launched meanwhile, begins behind it.
    """
    plan = plan | {"algorithm": "ring"}
    folded, unfolded = (play(plan, model, shape, fold=fold) for fold in (True, False))
    first = {lane.cohort: number for number, lane in reversed(list(enumerate(unfolded.lanes)))}
    assert unfolded.step == pytest.approx(folded.step, rel=1e-3)
    inside = ("compute", SIDE_STREAM) if len(unfolded.program.cohorts[0].ops) > len(folded.program.cohorts[0].ops) else ()
    for lane, actor in enumerate(folded.lanes):
        ends, own = (
            [played.end[number] for number, op in played.ops(each) if op.stream not in inside]
            for played, each in ((folded, lane), (unfolded, first[actor.cohort]))
        )
        assert ends == pytest.approx(own, rel=1e-3)


@given(plan=plans, model=models, shape=shapes)
@SOME
def test_faster_hardware_never_slows_a_step(play, plan, model, shape) -> None:
    """No slowdown, no launches, twice the NVLink, twice the NIC: each on its own.

    Exact where transfers follow each other, each with one slowest link (rings). Where they overlap, finishing one earlier can
    make it meet another that matters more (Graham 1969, doi:10.1137/0117039: anomalies of schedules): then the step may grow,
    but by little.
    """
    exact = plan["pp"] == 1 and not plan["overlap"] and plan["shard"] is None
    plan, more = (plan | {"algorithm": "ring"}, 1e-9) if exact else (plan, 0.05)
    slow = play(plan, model, shape).step
    calm = play(plan, model, shape, slowdown=1.0).step
    assert calm <= slow * (1 + more)
    assert play(plan, model, shape, slowdown=1.0, launch="0 s").step <= calm * (1 + more)
    for node in ({"nvlink": "18 GB/s"}, {"nvlink": "9 GB/s", "nic": "2 GB/s"}):
        assert play(plan, model, shape, node=node, slowdown=1.0).step <= calm * (1 + more)


@given(plan=usual, model=models, pp=st.sampled_from([2, 4]))
@SOME
def test_of_more_microbatches_none_takes_longer(play, plan, model, pp) -> None:
    """Their share of bubble may grow, though: see `test_more_microbatches_move_idle_time_from_launches_to_bubble`."""
    plan = plan | {"pp": pp, "algorithm": "ring", "shard": None, "ep": 1, "data_parallel": "ddp", "reshard": True}
    # gradients are added to; groups of pp microbatches are whole, as interleaved schedules fill up those that are not
    plan["accumulation"] = pp * (1 + plan["accumulation"] % 3)
    shape = (pp * plan["tp"] * plan["cp"], 1)
    few, many = (play(plan | {"accumulation": times * plan["accumulation"]}, model, shape).step for times in (1, 2))
    assert many <= 2 * few * (1 + 1e-3)


@given(plan=plans, model=models, shape=shapes)
@SOME
def test_overlap_and_order_of_dp_ranks_change_no_volume(play, plan, model, shape) -> None:
    sent = volumes(play(plan, model, shape))
    other = volumes(play(plan | {"overlap": not plan["overlap"], "order": "tp-cp-ep-dp-pp"}, model, shape))
    for mine, theirs in zip(sent, other, strict=True):
        assert mine.keys() == theirs.keys()
        for axis in mine:
            assert mine[axis] == pytest.approx(theirs[axis])
