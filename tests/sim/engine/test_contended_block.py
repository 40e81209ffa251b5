"""Blocks whose collectives meet other traffic: literal times and events, and the times of blocks that are cut everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardyard import read_job, simulate
from sim.analysis.breakdown import PHASES, breakdowns
from sim.engine.blocks.played import Passage, _stretched
from sim.engine.blocks.splitting import expand
from sim.engine.player import run
from sim.program import Block, Cohort, Collective, Item, Join, Op, Ref, Run, Send, Start
from sim.timeline import Timeline
from strategies.predict import prices_of
from tests.random_jobs import played
from tests.sim.conftest import block, kernel, program

GATHER = Collective("all_gather", 4e9, "tp", "gather", "ring")  # 2 s on a link of 1 GB/s
FREE = replace(GATHER, sms=0)  # slows no kernel beside it


@pytest.fixture
def play(toy_cluster, toy_prices) -> Callable[..., Timeline]:
    """Two stages of two tp ranks, 1 GB/s between GPUs. The first has a block of `items`, `times` over, and sends what takes
    `seconds` to the second when that has computed for `after` seconds.
    """

    def play(*items: Item, seconds: float, after: float, times: int = 1, cut: bool = False, slowdown: float = 1.0) -> Timeline:
        cohorts = [Cohort({"pp": 0}), Cohort({"pp": 1})]
        cohorts[0].add(Op("compute", Block("forward", (Run(times, items),))))
        cohorts[1].add(Op("compute", block(after)))
        cohorts[0].add(Op("pp next", Send(seconds * 1e9, 1, "x"), (Ref(1, 0),)))
        whole = program(*cohorts, tp=2, pp=2)
        prices = toy_prices(slowdown=slowdown, collective_launch="0 s")
        return run(expand(whole, {0}) if cut else whole, toy_cluster(4).topology(), prices)

    return play


def test_a_collective_shares_its_links_with_a_send(play) -> None:
    """From 1.5 s on both have half a link: 1 GB is sent at 3.5 s, the 1.5 GB that were left of the collective at 4 s."""
    timeline = play(kernel(1.0), GATHER, kernel(1.0), seconds=1.0, after=1.5)
    assert timeline.end == [5.0, 3.5, 1.5]
    assert timeline.owed == {0: {"tp exposed": 1.0}}
    assert breakdowns(timeline)[0]["tp exposed"] == 3.0


def test_kernels_are_not_disturbed(play) -> None:
    """What is sent beside kernels lengthens nothing: the collective begins after it."""
    timeline = play(kernel(3.0), GATHER, kernel(1.0), seconds=1.0, after=1.5)
    assert timeline.end == [6.0, 2.5, 1.5]
    assert not timeline.owed


def test_a_collective_beside_kernels_is_under_way_when_it_is_disturbed(play) -> None:
    """It began at 0 and has 1 GB left at 1 s: it takes until 3 s, and the last kernel waits for it."""
    timeline = play(Start(GATHER), kernel(2.0), Join(GATHER), kernel(1.0), seconds=1.0, after=1.0)
    assert timeline.end == [4.0, 3.0, 1.0]
    assert timeline.owed == {0: {"tp exposed": 1.0}}


def test_kernels_are_slowed_down_as_long_as_the_collective_takes(play) -> None:
    """Of 4 s of kernels 0.5 s are done after 1 s beside the collective, 1 s more until it ends at 3 s, and the rest by itself."""
    timeline = play(Start(GATHER), kernel(4.0), Join(GATHER), seconds=1.0, after=1.0, slowdown=2.0)
    assert timeline.end == [5.5, 3.0, 1.0]
    assert timeline.stretch[0] == 0.5  # beside the 1 s by which the collective alone slows them down
    assert breakdowns(timeline)[0]["slowdown"] == 1.5


def test_the_rest_of_a_block_is_one_event_again(play) -> None:
    """Of a hundred layers the tenth is disturbed: its collective and the one event of what is left, besides three ops."""
    layer = kernel(1.0), GATHER
    assert play(*layer, seconds=1.0, after=28.5, times=100).end == [301.0, 30.5, 28.5]
    counts = {times: play(*layer, seconds=1.0, after=28.5, times=times).events for times in (20, 100)}
    assert counts[20] == counts[100]
    assert play(*layer, seconds=1.0, after=28.5, times=100, cut=True).events > 200


def test_what_is_on_other_links_than_a_send_is_one_event(toy_cluster, toy_prices) -> None:
    """Two nodes of two GPUs gather inside nodes three times, until 9 s, then 2 s between nodes, and send to others from 1.5 s on:
    1 s, before the NICs are asked for, or 8 s, of which the last is beside that, at half of each NIC.
    """

    def play(seconds: float, times: int = 3, cut: bool = False) -> Timeline:
        across = replace(GATHER, axis="cp", label="across")
        stages = [Cohort({"pp": 0}), Cohort({"pp": 1})]
        stages[0].add(Op("compute", Block("forward", (Run(times, (kernel(1.0), GATHER)), Run(1, (across,))))))
        stages[1].add(Op("compute", block(1.5)))
        stages[0].add(Op("pp next", Send(seconds * 1e9, 1, "x"), (Ref(1, 0),)))
        whole = program(*stages, tp=2, cp=2, pp=2)
        return run(expand(whole, {0}) if cut else whole, toy_cluster(2, 4).topology(), toy_prices(collective_launch="0 s"))

    assert [play(seconds).end for seconds in (1.0, 8.0)] == [[11.0, 2.5, 1.5], [11.5, 10.0, 1.5]]
    for seconds in (1.0, 8.0, 300.0):
        assert play(seconds).end == play(seconds, cut=True).end[-3:]
    assert play(1.0).events == play(1.0, times=80).events
    assert play(8.0).events == play(245.0, times=80).events < 20


# -- what ran inside ------------------------------------------------------------------------------------------------------


def pieces(timeline: Timeline) -> list[tuple[int, str, str, float, float]]:
    """Kernels and collectives of each lane with their times, kernels in a row together."""
    result: list[tuple[int, str, str, float, float]] = []
    for row in timeline.rows():
        last = result[-1] if result else None
        if row.kind in PHASES and last and (*last[:3], last[4]) == (row.lane, row.op.stream, row.kind, row.start):
            result[-1] = (*last[:4], row.end)
        elif row.end > row.start:
            result.append((row.lane, row.op.stream, row.kind, row.start, row.end))
    return sorted(result)


def test_a_block_says_what_ran_inside_and_when(play) -> None:
    """One send comes while the collective runs, which ends at 4 s."""
    timeline = play(kernel(1.0), GATHER, kernel(1.0), seconds=1.0, after=1.5)
    inside = [(op.stream, op.start, op.end) for op in timeline.inside[0].ops()]
    assert inside == [("compute", 0.0, 1.0), ("compute", 1.0, 4.0), ("compute", 4.0, 5.0)]
    assert [row.kind for row in timeline.rows()] == ["forward", "all_gather", "forward", "send", "forward"]
    assert sum(row.bytes for row in timeline.rows() if row.kind == "all_gather") == 2e9
    later = [(op.start, op.end) for op in timeline.inside[0].later(3.0).ops()]
    assert later == [(start + 3.0, end + 3.0) for _, start, end in inside]


@pytest.mark.parametrize("after", [0.5, 1.0, 2.5, 3.75, 7.25])
@pytest.mark.parametrize("slowdown", [1.0, 2.0])
@pytest.mark.parametrize(
    "items",
    [
        (kernel(1.0), GATHER),
        (Start(GATHER), kernel(3.0), Join(GATHER), kernel(1.0)),
        (Start(FREE), kernel(3.0), Join(FREE), kernel(1.0)),
        (kernel(2.0), GATHER, GATHER),
    ],
)
def test_what_ran_inside_is_what_a_block_that_is_cut_runs(play, items, slowdown, after) -> None:
    whole, cut = (play(*items, seconds=1.0, after=after, times=4, cut=cut, slowdown=slowdown) for cut in (False, True))
    assert pieces(whole) == pieces(cut)


def test_collectives_of_a_step_are_where_they_are_when_all_blocks_are_cut() -> None:
    """Of a job whose tp=4 groups share their nodes: every kernel and collective of every lane."""
    plan = dict(tp=4, pp=4, accumulation=4, sequence_parallel=True, overlap_tp="none", sequence=2048)
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=4, plan=plan)
    timeline = simulate(job)
    touched = timeline.op_costs.touched()
    assert timeline.inside
    assert touched
    cut = run(expand(timeline.program, touched), job.cluster.topology(), prices_of(job))
    assert [piece[:3] for piece in pieces(timeline)] == [piece[:3] for piece in pieces(cut)]
    times = [[piece[3:] for piece in pieces(each)] for each in (timeline, cut)]
    assert times[0] == [pytest.approx(each, abs=1e-9) for each in times[1]]


def test_a_plan_with_tp_below_the_node_costs_what_one_with_tp_of_the_node_does() -> None:
    """GPT-3 175B on 512 H100: with tp=4 sends of two stages in a node meet collectives inside blocks, which stay one op each."""
    wide, narrow = (
        simulate(
            read_job(
                model="gpt3-175b",
                cluster="dgx-h100",
                nodes=64,
                plan=dict(tp=tp, pp=8, accumulation=64, recompute="full", sequence=2048),
            )
        )
        for tp in (8, 4)
    )
    assert len(narrow.end) == len(wide.end) == 2010
    assert wide.events <= narrow.events < 1.1 * wide.events


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.integers(0, 10**9))
def test_times_are_those_of_blocks_that_are_cut(number) -> None:
    """The step of a random job is near to that of the job with all blocks cut at their collectives. By how much other collectives
    lengthen kernels that wait for their launch depends on where a block is cut.
    """
    job, timeline = played(number)
    assume(timeline.op_costs.lane is None and timeline.op_costs.touched())
    cut = run(expand(timeline.program, timeline.op_costs.touched()), job.cluster.topology(), prices_of(job))
    assert timeline.step == pytest.approx(cut.step, rel=2e-3)


def test_pieces_are_drawn_out_to_what_effects_made_of_a_passage() -> None:
    """From 1 s to 9 s in place of 5 s: twice as long, from the same beginning."""
    alone = [(1.0, 2.0), (2.0, 4.0), (4.0, 5.0)]
    assert _stretched(alone, Passage(0, 1, 1.0, 9.0), 5.0) == [(1.0, 3.0), (3.0, 7.0), (7.0, 9.0)]
    assert _stretched(alone, Passage(0, 1, 1.0, 5.0), 5.0) == alone
    assert _stretched([(1.0, 1.0)], Passage(0, 1, 1.0, 9.0), 1.0) == [(1.0, 1.0)]
