"""A step told from one a period shorter is the one that is played: its times, what it costs and what it holds, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardyard import UserError, read_job
from sim.analysis.breakdown import breakdowns
from sim.analysis.stage_memory import stage_memory
from sim.analysis.steady_state import last_period
from sim.engine.player import run
from sim.pricing.prices import Prices
from sim.timeline import Period, Timeline
from strategies import predict as predict_module
from strategies.job import Job
from strategies.plan.resolved import Resolved
from strategies.predict import prices_of, program_of
from strategies.schedules import passes_of_period

WIDE = {"name": "wide", "hidden": 4096, "layers": 10, "heads": 32, "vocabulary": 8000, "context": 1024}


def steps(microbatches: int, period: int, nodes: int = 1, **plan: Any) -> tuple[Timeline, Timeline]:
    """Played steps of so many microbatches, and of a period more."""
    job = read_job(model=WIDE, cluster="dgx-h100", nodes=nodes, plan=dict(sequence=512, accumulation=480) | plan)
    resolved, prices, topology = job.resolve(), prices_of(job), job.cluster.topology()
    programs = (program_of(job.model, resolved, count) for count in (microbatches, microbatches + period))
    short, long = (run(program, topology, prices) for program in programs)
    return short, long


CASES = {
    "one rank": (6, 1, {}),
    "gathered for each microbatch": (6, 1, dict(data_parallel="zero3")),
    "a pipeline whose microbatches repeat in pairs": (16, 2, dict(pp=4, microbatch=4)),
    "a longer one": (30, 2, dict(pp=8, recompute="full", microbatch=2)),
    "chunks": (24, 4, dict(pp=4, schedule="interleaved", chunks=2)),
    "hosts that are held up": (24, 2, dict(pp=4, microbatch=4, overlap_p2p=False)),
    "links that are shared": (24, 2, dict(pp=4, tp=2, nodes=2, microbatch=4, data_parallel="zero1", sequence_parallel=True)),
    "gathers beside tensor parallelism": (6, 1, dict(tp=4, nodes=2, data_parallel="zero3", sequence_parallel=True)),
}


@pytest.mark.parametrize(("microbatches", "period", "plan"), CASES.values(), ids=CASES)
def test_what_follows_is_what_is_played(microbatches: int, period: int, plan: dict[str, Any]) -> None:
    short, long = steps(microbatches, period, **plan)
    last = last_period_of(short, microbatches, period, **plan)
    assert last is not None
    assert_equal(short, last, long)


@pytest.mark.parametrize(("effect", "played"), [("gpu 0: speed 0.9", [8]), ("gpu 15: speed 0.9", [8, 128])])
def test_replicas_that_do_not_wait_for_each_other_are_not_played_in_vain(
    effect: str, played: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of the last stage, which has the head besides, holds up its replica, another does not: with it both replicas go on
    at one pace, and few microbatches tell all.
    """
    asked: list[int] = []
    play = predict_module._played

    def listening(job: Job, resolved: Resolved, prices: Prices, microbatches: int | None = None, fold: bool = True) -> Timeline:
        asked.append(microbatches or resolved.microbatches)
        return play(job, resolved, prices, microbatches, fold)

    plan = dict(tp=2, pp=4, data_parallel="zero1", sequence=4096, global_batch=256)
    job = read_job(
        model=WIDE | {"layers": 8, "vocabulary": 32000, "context": 4096}, cluster="dgx-h100", nodes=2, plan=plan, effects=[effect]
    )
    whole = predict_module.simulate(job).step
    monkeypatch.setattr(predict_module, "_played", listening)
    assert predict_module.played(job).step == whole
    assert asked == played


def last_period_of(short: Timeline, microbatches: int, period: int, **plan: Any) -> Period | None:
    """Of a step of so many microbatches."""
    schedule = plan.get("schedule", "1f1b")
    chunks = plan.get("chunks", 2 if schedule in ("zb-v", "chimera", "dualpipe") else 1)
    passes = passes_of_period(schedule, plan.get("pp", 1), microbatches, chunks, period)
    return last_period(short, passes) if passes else None


def assert_equal(short: Timeline, period: Period, played: Timeline) -> None:
    """Each lane does what it did a period before from the end of the period on."""
    told = replace(short, period=period, periods=1, events=short.events + period.events)
    assert (told.step, told.events) == (played.step, played.events)
    for lane, base in enumerate(short.offset):
        own, all_of_them = (
            slice(base, base + len(short.cohort(lane).ops)),
            slice(played.offset[lane], played.offset[lane] + len(played.cohort(lane).ops)),
        )
        before, again = short.ends[own] < period.end, short.ends[own] >= period.end - period.seconds
        for column in ("starts", "ends"):
            times = getattr(short, column)[own]
            expected = sorted([*times[before].tolist(), *(times[again] + period.seconds).tolist()])
            assert sorted(getattr(played, column)[all_of_them].tolist()) == expected
    assert breakdowns(told) == breakdowns(played)
    assert [each.times for each in told.distinct] == [each.times for each in played.distinct]
    assert [stage_memory(told, lane) for lane in range(len(told.lanes))] == [
        stage_memory(played, lane) for lane in range(len(played.lanes))
    ]


def test_the_cases_are_what_they_say() -> None:
    """Hosts that are held up, and links that are shared."""
    assert steps(24, 2, **CASES["hosts that are held up"][2])[0].resumptions
    for name in ("links that are shared", "gathers beside tensor parallelism"):
        short, _ = steps(6, 1, **CASES[name][2])
        assert short.inside
        assert short.contended < short.step / 2


PAIRS = CASES["a pipeline whose microbatches repeat in pairs"][2]  # of 10 layers on 4 stages, neighbours are equally slow


def test_a_step_that_has_not_come_into_a_steady_state_says_nothing() -> None:
    """Each second microbatch is alike, so one more is not known; and of three microbatches none comes after a full pipeline."""
    for microbatches, period in ((17, 1), (3, 2)):
        assert last_period_of(steps(microbatches, period, **PAIRS)[0], microbatches, period, **PAIRS) is None


@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.fixed_dictionaries(
        {
            "tp": st.sampled_from([1, 2, 4]),
            "pp": st.sampled_from([1, 2, 4]),
            "schedule": st.sampled_from(["1f1b", "zb-h1", "zb-v", "interleaved", "chimera", "dualpipe"]),
            "data_parallel": st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
            "overlap_p2p": st.booleans(),
            "recompute": st.sampled_from(["none", "full"]),
            "microbatch": st.sampled_from([1, 4]),
        }
    ),
    st.sampled_from([12, 16, 20]),
    st.sampled_from([1, 2, 4]),
)
def test_whatever_follows_is_what_is_played(plan: dict[str, Any], microbatches: int, period: int) -> None:
    more = {"chunks": 2} if plan["schedule"] == "interleaved" else {}
    try:
        short, long = steps(microbatches, period, nodes=2, **plan, **more)
    except UserError:
        return
    last = last_period_of(short, microbatches, period, **plan, **more)
    if last is not None:
        assert_equal(short, last, long)


def test_events_are_not_said_where_something_contends_for_the_first_time_in_the_period() -> None:
    """Before it, and after it, a period has its own; so what says nothing is as long as a period is."""
    short, long = steps(6, 1)
    says_nothing = [last_period_of(replace(short, contended=short.step * (at + 0.5) / 200), 6, 1) is None for at in range(200)]
    assert sum(says_nothing) / 200 == pytest.approx((long.step - short.step) / short.step, abs=0.01)
