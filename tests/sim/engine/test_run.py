"""Playing programs: order, waiting, host, contention, slowdown; folding; exact sums."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from shardyard import read_job, simulate
from sim.analysis.breakdown import breakdown, breakdowns
from sim.analysis.memory import ledger
from sim.analysis.summary import summarise
from sim.engine.blocks.splitting import expand
from sim.engine.player import run
from sim.pricing.op_costs import ROUND_TRIP
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.program import SIDE_STREAM, Block, Cohort, Collective, Op, Ref, Run, Send
from strategies.lowering.lower import lower
from tests.sim.conftest import block, kernel, program
from topologies.reading import UserError


def test_a_stream_is_in_order_and_streams_wait_only_where_told(toy_cluster, toy_prices) -> None:
    cohort = Cohort(
        {},
        [
            Op("compute", block(3.0)),
            Op("dp", Collective("all_gather", 2e9, "dp", "gather")),
            Op("compute", block(1.0), (Ref(0, 1),)),
            Op("dp", Collective("all_gather", 2e9, "dp", "gather"), (Ref(0, 0),)),
        ],
    )
    timeline = run(program(cohort, dp=2), toy_cluster(2).topology(), toy_prices())
    assert [(row.start, row.end) for row in timeline.rows()] == [(0, 3), (0, 1), (3, 4), (3, 4)]
    assert timeline.step == 4.0


def test_deadlock_is_an_error(toy_cluster, toy_prices) -> None:
    cohort = Cohort({}, [Op("compute", block(1.0), (Ref(0, 1),)), Op("compute", block(1.0))])
    with pytest.raises(UserError, match="waits for itself"):
        run(program(cohort), toy_cluster(1).topology(), toy_prices())


@pytest.mark.parametrize(("kernel_seconds", "expected"), [(3.0, 1 + 5 * 3.0), (0.5, 5 * 1.0 + 0.5)])
def test_small_kernels_are_bound_by_their_launches(kernel_seconds, expected, toy_cluster, toy_prices) -> None:
    """Launching takes 1 s each: five long kernels hide four launches; five short ones run as they are launched."""
    cohort = Cohort({}, [Op("compute", block(kernel_seconds, times=5))])
    timeline = run(program(cohort), toy_cluster(1).topology(), toy_prices(launch="1 s"))
    assert timeline.step == pytest.approx(expected)
    assert breakdowns(timeline)[0]["launch"] == pytest.approx(expected - 5 * kernel_seconds)


@pytest.mark.parametrize(("microbatches", "bubble"), [(2, 0.0), (4, 1.0), (8, 9.0), (16, 25.0)])
def test_a_host_that_gets_ahead_waits_for_its_neighbour_in_place_of_itself(microbatches, bubble, toy_cluster, toy_prices) -> None:
    """A launch takes 1 s, a kernel nothing: stage 0 launches two per microbatch, stage 1 four at first and then one. From the
    fourth microbatch on its host is ahead, and what it waits for is stage 0: the share of bubble grows with the microbatches.
    """
    first = Cohort({"pp": 0}, [Op("compute", block(0.0, 0.0)) for _ in range(microbatches)])
    waiting = [Op("compute", block(0.0), (Ref(0, microbatch),)) for microbatch in range(microbatches)]
    second = Cohort({"pp": 1}, [Op("compute", block(*[0.0] * 4)), *waiting])
    timeline = run(program(first, second, pp=2), toy_cluster(2).topology(), toy_prices(launch="1 s"))
    assert timeline.step == max(4 + microbatches, 2 * microbatches)
    assert breakdowns(timeline)[1]["bubble"] == bubble


HOST_BOUND = [
    ("gb200-nvl72", 2, dict(tp=8, pp=2, schedule="zb-h1", accumulation=8)),
    ("dgx-a100", 1, dict(tp=2, pp=2, schedule="zb-h2", accumulation=6, sequence_parallel=True, kernels="torch")),
    ("aws-p5", 1, dict(tp=4, pp=2, accumulation=6)),
    ("perlmutter", 4, dict(tp=4, pp=4, schedule="zb-h1", accumulation=16, sequence_parallel=True)),
]


@pytest.mark.parametrize(("cluster", "nodes", "plan"), HOST_BOUND, ids=str)
def test_more_microbatches_move_idle_time_from_launches_to_bubble(cluster, nodes, plan) -> None:
    """Of small layers launches take longer than kernels. The hosts of lighter stages get ahead by a little in every microbatch,
    until these wait for the heaviest stage, whose own bubble stays what filling and draining takes. Together they are no more.
    """
    model = {"name": "small", "hidden": 256, "layers": 4, "heads": 16, "vocabulary": 1000, "context": 256}
    bubbles, shares, both = [], [], []
    for times in (1, 2, 4):
        more = plan | {"accumulation": times * plan["accumulation"]}
        timeline = simulate(read_job(model=model, cluster=cluster, nodes=nodes, plan=more))
        bubbles.append(min(parts["bubble"] for parts in breakdowns(timeline)))
        parts, step = breakdown(timeline), timeline.step
        shares.append(parts["bubble"] / step)
        both.append((parts["bubble"] + parts["launch"]) / (step - parts["optimizer"] - parts["dp exposed"]))
    assert shares[0] + 0.01 < shares[1] < shares[2]
    assert bubbles == pytest.approx([bubbles[0]] * 3, rel=0.01)
    assert both == pytest.approx([both[0]] * 3, abs=0.02)


def test_synchronous_launches_are_part_of_the_kernel(toy_cluster, toy_prices) -> None:
    cohort = Cohort({}, [Op("compute", block(0.5, times=4))])
    assert run(program(cohort), toy_cluster(1).topology(), toy_prices(launch="1 s", synchronous=True)).step == pytest.approx(6.0)


def test_traffic_shares_a_link(toy_cluster, toy_prices) -> None:
    """Two sends of 4 GB leave GPU 0 at 1 GB/s: together they take 8 s, one of them half its rate until then."""
    cohorts = [Cohort({"pp": 0}, [Op("a", Send(4e9, 1, "x")), Op("b", Send(4e9, 2, "y"))]), Cohort({"pp": 1}), Cohort({"pp": 2})]
    timeline = run(program(*cohorts, pp=3), toy_cluster(3).topology(), toy_prices())
    assert [row.end for row in timeline.rows()] == pytest.approx([8.0, 8.0])


def test_compute_is_slower_while_a_collective_runs(toy_cluster, toy_prices) -> None:
    """2 s of gathering beside 4 s of compute at half speed: 1 s of work is done by then, 3 s are left."""
    cohort = Cohort({}, [Op("compute", block(4.0)), Op("dp", Collective("all_gather", 4e9, "dp", "gather"))])
    timeline = run(program(cohort, dp=2), toy_cluster(2).topology(), toy_prices(slowdown=2.0))
    assert timeline.step == pytest.approx(5.0)
    parts = breakdowns(timeline)[0]
    assert parts == pytest.approx(dict.fromkeys(parts, 0.0) | {"forward": 4.0, "slowdown": 1.0})


def test_kernels_that_wait_for_their_launches_slow_down_by_their_own_time(toy_cluster, toy_prices) -> None:
    """The host launches a collective of 20 s, then four kernels of 0.5 s, 1 s each: the last would end after 5.5 s. They are 2
    of these, taken to be spread evenly, and take twice as long from 1 s on, when the collective is launched.
    """
    cohort = Cohort({}, [Op("dp", Collective("all_gather", 4e10, "dp", "gather")), Op("compute", block(0.5, times=4))])
    timeline = run(program(cohort, dp=2), toy_cluster(2).topology(), toy_prices(launch="1 s", slowdown=2.0))
    assert [row.end for row in timeline.rows() if row.op.stream == "compute"] == pytest.approx([5.5 + 4.5 * 2 / 5.5])
    parts = breakdowns(timeline)[0]
    assert (parts["forward"], parts["slowdown"], parts["launch"]) == pytest.approx((2.0, 4.5 * 2 / 5.5, 3.5))


def test_blocks_whose_collectives_meet_other_traffic_are_played_item_by_item(toy_cluster, toy_prices) -> None:
    """tp and dp share the ports of one node: the tp all-gather (1 s alone) takes 2 s beside the dp one."""
    inline = Block("forward", (Run(1, (kernel(1.0), Collective("all_gather", 2e9, "tp", "inline"))),))
    cohort = Cohort({}, [Op("compute", inline), Op("dp", Collective("all_gather", 8e9, "dp", "gather"))])
    timeline = run(program(cohort, tp=2, dp=2), toy_cluster(4).topology(), toy_prices())
    compute = [row for row in timeline.rows() if row.op.stream == "compute"]
    assert compute[-1].end == pytest.approx(3.0)
    assert timeline.step == pytest.approx(1 + 4.0)
    assert breakdowns(timeline)[0]["tp exposed"] == pytest.approx(2.0)


def test_the_ledger_gives_back_before_it_takes(toy_cluster, toy_prices) -> None:
    ops = [
        Op("compute", block(1.0), allocate=(("activation", 5.0),)),
        Op("compute", block(1.0), free=(("activation", 5.0),)),
        Op("compute", block(1.0), allocate=(("temporary", 4.0),), free=(("temporary", 4.0),)),
    ]
    timeline = run(program(Cohort({}, ops, (("parameter", 2.0),))), toy_cluster(1).topology(), toy_prices())
    book = ledger(timeline, 0)
    assert book.peak == 7.0
    assert book.at_peak["activation"] == 5.0
    assert book.held[-1].sum() == 2.0


PLANS = [
    dict(data_parallel="ddp", accumulation=2),
    dict(data_parallel="zero1", tp=2, sequence_parallel=True, accumulation=2),
    dict(data_parallel="zero3", accumulation=2),
    dict(pp=2, tp=2, accumulation=4),
    dict(pp=4, accumulation=6, data_parallel="zero2"),
    dict(pp=2, schedule="naive", accumulation=3, recompute="full"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("nodes", [1, 2])
def test_folded_equals_unfolded(plan, nodes, toy_job, toy_prices) -> None:
    """Every rank of the unfolded run has the times of its cohort, to the bit. Where something contends its blocks are cut, and
    pieces of them are as near as the parts of a transfer that are rounded one by one.
    """
    job = toy_job(8, nodes, bucket="20 kB", **plan)
    program = lower(job.model, job.resolve())
    prices = toy_prices(launch="1 us", slowdown=1.2, collective_launch="3 us")
    folded, unfolded = (run(program, job.cluster.topology(), prices, fold=fold) for fold in (True, False))
    cut = len(folded.program.cohorts[0].ops) < len(unfolded.program.cohorts[0].ops)
    near = partial(pytest.approx, abs=1e-10 if cut else 0.0, rel=0.0)
    inside = ("compute", SIDE_STREAM) if cut else ()
    times: dict[int, list[float]] = {}
    for row in folded.rows():
        if row.op.stream not in inside:
            times.setdefault(folded.lanes[row.lane].cohort, []).extend((row.start, row.end))
    assert len(unfolded.lanes) == 8 * nodes
    for lane, actor in enumerate(unfolded.lanes):
        ops = [number for number, op in unfolded.ops(lane) if op.stream not in inside]
        assert [time for number in ops for time in (unfolded.start[number], unfolded.end[number])] == near(times[actor.cohort])
    first = {lane.cohort: number for number, lane in reversed(list(enumerate(unfolded.lanes)))}
    for lane, parts in zip(folded.lanes, breakdowns(folded), strict=True):
        assert parts == near(breakdowns(unfolded)[first[lane.cohort]])


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("plan", [dict(tp=2, accumulation=2), dict(pp=2, tp=2, accumulation=4), dict(pp=4, tp=2, accumulation=6)])
def test_folded_is_near_unfolded_by_trees(plan, nodes, toy_job, toy_prices) -> None:
    """Members of a tree are not alike: where its traffic meets other traffic, ranks of one cohort differ, and folding is near."""
    job = toy_job(8, nodes, bucket="20 kB", data_parallel="ddp", algorithm="tree", **plan)
    program, prices = lower(job.model, job.resolve()), toy_prices(launch="1 us", slowdown=1.2, collective_launch="3 us")
    folded, unfolded = (run(program, job.cluster.topology(), prices, fold=fold).step for fold in (True, False))
    assert folded == pytest.approx(unfolded, rel=0.03)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_breakdown_sums_to_the_step_exactly(plan, toy_job, toy_prices) -> None:
    job = toy_job(8, 2, bucket="20 kB", **plan)
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices(launch="1 us", slowdown=1.3))
    for parts in breakdowns(timeline):
        assert sum(parts.values()) == timeline.step  # equal, not almost
        assert min(parts.values()) >= 0
    assert sum(breakdown(timeline).values()) == pytest.approx(timeline.step, rel=1e-12)


@pytest.mark.parametrize(
    "plan", [dict(tp=8), dict(tp=8, pp=2), dict(tp=8, data_parallel="zero3"), dict(tp=8, pp=2, data_parallel="zero1")], ids=str
)
def test_cost_does_not_depend_on_dp(plan, toy_job, toy_prices) -> None:
    """The same job at dp × 64 takes the same number of events (by rings: trees have log n parts)."""
    counts = []
    for nodes in (32, 2048):
        job = toy_job(8, nodes, accumulation=4, bucket="20 kB", algorithm="ring", **plan)
        assert job.resolve().dp > 1
        timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
        counts.append((timeline.events, len(timeline.end)))
    assert counts[0] == counts[1]


def test_cost_of_a_real_job_does_not_depend_on_dp() -> None:
    """GPT-3 175B at dp 8 and dp 512 (32,768 GPUs): the same ops; by rings a few more events where sends meet all-reduces."""
    runs = []
    for nodes in (64, 4096):
        plan = dict(tp=8, pp=8, accumulation=64, recompute="full", algorithm="ring", bucket="160 MB")
        runs.append(simulate(read_job(model="gpt3-175b", cluster="dgx-a100", nodes=nodes, plan=plan)))
    assert len(runs[0].end) == len(runs[1].end)
    assert runs[1].events == pytest.approx(runs[0].events, rel=0.5)


def test_runs_repeat_exactly(toy_job, toy_prices) -> None:
    job = toy_job(8, 2, pp=4, accumulation=6, data_parallel="zero1")
    runs = [run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices(slowdown=1.1)) for _ in range(2)]
    assert runs[0].end == runs[1].end
    assert summarise(runs[0]) == summarise(runs[1])


def test_the_front_door_gives_the_same(toy_job) -> None:
    job = toy_job(8, dp=8)
    prices = Prices(load_profile("generic"), job.cluster.node.gpu)
    assert simulate(job).step == run(lower(job.model, job.resolve()), job.cluster.topology(), prices).step


@pytest.mark.parametrize(("eager", "expected"), [(False, 0.1 + 5 * 0.5), (True, 5 * 1.0 + 0.5)])
def test_python_modules_launch_slower_than_compiled_code(eager, expected, toy_cluster, toy_prices) -> None:
    step = replace(program(Cohort({}, [Op("compute", block(0.5, times=5))])), eager=eager)
    timeline = run(step, toy_cluster(1).topology(), toy_prices(launch="0.1 s", eager="1 s"))
    assert timeline.step == pytest.approx(expected)


def test_a_host_that_waits_for_every_kernel_hides_no_launch(toy_cluster, toy_prices) -> None:
    """CUDA_LAUNCH_BLOCKING=1: a launch of 0.1 s, a kernel of 0.5 s and the way back, one after the other, five times."""
    step = replace(program(Cohort({}, [Op("compute", block(0.5, times=5))])), blocking=True)
    timeline = run(step, toy_cluster(1).topology(), toy_prices(launch="0.1 s"))
    assert timeline.step == pytest.approx(5 * (0.1 + 0.5 + ROUND_TRIP), rel=1e-9)


def test_a_host_that_is_held_up_launches_nothing_ahead(toy_cluster, toy_prices) -> None:
    """The other rank sends after 10 s. A host that runs ahead has launched 5 kernels by then; one that waits begins then."""
    works = {"pp": 0}, {"pp": 1}
    for held, expected in ((False, 10 + 5 * 0.5), (True, 10 + 5 * 1.0 + 0.5)):
        first = Cohort(works[0], [Op("compute", block(9.0)), Op("pp next", Send(1.0, 1, "activations"), (Ref(0, 0),))])
        second = Cohort(works[1], [Op("compute", block(0.5, times=5), (Ref(0, 1),), held=held)])
        timeline = run(program(first, second, pp=2), toy_cluster(2).topology(), toy_prices(launch="1 s"))
        assert timeline.step == pytest.approx(expected, rel=1e-3)


def test_a_block_cut_at_its_collectives_still_holds_the_host_up(toy_cluster, toy_prices) -> None:
    """As above, with collectives inside the block that meet other traffic: then it is played piece by piece."""
    steps = []
    for held in (False, True):
        first = Cohort({"pp": 0}, [Op("compute", block(9.0)), Op("pp next", Send(1.0, 1, "activations"), (Ref(0, 0),))])
        cut = Block("forward", (Run(3, (kernel(0.5), Collective("all_reduce", 1.0, "tp", "sums"))),))
        second = Cohort({"pp": 1}, [Op("compute", cut, (Ref(0, 1),), held=held)])
        expanded = expand(program(first, second, pp=2, tp=2), {1})
        steps.append(run(expanded, toy_cluster(4).topology(), toy_prices(launch="1 s")).step)
    assert steps[1] == pytest.approx(10 + 6 * 1.0, rel=1e-3)
    assert steps[0] < 10 + 3 * 0.5 + 0.1


def test_a_step_that_takes_no_time_is_a_mistake(toy_cluster, toy_prices) -> None:
    timeline = run(program(Cohort({}, [Op("compute", block(0.0))])), toy_cluster(1).topology(), toy_prices())
    with pytest.raises(UserError, match="a step of 0 s takes no time"):
        summarise(timeline)
