"""A step as long as nothing contends: literal times, when contention begins, and the player's times to the bit."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard import simulate
from sim.engine import folding, player
from sim.engine.lanes import Lanes
from sim.engine.uncontended import Uncontended
from sim.pricing.op_costs import OpCosts
from sim.program import Cohort, Collective, Op, Ref, Send
from tests.random_jobs import played
from tests.sim.conftest import block, program


@pytest.fixture
def step(toy_cluster, toy_prices) -> Callable[..., Uncontended]:
    """Toy cohorts on one node of GPUs, 1 GB/s each, if nothing contends."""

    def work_out(*cohorts: Cohort, gpus: int = 8, slowdown: float = 1.0, launch: str = "0 s", **degrees: int) -> Uncontended:
        prices = toy_prices(slowdown=slowdown, launch=launch, collective_launch="0 s")
        whole = program(*cohorts, **degrees)
        return Uncontended(Lanes(whole, OpCosts(whole, toy_cluster(gpus).topology(), prices)))

    return work_out


def pipeline(*times: float) -> list[Cohort]:
    """Blocks of a first stage, each of which sends 2 GB to a second stage, whose blocks take 1 s."""
    first, second = Cohort({"pp": 0}), Cohort({"pp": 1})
    for seconds in times:
        done = first.add(Op("compute", block(seconds)))
        sent = first.add(Op("pp next", Send(2e9, 1, "x"), (Ref(0, done),)))
        second.add(Op("compute", block(1.0), (Ref(0, sent),)))
    return [first, second]


def test_times_are_sums_and_maxima(step) -> None:
    """Sends take 2 s each and follow each other; the second stage waits for them."""
    worked = step(*pipeline(1.0, 1.0, 5.0), gpus=2, pp=2)
    assert worked.until == inf
    assert worked.times.start == [0, 1, 1, 3, 2, 7, 3, 5, 9]
    assert worked.times.end == [1, 3, 2, 5, 7, 9, 4, 6, 10]


def test_the_host_launches_in_program_order(step) -> None:
    """Each launch takes 1 s: the last of three kernels of half a second is launched after 3 s, the send after 4 s."""
    cohort = Cohort({"pp": 0})
    cohort.add(Op("compute", block(0.5, times=3)))
    cohort.add(Op("pp next", Send(2e9, 1, "x")))
    worked = step(cohort, Cohort({"pp": 1}), gpus=2, launch="1 s", pp=2)
    assert (worked.times.launched, worked.times.start, worked.times.end) == ([0, 4], [0, 4], [3.5, 6])


def test_a_host_that_is_held_up_goes_on_when_the_op_is_ready(step) -> None:
    first, second = pipeline(5.0)
    second.ops[0].held = True
    second.add(Op("compute", block(1.0)))
    worked = step(first, second, gpus=2, launch="1 s", pp=2)
    assert worked.times.start == [0, 6, 8, 10]
    assert worked.times.end == [6, 8, 10, 11]
    assert (worked.times.resumptions[2].time, worked.times.launched[3]) == (8, 9)


def test_two_transfers_contend_where_a_link_carries_only_one(step) -> None:
    """Both leave the GPU at 1 GB/s: the second begins after 1 s, while the first is on its way."""
    cohorts = [Cohort({"pp": rank}) for rank in range(3)]
    cohorts[0].add(Op("a", Send(4e9, 1, "x")))
    done = cohorts[0].add(Op("compute", block(1.0)))
    cohorts[0].add(Op("b", Send(4e9, 2, "y"), (Ref(0, done),)))
    assert step(*cohorts, gpus=3, pp=3).until == 1.0


def test_transfers_that_follow_each_other_on_a_link_do_not_contend(step) -> None:
    cohorts = [Cohort({"pp": rank}) for rank in range(3)]
    sent = cohorts[0].add(Op("a", Send(4e9, 1, "x")))
    cohorts[0].add(Op("b", Send(4e9, 2, "y"), (Ref(0, sent),)))
    worked = step(*cohorts, gpus=3, pp=3)
    assert worked.until == inf
    assert worked.times.end == [4, 8]


@pytest.mark.parametrize(("slowdown", "until"), [(1.0, inf), (2.0, 3.0)])
def test_a_collective_contends_with_kernels_that_it_slows_down(step, slowdown, until) -> None:
    cohort = Cohort({}, [Op("compute", block(3.0)), Op("compute", block(1.0))])
    cohort.add(Op("dp", Collective("all_gather", 4e9, "dp", "gather"), (Ref(0, 0),)))
    worked = step(cohort, gpus=2, slowdown=slowdown, dp=2)
    assert worked.until == until
    assert worked.times.end == [3, 4, 5]


def test_stages_meet_in_a_collective_of_both(step) -> None:
    """Their sum of 2 GB by a ring of two takes 2 s from when the later of them comes."""
    cohorts = [Cohort({"pp": rank}, [Op("compute", block(seconds))]) for rank, seconds in enumerate((1.0, 4.0))]
    for rank, cohort in enumerate(cohorts):
        pair = Collective("all_reduce", 2e9, "pp", "tied", "ring", cohorts=(0, 1))
        cohort.add(Op("pp tied", pair, (Ref(rank, 0),)))
    worked = step(*cohorts, gpus=2, pp=2)
    assert worked.times.start == [0, 4, 0, 4]
    assert worked.times.end == [1, 6, 4, 6]
    assert worked.until == inf


def test_what_waits_for_itself_is_left_to_the_player(step) -> None:
    assert step(Cohort({}, [Op("compute", block(1.0), (Ref(0, 1),)), Op("compute", block(1.0))]), gpus=1).until < 0


def test_without_contention_no_event_is_played(toy_cluster, toy_prices, monkeypatch) -> None:
    monkeypatch.setattr(player, "Environment", None)
    timeline = player.run(program(*pipeline(1.0, 1.0), pp=2), toy_cluster(2).topology(), toy_prices())
    assert (timeline.step, timeline.events) == (6.0, 6)


class Events(Uncontended):
    """Knows nothing: everything is played."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(lanes)
        self.until = -1.0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_times_are_those_of_events_to_the_bit(number) -> None:
    """Every op of a random job has the times that it has when each of them is an event."""
    job, timeline = played(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "Uncontended", Events)
        by_events = simulate(job)
    every: list[tuple[Any, ...]] = [(each.start, each.end, each.launched, each.stretch) for each in (timeline, by_events)]
    assert every[0] == every[1]
