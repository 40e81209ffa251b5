"""A step that follows from one a period shorter is the one that is played, in every column and to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardyard import UserError, read_job
from sim.analysis.longer_step import one_period_longer
from sim.engine.player import run
from sim.timeline import Timeline
from strategies.predict import prices_of, program_of

WIDE = {"name": "wide", "hidden": 4096, "layers": 10, "heads": 32, "vocabulary": 8000, "context": 1024}
COLUMNS = ("start", "end", "launched", "stretch", "cost", "owed", "resumptions", "offset", "events", "lanes")


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
    follows = one_period_longer(short, long.program)
    assert follows is not None
    assert_equal(follows, long)


def assert_equal(follows: Timeline, played: Timeline) -> None:
    for name in COLUMNS:
        assert getattr(follows, name) == getattr(played, name), name
    assert follows.inside.keys() == played.inside.keys()
    for number, block in follows.inside.items():
        runs = [[(op.stream, op.start, op.end) for op in each.ops()] for each in (block, played.inside[number])]
        assert runs[0] == runs[1]


def test_the_cases_are_what_they_say() -> None:
    """Hosts that are held up, and links that are shared."""
    assert steps(24, 2, **CASES["hosts that are held up"][2])[0].resumptions
    for name in ("links that are shared", "gathers beside tensor parallelism"):
        short, _ = steps(6, 1, **CASES[name][2])
        assert short.inside
        assert short.contended < short.step / 2


def _programs(microbatches: int, period: int, plan: dict[str, Any]) -> Any:
    short, long = steps(microbatches, period, **plan)
    return short, long.program


PAIRS = CASES["a pipeline whose microbatches repeat in pairs"][2]  # of 10 layers on 4 stages, neighbours are equally slow


def test_a_step_that_has_not_come_into_a_steady_state_says_nothing() -> None:
    """Each second microbatch is alike, so one more is not known; and of three microbatches none comes after a full pipeline."""
    assert one_period_longer(*_programs(17, 1, PAIRS)) is None
    assert one_period_longer(*_programs(3, 2, PAIRS)) is None


def test_programs_of_unlike_plans_are_no_period_apart() -> None:
    """What is left to do has to be the same: with other buckets it is not."""
    short, _ = steps(16, 2, **PAIRS)
    other = steps(16, 2, **PAIRS | {"bucket": "1 MB"})[1]
    assert one_period_longer(short, other.program) is None
    assert one_period_longer(short, short.program) is None


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
    follows = one_period_longer(short, long.program)
    if follows is not None:
        assert_equal(follows, long)


def test_events_are_not_said_where_something_contends_for_the_first_time_in_the_period() -> None:
    """Before it, and after it, a period has its own; so what says nothing is as long as a period is."""
    short, long = steps(6, 1)
    says_nothing = [
        one_period_longer(replace(short, contended=short.step * (at + 0.5) / 200), long.program) is None for at in range(200)
    ]
    assert sum(says_nothing) / 200 == pytest.approx((long.step - short.step) / short.step, abs=0.01)
