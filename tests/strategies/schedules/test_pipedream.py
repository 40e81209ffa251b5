"""PipeDream and PipeDream-2BW: a steady state without bubble, its versions of parameters, its updates, what is refused."""

from __future__ import annotations

import pytest

from reports.figures.timeline_bars import strips
from reports.trace import events
from sim.analysis.breakdown import breakdowns
from sim.analysis.memory import ledger
from sim.analysis.volume import volumes
from sim.engine.player import run
from sim.program import MEMORY_KINDS, Block
from strategies.lowering.lower import lower
from strategies.schedules import schedules
from topologies.reading import UserError

NAMES = ("pipedream", "pipedream-2bw")


@pytest.fixture
def play(toy_job, toy_prices):
    def player(schedule: str, p: int, m: int, gpus: int | None = None, **plan):
        job = toy_job(gpus or p, model={"layers": 8, "tied": False}, pp=p, accumulation=m, schedule=schedule, **plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())

    return player


def names(timeline, lane: int) -> list[str]:
    return [op.work.name for _, op in timeline.ops(lane) if isinstance(op.work, Block)]


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (2, 5), (4, 4), (4, 9)])
def test_a_step_is_its_microbatches_once(play, schedule: str, p: int, m: int) -> None:
    timeline = play(schedule, p, m)
    for lane in range(p):
        done = names(timeline, lane)
        updates = m if schedule == "pipedream" else 1
        assert [done.count(phase) for phase in ("forward", "backward", "optimizer")] == [m, m, updates]
        assert sum(breakdowns(timeline)[lane].values()) == timeline.step
        assert min(breakdowns(timeline)[lane].values()) >= 0.0


@pytest.mark.parametrize("schedule", NAMES)
def test_the_step_is_the_slowest_stage_without_bubble(play, schedule: str) -> None:
    """Narayanan 2019, section 3.1: in the steady state every stage is busy; the throughput is the slowest stage's."""
    timeline = play(schedule, 4, 8, sequence=1)  # transfers of next to nothing
    busy = [
        sum(timeline.end[n] - timeline.start[n] for n, op in timeline.ops(lane) if op.stream == "compute") for lane in range(4)
    ]
    assert timeline.step == pytest.approx(max(busy), rel=3e-2)


@pytest.mark.parametrize("schedule", NAMES)
def test_the_steady_state_is_what_a_longer_run_costs_more(play, schedule: str) -> None:
    """Twice the microbatches in a step take twice as long, since nothing is filled or drained."""
    once, twice = (play(schedule, 4, m).step for m in (8, 16))
    factor = (twice - (once if schedule == "pipedream" else 0)) / once
    assert factor == pytest.approx(1.0 if schedule == "pipedream" else 2.0, rel=5e-2)


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize(("gpus", "nodes", "tp", "pp"), [(8, 1, 2, 2), (4, 2, 2, 4), (6, 1, 3, 2)])
def test_folded_equals_unfolded_and_memory_is_given_back(toy_job, toy_prices, schedule, gpus, nodes, tp, pp) -> None:
    shape = {"layers": 5, "tied": False, "heads": 12, "hidden": 96, "ffn": 384, "vocabulary": 516}
    job = toy_job(gpus, nodes, model=shape, pp=pp, tp=tp, accumulation=5, schedule=schedule, algorithm="ring")
    costly = toy_prices(launch="1 us", slowdown=1.2, collective_launch="3 us")
    program = lower(job.model, job.resolve())
    folded, unfolded = (run(program, job.cluster.topology(), costly, fold=fold) for fold in (True, False))
    assert folded.step == pytest.approx(unfolded.step, rel=1e-3)
    for timeline in (folded, unfolded):
        for lane, actor in enumerate(timeline.lanes):
            assert sum(breakdowns(timeline)[lane].values()) == timeline.step
            held = ledger(timeline, lane).held
            assert held.min() >= -1e-6
            assert held[-1].sum() == pytest.approx(sum(size for _, size in program.cohorts[actor.cohort].resident))


def test_the_trace_has_no_time_before_the_step(play) -> None:
    trace = events(play("pipedream", 4, 8))
    assert min(event["ts"] for event in trace if "ts" in event) >= 0


def test_the_picture_is_full(play) -> None:
    """From 0 to the end of the step every stage works, also where its own step begins later."""
    timeline = play("pipedream-2bw", 4, 8, sequence=1)
    for limit in (400, 10):
        for lane in range(4):
            bars = strips(timeline, lane, limit).passes
            assert bars[0].start < 0.2 * timeline.step
            assert bars[-1].end > 0.8 * timeline.step


def test_versions_and_activations(play) -> None:
    """Stage s keeps p − s versions (Narayanan 2019, section 3.3), 2BW two (Narayanan 2021, section 3.1).

    Activations are 1F1B's.
    """
    flush = play("1f1b", 4, 8)

    def kept(timeline, lane: int, kind: str) -> float:
        return dict(timeline.program.cohorts[lane].resident)[kind]

    for schedule, versions in (("pipedream", (4, 3, 2, 1)), ("pipedream-2bw", (2, 2, 2, 2))):
        timeline = play(schedule, 4, 8)
        for lane, count in enumerate(versions):
            assert kept(timeline, lane, "parameter") == count * kept(flush, lane, "parameter")
            assert kept(timeline, lane, "optimizer") == kept(flush, lane, "optimizer")
            most = [ledger(each, lane).held[:, MEMORY_KINDS.index("activation")].max() for each in (timeline, flush)]
            assert most[0] == pytest.approx(most[1])


def test_gradients_are_reduced_with_every_update(play) -> None:
    """PipeDream all-reduces the replicas' gradients in every microbatch, 2BW once in a step, as 1F1B does."""
    flush, each, once = (volumes(play(name, 2, 4, gpus=4))[0]["dp"][0] for name in ("1f1b", *NAMES))
    assert each == pytest.approx(4 * flush)
    assert once == pytest.approx(flush)


@pytest.mark.parametrize("schedule", NAMES)
def test_what_makes_no_sense_is_refused(toy_job, schedule: str) -> None:
    for plan, tied, message in (
        ({"accumulation": 4, "data_parallel": "zero1"}, False, "keeps whole versions of its parameters"),
        ({"accumulation": 4}, True, "cannot share small's embedding"),
        ({"accumulation": 3}, False, "needs at least pp=4 microbatches in a step, and has 3"),
    ):
        with pytest.raises(UserError, match=message):
            toy_job(4, model={"tied": tied}, pp=4, schedule=schedule, **plan).resolve()


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_an_order_without_an_end_is_that_of_a_step_for_as_long_as_it_is_asked(name: str) -> None:
    """As stages are executed that never drain."""
    for rank in range(3):
        endless, step = (schedules[name].order(rank, 3, microbatches, 1) for microbatches in (2**40, 20))
        assert [next(endless) for _ in range(30)] == [next(step) for _ in range(30)]
