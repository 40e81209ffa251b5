"""Error bars follow the prices' spreads, and sensitivities obey what a price can do."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest

import strategies.predict
from calibration.published import published
from sim.engine.player import run
from sim.grid import Grid
from sim.pricing.provenance import Provenance
from sim.pricing.shipped import load_profile
from sim.program import Block, Cohort, Kernel, Op, Program, Run
from sim.replay.repriced import repriced
from sim.timeline import Timeline
from strategies.job import Job
from strategies.planner import uncertainty
from strategies.planner.elasticity import elasticities, elasticities_by_kind
from strategies.planner.sensitivity import PRICES, Play, Price, kernels_of, scaled
from strategies.planner.uncertainty import interval_of, spreads, tied, with_interval
from strategies.predict import played, predict
from strategies.read_job import read_job
from strategies.schedules import schedules

BY_NAME = {price.name: price for price in PRICES}


def spreads_of(timeline: Timeline) -> dict[str, float]:
    return spreads(timeline, kernels_of(timeline))


@pytest.fixture(scope="module")
def job() -> Job:
    plan = {"tp": 2, "pp": 2, "data_parallel": "zero1", "global_batch": 8, "sequence": 2048}
    return read_job(model="gpt-1.7b", cluster="dgx-a100", nodes=2, plan=plan)


@pytest.fixture(scope="module")
def play(job: Job) -> Play:
    return Play.of(job)


@pytest.mark.parametrize(
    ("model", "nodes", "plan"),
    [
        ("gpt-39b", 4, {"tp": 8, "pp": 4, "global_batch": 256}),
        ("gpt-1.7b", 1, {"tp": 8, "global_batch": 64, "kernels": "apex", "timers": True}),  # the host is the slower one
        *(("gpt-1.7b", 1, {"pp": 4, "accumulation": 48, "schedule": name}) for name in schedules if not schedules[name].versions),
    ],
)
def test_two_short_steps_say_what_a_long_one_takes(model: str, nodes: int, plan: dict[str, object]) -> None:
    job = read_job(model=model, cluster="dgx-a100", nodes=nodes, plan=plan)
    assert Play.of(job).seconds == pytest.approx(predict(job).ideal_seconds, rel=2e-3)


def test_a_play_of_gpus_that_differ_is_of_the_predicted_step(job: Job, play: Play) -> None:
    """Slower products make all GPUs' kernels slower, and with them the wait for the slowest."""
    expected, answer = Play.of(job, expected=True), predict(job)
    assert expected.seconds == pytest.approx(answer.step_seconds, rel=1e-12)
    assert answer.step_seconds > play.seconds
    alike = Play.of(replace(job, variability=0.0), expected=True)
    assert alike.seconds == pytest.approx(play.seconds, rel=2e-3)
    slower = BY_NAME["kernels"]
    assert expected.at(slower, 1.1) - expected.seconds > play.at(slower, 1.1) - play.seconds > 0


def test_a_step_that_pays_every_price_twice_takes_twice_as_long(play: Play) -> None:
    everything = Price("all", frozenset({"gemm", "attention", "memory", "optimizer"}))
    assert 1 < play.at(everything, 2) / play.seconds <= 2
    elasticities = []
    for price in play.relevant():
        if price.name not in ("clock", "kernels"):
            elasticities.append(math.log(play.at(price, 1.02) / play.seconds) / math.log(1.02))
    assert sum(elasticities) == pytest.approx(1, abs=0.05)  # what is left is the slowdown's own factor and wires


def test_a_dearer_price_never_makes_a_step_shorter_and_the_strongest_effect_comes_first(play: Play) -> None:
    swings = play.swings(dict.fromkeys(BY_NAME, 1.3))
    assert len(swings) >= 8
    assert [swing.width for swing in swings] == sorted((swing.width for swing in swings), reverse=True)
    for swing in swings:
        assert swing.low <= play.seconds * (1 + 1e-9) <= swing.high * (1 + 2e-9), swing.name


