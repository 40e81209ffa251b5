"""Effects on toy programs with times worked out by hand, and what they are written as."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from pydantic import Field

from shardyard import UserError, read_job, simulate
from sim.analysis.breakdown import breakdown, breakdowns
from sim.engine.effects import Effect, Steps, effects, read_effects
from sim.engine.effects.failure import StepHangsError
from sim.engine.player import run
from sim.program import Block, Cohort, Collective, Kernel, Op, Ref, Run, Send
from tests.sim.conftest import block, kernel, program

SMALL = {"name": "small", "hidden": 1024, "layers": 4, "heads": 16, "vocabulary": 32000, "context": 2048}


@pytest.fixture
def step(toy_cluster, toy_prices) -> Callable[..., list[float]]:
    """Ends of all ops of one rank's kernels under effects."""

    def play(ops: list[Op], *given: str, **profile: object) -> list[float]:
        timeline = run(
            program(Cohort({}, ops)),
            toy_cluster(1).topology(),
            toy_prices(**profile),
            effects=read_effects(list(given), "effects"),
        )
        for parts in breakdowns(timeline):
            assert sum(parts.values()) == timeline.step
        return timeline.end

    return play


@pytest.mark.parametrize(
    ("effect", "end"),
    [
        ("gpu 0: speed 0.5", 8.0),
        ("gpu 0: speed 0.5 from 1 s", 1 + 2 * 3.0),
        ("gpu 0: speed 0.5 from 1 s to 3 s", 1 + 2 + 2.0),  # in two seconds one second's work
        ("gpu 0: speed 0.5 from 9 s", 4.0),
        ("gpu 0: throttle 0.5 after 2 s", 2 + 2 * 2.0),
        ("gpu 0: throttle 0.2 over 8 s", 6 + 0.1 / 0.3),  # 0.9, 0.8 … of the speed, each for a second: 3.9 s of work in six
        ("gpu 0: preempted 3 s at 1 s", 4.0),  # launched already
        ("gpu 0: clock 0.5", 4.0),  # memory has a clock of its own
    ],
)
def test_a_block_of_four_seconds(step, effect: str, end: float) -> None:
    assert step([Op("compute", block(4.0))], effect) == [pytest.approx(end, abs=1e-9)]


def test_effects_multiply(step) -> None:
    assert step([Op("compute", block(4.0))], "gpu 0: speed 0.5", "all: throttle 0.5 after 4 s") == [4 + 2 * 4.0]
    assert step([Op("compute", block(4.0))], "gpu 0: speed 0.5", "all: speed 0.8") == [4 / 0.5 / 0.8]
    drawn = [step([Op("compute", block(4.0))], *["gpu 0: jitter 0.3"] * count) for count in (1, 2)]
    assert drawn[1] == [pytest.approx(drawn[0][0] ** 2 / 4)]  # by the same numbers twice


def test_at_a_lower_clock_arithmetic_takes_longer_and_memory_does_not(toy_cluster, toy_prices) -> None:
    """Blocks of a product and a memory-bound kernel, 1 s each: 2 + 1 s at half of the clock, and twice that at half of the speed.
    A speed owes what it adds by itself, a clock the rest.
    """
    product = Kernel("gemm", "product", "forward", 1e12, 0.0, "bf16", (1, 1000, 1000, 500_000))
    ops = [Op("compute", Block("forward", (Run(1, (product, kernel(1.0))),))) for _ in range(2)]

    def play(*given: str) -> tuple[float, dict[str, float]]:
        steps = program(Cohort({}, ops), dp=2)
        timeline = run(steps, toy_cluster(2).topology(), toy_prices(), effects=read_effects(list(given), "effects"))
        for parts in breakdowns(timeline):
            assert sum(parts.values()) == timeline.step
        slow = breakdowns(timeline)[-1]
        return timeline.step, {name: slow[name] for name in ("lower clock", "slower GPU") if name in slow}

    assert play() == (pytest.approx(4.0, rel=1e-6), {})
    assert play("gpu 1: clock 0.5") == (pytest.approx(6.0, rel=1e-6), {"lower clock": pytest.approx(2.0, rel=1e-6)})
    assert play("gpu 1: clock 0.5", "gpu 1: speed 0.5") == (
        pytest.approx(12.0, rel=1e-6),
        {"lower clock": pytest.approx(4.0, rel=1e-6), "slower GPU": pytest.approx(4.0, rel=1e-6)},
    )
    assert play("gpu 1: clock 0.5 from 1 s to 2.5 s")[0] == pytest.approx(4.5, rel=1e-6)  # two thirds of the speed for 1.5 s


