"""A played step under other prices: as long as a play under these prices, to the bit, where nothing contends."""

from __future__ import annotations

import pytest

from shardyard import read_job, simulate
from sim.engine.player import run
from sim.program import Cohort, Op, Ref, Send
from sim.replay.repriced import repriced
from strategies.planner.elasticity import STEP
from strategies.planner.sensitivity import PRICES, scaled
from strategies.predict import played
from tests.sim.conftest import block, program
from tests.sim.replay.test_step import JOBS, SMALL, job

BY_NAME = {price.name: price for price in PRICES}
MEET = {"groups that are not alike": 1e-2}  # of three GPUs on nodes of eight: on slower links sends meet that did not
ALONE = ("zero1 in a pipeline", "zero3", "experts", "offload")  # elsewhere sends meet each other on links


@pytest.mark.parametrize("name", JOBS)
def test_it_is_the_step_that_is_played_under_these_prices(name: str) -> None:
    timeline = simulate(job(name))
    usual = timeline.op_costs
    prices = [scaled(usual.prices, price, STEP) for price in PRICES]
    steps = repriced(timeline, [usual.under(each) for each in [usual.prices, *prices]]).tolist()
    assert steps.pop(0) == timeline.step
    anew = [run(timeline.program, usual.topology, each).step for each in prices]
    assert max(anew) > 1.04 * timeline.step
    assert steps == (anew if name in ALONE else pytest.approx(anew, rel=MEET.get(name, 2e-4)))


def test_two_sends_by_hand(toy_cluster, toy_prices) -> None:
    """Stage 0 computes 2 s and sends 1 GB at 1 GB/s, stage 1 computes 3 s, twice: 2 + 1 + 3 + 3. Links at half their speed: the
    second send ends at 4 + 2 s, when the first 3 s have begun at 4: 4 + 3 + 3. Kernels twice as long: 4 + 1 + 6 + 6.
    """
    first = [Op("compute", block(2.0)), Op("send", Send(1e9, 1, "x"), (Ref(0, 0),))]
    first += [Op("compute", block(2.0)), Op("send", Send(1e9, 1, "x"), (Ref(0, 2),))]
    second = [Op("compute", block(3.0), (Ref(0, 1),)), Op("compute", block(3.0), (Ref(0, 3),))]
    timeline = run(program(Cohort({"pp": 0}, first), Cohort({"pp": 1}, second), pp=2), toy_cluster(2).topology(), toy_prices())
    prices = [scaled(timeline.op_costs.prices, BY_NAME[name], 2.0) for name in ("bandwidth inside nodes", "kernels")]
    steps = repriced(timeline, [timeline.op_costs.under(each) for each in prices]).tolist()
    assert steps == pytest.approx([10.0, 17.0], abs=1e-6)


def test_periods_that_were_not_played_take_as_long_as_the_last_one() -> None:
    """Of 64 microbatches few are played; all of them, played under the same price, take as long."""
    plan = dict(pp=4, tp=2, accumulation=64, kernels="apex", overlap=False, overlap_p2p=False, sequence=1024)
    long = read_job(model=SMALL, cluster="dgx-a100", nodes=1, plan=plan)
    timeline = played(long)
    assert timeline.periods > 10
    dearer = scaled(timeline.op_costs.prices, BY_NAME["kernels"], 1.1)
    whole = simulate(long)
    every = run(whole.program, whole.op_costs.topology, dearer).step
    assert repriced(timeline, [timeline.op_costs.under(dearer)])[0] == pytest.approx(every, rel=1e-4)