@pytest.mark.parametrize("microbatches", [4, 64], ids=["played whole", "some played"])
def test_an_interval_of_a_step_that_is_known_is_that_of_a_step_played_for_it(
    job: Job, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not played again."""
    asked = replace(job, plan=job.plan.model_copy(update={"global_batch": None, "accumulation": microbatches}))
    timeline, summary = played(asked), predict(asked)
    assert (timeline.periods > 0) == (microbatches == 64)
    again = with_interval(asked, summary)
    monkeypatch.setattr(strategies.predict, "run", None)
    assert with_interval(asked, summary, timeline) == again


def test_an_interval_without_spread_is_a_point(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncertainty, "spreads", lambda *asked: {"clock": 0.0, "gemm": 0.0})
    monkeypatch.setattr(uncertainty, "COMPOSITION", 0.0)
    bar = interval_of(played(job), 3.0)
    assert (bar.low, bar.high) == (3.0, 3.0)


def test_an_interval_of_one_price_is_its_spread_times_its_elasticity(
    job: Job, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncertainty, "spreads", lambda *asked: {"bandwidth inside nodes": 0.2, "clock": 0.0})
    monkeypatch.setattr(uncertainty, "COMPOSITION", 0.0)
    elasticity = math.log(play.at(BY_NAME["bandwidth inside nodes"], 1.1) / play.seconds) / math.log(1.1)
    bar = interval_of(played(job), 1.0)
    assert math.log(bar.high) == pytest.approx(1.2816 * 0.2 * elasticity, rel=0.05)  # other traffic is on the links
    assert bar.low * bar.high == pytest.approx(1)


def test_prices_that_were_not_measured_have_wider_spreads() -> None:
    measured, derived = (
        spreads_of(
            played(
                read_job(
                    model="gpt2-1.5b",
                    cluster="dgx-h100",
                    nodes=1,
                    profile=profile,
                    plan={"global_batch": 8, "data_parallel": "zero1"},
                )
            )
        )
        for profile in ("h100", "generic")
    )
    assert derived["gemm"] > 2 * measured["gemm"]
    assert derived["bandwidth inside nodes"] > measured["bandwidth inside nodes"]
    assert "bandwidth between nodes" not in measured  # one node has none to pay


def test_spreads_of_single_shapes_average_out_and_what_all_share_does_not(toy_cluster, toy_prices) -> None:
    """Of a profile that nothing was measured for; products of two shapes take 1 s and, in two kernels of other names, 3 s."""
    small, large = (Kernel("gemm", "product", "forward", 1e12, 0.0, shape=(1, 1000, 1000, 500 * ratio)) for ratio in (1000, 1500))
    again = replace(large, label="another product", phase="backward", calls="checkpoint")
    others = tuple(Kernel(kind, kind, "forward", 0.0, 1e12) for kind in ("memory", "optimizer"))
    flash = Kernel("attention_forward", "flash", "forward", 1e12, 0.0, shape=(1, 1, 1, 1000, 1000, 64, 0))
    cohort = Cohort({}, [Op("compute", Block("forward", (Run(1, (small, large, again, flash, *others)),)))])
    program = Program(Grid.of(dp=1), [cohort], 1, 1, "bf16", 1, 1)
    by_price = spreads_of(run(program, toy_cluster(1).topology(), toy_prices()))
    unmeasured, backward, clock, fused = 0.15, 0.1, 0.04, 0.25
    assert by_price.pop("launch") == 0.1
    assert by_price == {
        "clock": clock,
        "gemm": pytest.approx(math.hypot(unmeasured * 1 / 4, unmeasured * 3 / 4, unmeasured)),
        "attention": pytest.approx(math.hypot(unmeasured, backward, unmeasured)),
        "memory": pytest.approx(math.hypot(clock, fused, unmeasured)),
        "optimizer": pytest.approx(math.hypot(clock, fused / 2, unmeasured)),
    }


def test_percentiles_of_held_out_shapes_become_a_standard_deviation() -> None:
    """Shapes that take from 10 % less to 20 % more than predicted, by the 10th and 90th percentile: ln(1.2 / 0.9) is 2 · 1.2816
    standard deviations. Where there are no percentiles, half of a normal distribution lies within 0.6745 of them.
    """
    given = dict.fromkeys(("machine", "versions", "date", "source", "grid"), "")
    spread = Provenance(measured=True, spread={"large": (-0.1, 0.0, 0.2)}, **given)
    assert uncertainty._shape_error(spread, "large") == pytest.approx(0.28768207 / 2.5631031, rel=1e-6)
    median = Provenance(measured=True, heldout_error=0.06744897501960817, **given)
    assert uncertainty._shape_error(median, "large") == pytest.approx(0.1)


def test_no_interval_is_narrower_than_the_error_of_jobs_whose_prices_were_all_measured(job: Job) -> None:
    bar = interval_of(played(job), 1.0)
    assert math.log(bar.high / bar.low) > 2 * 1.2816 * uncertainty.COMPOSITION


MIXED = "examples/clusters/a100-and-h100.yaml"


def mixed(plan: dict[str, object]) -> Timeline:
    """A step on four nodes of A100 and four of H100."""
    return played(mixed_job(plan))


def mixed_job(plan: dict[str, object]) -> Job:
    given = {"tp": 8, "data_parallel": "zero1", "sequence": 4096, "global_batch": 32}
    return read_job(model="llama-3.1-8b", cluster=MIXED, plan=given | plan)


def test_prices_of_one_kind_of_gpu_are_moved_without_those_of_another() -> None:
    """Half of a batch each: H100 wait for A100, whose kernels decide; repriced steps are played ones."""
    timeline = mixed({})
    prices, kernels = timeline.op_costs.prices, BY_NAME["kernels"]
    both = elasticities(timeline, {"kernels": kernels})["kernels"]
    a100, h100 = (each["kernels"] for each in elasticities_by_kind(timeline, {"kernels": kernels}))
    assert (a100, h100) == (pytest.approx(both, rel=0.02), pytest.approx(0, abs=0.02))
    dearer = [scaled(prices, kernels, 1.1, kind) for kind in (0, 1)]
    again = repriced(timeline, [timeline.op_costs.under(each) for each in dearer])
    assert again == pytest.approx([run(timeline.program, timeline.op_costs.topology, each).step for each in dearer], rel=1e-3)
    assert again[0] > 1.05 * timeline.step > 1.04 * again[1]


def test_prices_of_all_kinds_of_gpus_move_a_played_step_as_they_do_the_repriced_one() -> None:
    """Prices of all kinds together; transfers that contend are played in one and not in the other."""
    timeline, play = mixed({}), Play.of(mixed_job({}))
    prices = {price.name: price for price in play.relevant()}
    assert prices.keys() >= {"gemm", "bandwidth inside nodes", "bandwidth between nodes"}
    for name, elasticity in elasticities(timeline, prices).items():
        assert math.log(play.at(prices[name], 1.1) / play.seconds) / math.log(1.1) == pytest.approx(elasticity, abs=0.01), name


def test_links_inside_nodes_are_a_kinds_own_and_those_between_are_common() -> None:
    """Two stages, A100 before H100, whose times add up: errors of the two kinds add in squares, of the network as they are."""
    timeline = mixed({"pp": 2, "tp": 4, "order": "tp-cp-ep-dp-pp", "schedule": "gpipe", "global_batch": 16})
    inside = {name: BY_NAME[name] for name in ("kernels", "bandwidth inside nodes")}
    a100, h100 = elasticities_by_kind(timeline, inside)
    both = elasticities(timeline, inside)
    parts = interval_of(timeline, 1.0).parts
    for name in inside:
        assert min(a100[name], h100[name]) > 0.1 * both[name]
        assert a100[name] + h100[name] == pytest.approx(both[name], rel=0.1)
    assert math.hypot(a100["kernels"], h100["kernels"]) * uncertainty.CLOCK > parts["clock"]  # of the products' part of them
    assert parts["clock"] > 0.5 * math.hypot(a100["kernels"], h100["kernels"]) * uncertainty.CLOCK
    between = elasticities(timeline, {name: BY_NAME[name] for name in uncertainty.COMMON})
    for name, sigma in uncertainty.COMMON.items():
        assert parts[name] == pytest.approx(abs(between[name]) * sigma)


def test_products_in_fp8_have_the_spread_of_their_own_fit() -> None:
    """Shapes of fp8 products miss by more than those of bf16 on H100."""
    plan = {"global_batch": 8, "data_parallel": "zero1"}
    wide, narrow = (
        spreads_of(played(read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=1, plan=plan | more)))["gemm"]
        for more in ({}, {"fp8": {}})
    )
    spread = load_profile("h100").provenance["gemm"].spread
    assert (narrow > wide) == (spread["fp8 large"][2] - spread["fp8 large"][0] > spread["large"][2] - spread["large"][0])


def test_kernels_twice_as_fast_save_half_of_their_time_on_one_gpu() -> None:
    """Nothing overlaps there: the step is the sum of its kernels."""
    plan = {"global_batch": 2, "sequence": 2048, "kernels": "compiled"}
    alone = {"cluster.node.gpus": 1, "cluster.node.nics": 1}
    play = Play.of(read_job(model="gpt-1.7b", cluster="dgx-a100", nodes=1, overrides=alone, plan=plan))
    faster = dict(play.faster(2.0))
    for name in ("gemm", "attention", "memory", "optimizer"):
        price = BY_NAME[name]
        spent = play.at(price, 2.0) - play.seconds  # twice as long: once more
        assert play.seconds - faster[name] == pytest.approx(spent / 2, rel=1e-6), name
    assert not {"nvlink", "nic"} & set(faster)


def test_what_is_no_tie_is_in_the_right_order_in_published_pairs_of_plans() -> None:
    """vTrain: 17 plans of a model of 356 M parameters on 8 A100 with a batch of 8."""
    sizes = {"model": {"hidden": 1024, "layers": 24}, "plan": {"global_batch": 8}}
    rows = [
        row
        for row in published(("vtrain-2024",))
        if row.gpus == 8
        and row.measured["step"]
        and all(row.fields[part].get(name) == value for part in sizes for name, value in sizes[part].items())
    ]
    steps = [(row.measured["step"] or 0.0, predict(row.job()).step_seconds) for row in rows]
    apart = [(first, second) for first, second in combinations(steps, 2) if not tied(first[1], second[1])]
    right = sum((first[0] < second[0]) == (first[1] < second[1]) for first, second in apart)
    assert len(apart) > 50
    assert right / len(apart) > 0.9


def test_what_only_transfers_take_longer_adds_to_the_wait_for_slower_gpus(job: Job) -> None:
    """GPUs that differ by 10 % are waited for as long when each collective starts later."""
    gpus = replace(job, variability=0.1)
    alike, differ, start = Play.of(gpus), Play.of(gpus, expected=True), BY_NAME["collective start"]
    later = alike.at(start, 3) - alike.seconds
    assert later > 0.01 * alike.seconds
    assert differ.at(start, 3) - differ.seconds == pytest.approx(later, rel=0.02)