def test_a_lower_clock_of_all_gpus_is_that_of_their_description() -> None:
    fields = dict(model=SMALL, cluster="dgx-h100", plan=dict(tp=8, accumulation=2, sequence=1024))
    described = simulate(read_job(**fields, nodes=[{"count": 1, "clock": 0.7}, {"count": 1, "clock": 0.7}]))
    assert simulate(read_job(**fields, nodes=2, effects=["all: clock 0.7"])).step == pytest.approx(described.step, rel=1e-6)


def test_a_slower_gpu_does_not_lengthen_what_waits_for_launches(step) -> None:
    """Five kernels of 0.5 s that take 1 s each to be launched: only the last one's own time counts."""
    assert step([Op("compute", block(0.5, times=5))], launch="1 s") == [5.5]
    assert step([Op("compute", block(0.5, times=5))], "gpu 0: speed 0.5", launch="1 s") == [6.0]


def test_a_preempted_host_launches_later(step) -> None:
    """Launches end after 1, 2, 3 s; the host is away from 1.5 s to 3.5 s."""
    ops = [Op("compute", block(0.0)) for _ in range(3)]
    assert step(ops, launch="1 s") == [1.0, 2.0, 3.0]
    assert step(ops, "gpu 0: preempted 2 s at 1.5 s", launch="1 s") == [1.0, 4.0, 5.0]
    assert step(ops, "gpu 0: preempted 1 s at 1 s every 2 s", launch="1 s") == [1.0, 3.0, 5.0]  # away in [1, 2] and [3, 4]


@pytest.mark.parametrize("blocks", [1, 4, 8])
def test_a_gpu_runs_what_was_launched_while_its_host_has_no_core(step, blocks: int) -> None:
    """4,000 kernels of 1 ms. Of those 1,000 are in the queue at 1 s, so that the GPU stands still from 2 s on; half a second it
    does not notice. A second pause right after finds as many in the queue as were launched since.
    """
    ops = [Op("compute", block(1e-3, times=4000 // blocks)) for _ in range(blocks)]
    near = partial(pytest.approx, abs=1e-6)
    assert step(ops, "gpu 0: preempted 3 s at 1 s")[-1] == near(6.0)
    assert step(ops, "gpu 0: preempted 500 ms at 1 s every 2 s")[-1] == near(4.0)
    assert step(ops, "gpu 0: preempted 3 s at 1 s", "gpu 0: speed 0.5")[-1] == near(4 + 2 * 2.5)
    twice = ("gpu 0: preempted 3 s at 1 s", "gpu 0: preempted 1 s at 4.01 s")
    assert step(ops, *twice, launch="100 us")[-1] == pytest.approx(5.01 + 2 - 0.1, abs=1e-3)


def test_pauses_go_on_as_long_as_the_step_does(step) -> None:
    """Half of each millisecond is left of 12 s; what takes all of it is refused."""
    ops = [Op("compute", block(12.0))]
    assert step(ops, "gpu 0: preempted 0.5 ms every 1 ms", synchronous=True) == [pytest.approx(24.0, abs=1e-3)]
    with pytest.raises(UserError, match="from 0 s on preemptions leave a thread no core"):
        step(ops, "gpu 0: preempted 6 ms every 10 ms", "gpu 0: preempted 6 ms at 5 ms every 10 ms", synchronous=True)


def test_pauses_that_overlap_are_one(step) -> None:
    """Away from 1 s to 5 s."""
    ops = [Op("compute", block(4.0))]
    assert step(ops, "gpu 0: preempted 3 s at 1 s", "gpu 0: preempted 3 s at 2 s", synchronous=True) == [8.0]


def test_a_cpu_that_is_preempted_computes_later(step) -> None:
    assert step([Op("compute", block(4.0))], "gpu 0: preempted 2 s at 1 s", synchronous=True) == [6.0]


def test_the_breakdown_says_what_each_effect_costs(toy_cluster, toy_prices) -> None:
    """4 s of kernels at half speed from 2 s on, beside 4 s of gathering that halves them too."""
    cohort = Cohort({}, [Op("compute", block(4.0)), Op("dp", Collective("all_gather", 8e9, "dp", "gather"))])
    given = read_effects("all: speed 0.5 from 2 s", "effects")
    timeline = run(program(cohort, dp=2), toy_cluster(2).topology(), toy_prices(slowdown=2.0), effects=given)
    assert timeline.end == [4 + 2 * 2.5, 4.0]  # 1 s of work until 2 s, 0.5 s until 4 s
    parts = breakdowns(timeline)[0]
    assert {name: seconds for name, seconds in parts.items() if seconds} == {
        "forward": 4.0,
        "slower GPU": 3.0,  # 0.5 s and 2.5 s of work at half speed
        "slowdown": 2.0,  # two of four seconds
    }


def test_of_two_effects_at_once_each_owes_what_it_adds_to_those_before(toy_cluster, toy_prices) -> None:
    """4 s of kernels take 8 s at half the speed, 10 s at 0.8 of that: 4 s and 2 s more."""
    effects = read_effects(["gpu 0: speed 0.5", "gpu 0: throttle 0.8 after 0 s"], "effects")
    cohort = Cohort({}, [Op("compute", block(4.0))])
    timeline = run(program(cohort), toy_cluster(1).topology(), toy_prices(), effects=effects)
    assert timeline.end == [pytest.approx(10.0)]
    parts = {name: seconds for name, seconds in breakdowns(timeline)[0].items() if seconds}
    assert parts == {"forward": 4.0, "slower GPU": pytest.approx(4.0), "throttling": pytest.approx(2.0)}


def test_ranks_wait_for_the_slow_one(toy_cluster, toy_prices) -> None:
    gather = Collective("all_gather", 2e9, "dp", "gather")
    cohort = Cohort({}, [Op("compute", block(1.0)), Op("dp", gather, (Ref(0, 0),))])
    timeline = run(program(cohort, dp=4), toy_cluster(4).topology(), toy_prices(), effects=read_effects("gpu 2: speed 0.5", "e"))
    assert [(lane.rank, lane.ranks) for lane in timeline.lanes] == [(0, 3), (2, 1)]
    assert timeline.end == [1.0, 2 + 1.5, 2.0, 2 + 1.5]  # three quarters of 2 GB at 1 GB/s


def test_ranks_wait_for_the_slow_one_inside_a_layer_too(toy_cluster, toy_prices) -> None:
    """Twice a second of kernels, two on the slow GPU, and a gathering of 1.5 s: the others start it a second later."""
    layer = Block("forward", (Run(2, (kernel(1.0), Collective("all_gather", 2e9, "tp", "gather"))),))
    given = read_effects("gpu 2: speed 0.5", "e")
    timeline = run(program(Cohort({}, [Op("compute", layer)]), tp=4), toy_cluster(4).topology(), toy_prices(), effects=given)
    assert [lane.rank for lane in timeline.lanes] == [0, 2]
    for lane in range(2):
        assert max(timeline.end[number] for number, _ in timeline.ops(lane)) == 2 * (2 + 1.5)


@pytest.mark.parametrize(
    ("effect", "end"),
    [
        ("node 0 nic 0: rate 0.5", 8.0),
        ("node 1 nic 0 in: rate 0.5", 8.0),
        ("node 1 nic 0 out: rate 0.5", 4.0),
        ("node 0 nic 0: rate 1 latency 500 ms", 4.5),
        ("node 0 nic 0: rate 0.5 from 2 s", 6.0),
        ("node 0 nic 0: rate 0.5 from 1 s to 3 s", 5.0),
        ("nodes 0-1 nic 0: rate 0.5", 8.0),
        ("rail 0: rate 0.5 to 2 s", 5.0),
        ("node 0 nic 0: down 2 s at 1 s", 6.0),
        ("node 0 nic 0: down 1 s at 1 s every 2 s", 7.0),  # away in [1, 2], [3, 4], [5, 6]
        ("node 0 nic 0: background 0.5", 8.0),
        ("node 0 nic 0: background 0.5 at 1 s lasting 2 s", 5.0),
        ("node 0 nic 0: background 0.5 lasting 1 s every 2 s", 5.5),  # 0.5 GB in a second, 1 GB in the next
    ],
)
def test_a_send_of_four_gigabytes_between_nodes(effect: str, end: float, toy_cluster, toy_prices) -> None:
    cohorts = [Cohort({"pp": 0}, [Op("send", Send(4e9, 1, "x"))]), Cohort({"pp": 1})]
    timeline = run(
        program(*cohorts, pp=2), toy_cluster(1, nodes=2).topology(), toy_prices(), effects=read_effects(effect, "effects")
    )
    assert timeline.end == [pytest.approx(end)]


def test_without_its_nic_a_gpu_sends_through_its_neighbours(toy_cluster, toy_prices) -> None:
    """Two GPUs of a node send 4 GB each to another node: through one NIC it takes twice as long."""
    cohorts = [Cohort({"pp": 0}, [Op("send", Send(4e9, 1, "x"))]), Cohort({"pp": 1})]
    grid = dict(tp=2, pp=2)
    for given, end in ([], 4.0), (["node 0 nic 1: lost"], 8.0), (["node 1 nic 0: lost"], 8.0), (["rail 1: lost"], 8.0):
        topology = toy_cluster(2, nodes=2).topology()
        timeline = run(program(*cohorts, **grid), topology, toy_prices(), effects=read_effects(given, "effects"))
        assert max(timeline.end) == pytest.approx(end), given


def test_a_node_that_lost_all_nics_cannot_send(toy_cluster, toy_prices) -> None:
    cohorts = [Cohort({"pp": 0}, [Op("send", Send(4e9, 1, "x"))]), Cohort({"pp": 1})]
    effects = read_effects(["node 0 nic 0: lost", "node 0 nic 1: lost"], "effects")
    with pytest.raises(UserError, match="node 0 has no NIC left"):
        run(program(*cohorts, tp=2, pp=2), toy_cluster(2, nodes=2).topology(), toy_prices(), effects=effects)


def test_a_node_of_one_gpu_that_lost_its_nic_has_none_left(toy_cluster, toy_prices) -> None:
    cohorts = [Cohort({"pp": 0}, [Op("send", Send(4e9, 1, "x"))]), Cohort({"pp": 1})]
    for node in 0, 1:
        effects = read_effects([f"node {node} nic 0: lost"], "effects")
        with pytest.raises(UserError, match=f"node {node} has no NIC left"):
            run(program(*cohorts, pp=2), toy_cluster(1, nodes=2).topology(), toy_prices(), effects=effects)


def test_the_first_gpu_that_fails_is_the_one_that_is_noticed(toy_cluster, toy_prices) -> None:
    """Each waits for what is left of it; after the watchdog's ten minutes from the first failure nothing is waited for."""
    gather = Collective("all_gather", 2e9, "dp", "gather")
    cohort = Cohort({}, [Op("compute", block(3.0)), Op("dp", gather, (Ref(0, 0),))])
    given = read_effects(["gpu 2: fails at 2 s", "gpu 1: fails at 1 s"], "e")
    with pytest.raises(StepHangsError, match="gpu 1: fails at 1") as raised:
        run(program(cohort, dp=4), toy_cluster(4).topology(), toy_prices(), effects=given)
    assert raised.value.detected == raised.value.first + 600


def test_ranks_that_effects_make_unlike_have_a_limit_of_their_own(toy_cluster, toy_prices, monkeypatch) -> None:
    """Two lanes of one op each."""
    cohort = Cohort({}, [Op("compute", block(1.0))])

    def play(perturbed: int, unfolded: int) -> int:
        monkeypatch.setattr("sim.engine.folding.MAX_PERTURBED_OPS", perturbed)
        monkeypatch.setattr("sim.engine.folding.MAX_UNFOLDED_OPS", unfolded)
        given = read_effects("gpu 2: speed 0.5", "e")
        return len(run(program(cohort, dp=4), toy_cluster(4).topology(), toy_prices(), effects=given).lanes)

    assert play(2, 0) == 2
    with pytest.raises(UserError, match="more than 1 ops; name fewer GPUs, or use `shardyard variability`, where all"):
        play(1, 500_000)


def test_a_gpu_that_fails_lets_the_others_wait(toy_cluster, toy_prices) -> None:
    gather = Collective("all_gather", 2e9, "dp", "gather")
    cohort = Cohort({}, [Op("compute", block(3.0)), Op("dp", gather, (Ref(0, 0),))])
    with pytest.raises(StepHangsError, match="the step hangs") as raised:
        run(program(cohort, dp=4), toy_cluster(4).topology(), toy_prices(), effects=read_effects("gpu 2: fails at 1 s", "e"))
    assert (raised.value.failed, raised.value.first, raised.value.silent, raised.value.detected) == (1.0, 3.0, 3.0, 603.0)


def test_the_first_rank_that_waits_for_a_failed_gpu_ends_the_job(toy_cluster, toy_prices) -> None:
    """Rank 1 waits in its pair from 3 s on, rank 2 for rank 0 from 5 s on, and ranks 1 and 3 gather until 6 s."""
    first, second = (Collective("all_gather", 2e9, axis, axis) for axis in ("tp", "dp"))
    cohort = Cohort(
        {}, [Op("compute", block(3.0)), Op("tp", first, (Ref(0, 0),)), Op("compute", block(2.0)), Op("dp", second, (Ref(0, 2),))]
    )
    given = read_effects("gpu 0: fails at 1 s", "e")
    with pytest.raises(StepHangsError, match="the first rank waits for it from 3 s on, all do by 6 s") as raised:
        run(program(cohort, tp=2, dp=2), toy_cluster(4).topology(), toy_prices(), effects=given)
    assert raised.value.detected == 603.0


def test_a_gpu_that_fails_after_the_step_does_no_harm(step) -> None:
    assert step([Op("compute", block(3.0))], "gpu 0: fails at 5 s") == [3.0]


def test_jitter_has_mean_one_and_the_spread_that_it_says() -> None:
    (effect,) = read_effects("all: jitter 0.08 seed 3", "effects")
    draw, again, once = effect.noise(5), effect.noise(5), read_effects("all: jitter 0.08 per step", "e")[0].noise(5)
    factors = np.array([draw() for _ in range(100_000)])
    assert factors.mean() == pytest.approx(1.0, abs=0.001)
    assert factors.std() == pytest.approx(0.08, rel=0.02)
    assert factors[0] == again() != effect.noise(6)()
    assert once() == once()


@pytest.mark.parametrize(
    ("replicas", "cores", "ends"),
    [
        (1, 2, [4.0, 2.0, 3.0]),
        (1, 1, [7.0, 4.0, 6.0]),  # half of the core until 4 s, and until the second block of stage 1 has done its second at 6 s
        (2, 4, [4.0, 2.0, 3.0]),
        (2, 3, [4 + 1.0, 2 * 4 / 3, 4.0]),  # three quarters of their speed while all four compute
    ],
)
def test_processes_share_cores_while_they_compute(toy_cluster, toy_prices, replicas: int, cores: int, ends: list[float]) -> None:
    """Stage 0 computes for 4 s; stage 1 for 2 s and, when that is over, for 1 s."""
    cohorts = [Cohort({"pp": 0}, [Op("compute", block(4.0))]), Cohort({"pp": 1}, [Op("compute", block(s)) for s in (2.0, 1.0)])]
    given = program(*cohorts, pp=2, dp=replicas), toy_cluster(2 * replicas).topology(), toy_prices(synchronous=True)
    shared = read_effects(f"all: cores {cores}", "effects")
    timeline = run(*given, effects=shared)
    assert timeline.end == pytest.approx(ends)
    assert run(*given, effects=shared, fold=False).step == timeline.step
    for parts in breakdowns(timeline):
        assert sum(parts.values()) == timeline.step


def test_cores_are_shared_by_processes_that_have_one_pool(toy_cluster, toy_prices) -> None:
    ops, place = program(Cohort({}, [Op("compute", block(1.0))]), dp=4), toy_cluster(4).topology()
    with pytest.raises(UserError, match="GPUs compute by themselves"):
        run(ops, place, toy_prices(), effects=read_effects("all: cores 2", "effects"))
    with pytest.raises(UserError, match="rank 0 has its cores by another effect already"):
        run(ops, place, toy_prices(synchronous=True), effects=read_effects(["all: cores 2", "gpu 0: cores 1"], "effects"))


PLANS = [
    dict(tp=2, pp=2, accumulation=4, data_parallel="zero1"),
    dict(tp=4, accumulation=2, data_parallel="zero3"),
    dict(pp=4, accumulation=8, data_parallel="ddp"),
    dict(tp=2, cp=2, pp=2, accumulation=4, sequence_parallel=True),
]
GIVEN = [
    "gpu 5: speed 0.7",
    "gpus 2,9-11: throttle 0.5 after 3 ms over 10 ms",
    "gpu 12: preempted 3 ms at 2 ms every 7 ms",
    "node 1 nic 2: rate 0.25",
    "node 0 nic 5: lost",
    "node 1 nic 2 out: down 2 ms at 1 ms every 5 ms",
    "node 0 gpu 3 nvlink: background 0.75 lasting 1 ms every 3 ms",
    "all: jitter 0.05",
    "gpu 5: clock 0.6 from 2 ms",
]


@pytest.mark.parametrize("effect", GIVEN)
def test_folded_is_unfolded_and_breakdowns_add_up(effect: str) -> None:
    """One slow GPU splits off exactly the ranks that it makes unlike, whatever the axis."""
    plan = PLANS[GIVEN.index(effect) % len(PLANS)] | {"auto": False, "sequence": 1024}
    job = read_job(model=SMALL, cluster="dgx-h100", nodes=2, plan=plan, effects=[effect])
    folded, unfolded = simulate(job), simulate(job, fold=False)
    assert folded.step == unfolded.step
    assert len(folded.lanes) <= len(unfolded.lanes)
    assert breakdown(folded) == pytest.approx(breakdown(unfolded), abs=1e-9)
    for parts in breakdowns(folded):
        assert sum(parts.values()) == folded.step


@pytest.mark.parametrize(
    "lost",
    [
        {"nodes": 2, "effects": ["node 1 nic 2: lost"]},
        {"nodes": 4, "effects": ["node 1 nic 2: lost", "node 1 nic 3: lost"]},
        {"nodes": 2, "effects": ["rail 5: lost"]},
        {"nodes": [{"count": 1}, {"count": 1, "missing": ["nic 2"]}]},
    ],
    ids=str,
)
def test_who_shares_a_nic_with_a_gpu_that_lost_its_own_is_told_apart(lost: dict) -> None:
    """Others are not slowed down, one by one or folded."""
    plan = dict(tp=8, data_parallel="zero1", sequence=1024, accumulation=2, overlap=False)
    job = read_job(model=SMALL, cluster="dgx-h100", plan=plan, **lost)
    folded, unfolded = simulate(job), simulate(job, fold=False)
    assert folded.step == unfolded.step
    assert breakdown(folded) == pytest.approx(breakdown(unfolded), abs=1e-9)


def test_effects_take_time_and_none_gives_it_back() -> None:
    job = dict(model=SMALL, cluster="dgx-h100", nodes=2, plan=PLANS[0] | {"auto": False, "sequence": 1024})
    ideal = simulate(read_job(**job)).step
    slow = [simulate(read_job(**job, effects=[f"gpu 12: speed {speed}"])).step for speed in (1.0, 0.5, 0.25)]
    assert ideal == slow[0] < slow[1] < slow[2]
    assert simulate(read_job(**job, effects=["node 0 nic 5: rate 1"])).step == ideal


def test_one_slow_gpu_of_many_costs_a_handful_of_lanes() -> None:
    plan = dict(tp=8, pp=4, accumulation=4, data_parallel="zero1", sequence=1024)
    many = simulate(read_job(model=SMALL, cluster="dgx-h100", nodes=2048, plan=plan, effects=["gpu 4321: speed 0.9"]))
    assert sum(lane.ranks for lane in many.lanes) == 16384
    assert len(many.lanes) == 4 * 4  # the slow one, its tp and its dp siblings, the rest; in each stage


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gpu 3 speed 0.9", "must be 'TARGET: EFFECT VALUE …'"),
        ("gpu 3: sped 0.9", "unknown effect 'sped'; did you mean 'speed'?"),
        ("gpu 3: speed 1.5", "speed=1.5: input should be less than or equal to 1"),
        ("gpu 3: speed fast", "speed='fast'"),
        ("gpu 3: speed 0.9 from 2", "needs a unit"),
        ("gpu 99: speed 0.9", "gpu 99: they are numbered 0 to 7"),
        ("moon 3: speed 0.9", "must be on 'all', 'gpu 3'"),
        ("node 0 nic 9: rate 0.5", "no link is called 'node 0 nic 9'"),
        ("gpu 1: rate 0.5", "no link is called 'gpu 1'; known are "),
        ("node 0 gpu 1 nvlink: lost", "is no NIC"),
        ("nodes 0-9 nic 1: lost", "node 9: they are numbered 0 to 0"),
        ("rail 9: lost", "no link is called 'rail 9'"),
        ("node 0 nic 1: rate 0.5 latency 1 us to 2 s", "latency=1e-06 s contradicts from and to"),
        ("gpu 3: speed 0.9 from 5 s to 2 s", "to=2 s: must be later than from=5 s"),
        ("gpu 3: clock 0.9 to 0 s", "to=0 s: must be later than from=0 s"),
        ("gpu 3: fails", "at"),
        ("gpu 3: preempted 2 ms every 1 ms", "every=0.001 s: must be longer than what happens"),
        ("node 0 nic 2: down 1 ns every 2 ns", "at least 0.0001 s"),
        ({"target": "gpu 3"}, "must name one effect"),
        (7, "must be a text"),
    ],
)
def test_what_cannot_be_is_one_line(given: object, message: str) -> None:
    with pytest.raises(UserError) as raised:
        read_job(model=SMALL, cluster="dgx-h100", plan={}, effects=[given])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_mappings_say_the_same_as_texts() -> None:
    text = read_effects("gpu 3: speed 0.9 from 2 s", "effects")[0]
    mapping = read_effects({"target": "gpu 3", "speed": 0.9, "from": "2 s"}, "effects")[0]
    assert mapping == text
    assert str(mapping) == "gpu 3: speed 0.9 from 2 s"


@pytest.fixture
def theirs() -> Iterator[None]:
    before = dict(effects._things)
    list(effects)

    @effects("naps")
    class Naps(Effect):
        """Kernels take twice as long until then."""

        component = "nap"
        naps: float = Field(gt=0)

        def kernels(self) -> Steps:
            yield 0.0, 2.0
            yield self.naps, 1.0

    yield
    effects._things.clear()
    effects._things.update(before)


def test_an_effect_is_one_class(step, theirs: None) -> None:
    assert step([Op("compute", block(4.0))], "gpu 0: naps 2") == [5.0]
