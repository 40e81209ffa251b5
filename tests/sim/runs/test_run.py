"""Runs of a few failures, worked out by hand; laws that hold for every run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.runs import ledger
from sim.runs.run import Outcome, Run
from sim.runs.spec import Component, Elastic, Pace, Repair, RunSpec, Saving
from topologies.documents.durations import Spread


def always(seconds: float) -> Spread:
    return Spread(mean=seconds)


def play(spec: RunSpec, seed: int = 0, record: bool = False) -> Outcome:
    return Run(spec, np.random.SeedSequence(seed), record).outcome()


HUNDRED = RunSpec(step=1.0, work=100.0, steps=100.0, nodes=4, gpus_per_node=2)
ONCE = Component("gpu", always(55.0), unit="job")  # fails every 55 s of exposure


def spent(outcome: Outcome, gpus: int = 8) -> dict[str, float]:
    """Seconds by cause, those that are not 0."""
    return {cause: seconds / gpus for cause, seconds in outcome.gpu_seconds.items() if abs(seconds) > 1e-9}


def test_without_failures_a_run_takes_what_its_steps_take_to_the_bit() -> None:
    step, steps = 0.1 + 1e-9, 12345.678
    outcome = play(RunSpec(step=step, work=step * steps, steps=steps, nodes=4, gpus_per_node=2))
    assert outcome.seconds == step * steps
    assert outcome.goodput == outcome.ettr == 1.0
    assert outcome.steps == steps


def test_a_failure_loses_what_was_done_since_the_checkpoint() -> None:
    """Saves of 2 s every 20 steps: at 55 s 51 steps are done (two saves), 11 since the checkpoint; a start takes 10 s."""
    spec = replace(
        HUNDRED, components=(ONCE,), savings=(Saving("storage", 20, blocking=2.0, restore=3.0),), initialization=always(10.0)
    )
    outcome = play(replace(spec, idle_failures=False), record=True)
    # 55 s of exposure: 40 steps kept, 11 lost; then to step 80 at 4 · … : 55 s are 40 … 91 with saves at 60 and 80: 11 lost
    assert spent(outcome) == {
        "productive": 100.0,
        "wasted progress": 22.0,
        "checkpoint save": 8.0,
        "checkpoint restore": 6.0,
        "initialization": 30.0,
    }
    assert outcome.seconds == 166.0
    assert [span.cause for span in outcome.timeline] == [
        "initialization",
        "productive",
        "wasted progress",
        "initialization",
        "checkpoint restore",
        "productive",
        "wasted progress",
        "initialization",
        "checkpoint restore",
        "productive",
    ]


def test_a_flush_that_is_not_over_does_not_count() -> None:
    """Asynchronous saves every 20 steps are complete 16 s later: at 55 s that of step 40 is not, and 35 steps are lost."""
    spec = replace(HUNDRED, components=(ONCE,), savings=(Saving("storage", 20, flush=16.0),), idle_failures=False, deadline=56.5)
    assert spent(play(spec)) == {"productive": 21.0, "wasted progress": 35.5}  # half a step is unfinished in the end


def test_a_flush_goes_on_until_a_timeout_ends_the_processes_that_hang() -> None:
    """The save of step 40 is complete at 56 s: processes that hang from 55 s on write it, and the watchdog ends them at 75 s."""
    savings = (Saving("storage", 20, flush=16.0),)
    hang = replace(ONCE, hang=1.0)
    spec = replace(HUNDRED, components=(hang,), savings=savings, idle_failures=False, timeout=20.0, deadline=80.0)
    assert spent(play(spec)) == {"productive": 45.0, "wasted progress": 15.0, "detection": 20.0}


def test_parts_of_a_bad_node_live_shorter() -> None:
    """Parts that live 90 s, 30 s in bad nodes: the first failure comes at 30 s if any node is bad."""
    wears = Component("fan", Spread(mean=90.0))
    first = {
        bad: play(replace(HUNDRED, components=(wears,), bad=bad, bad_factor=3.0, deadline=45.0)).failures for bad in (0.0, 1.0)
    }
    assert first == {0.0: {"fan": 0}, 1.0: {"fan": 4}}


def test_a_local_checkpoint_is_lost_with_its_node() -> None:
    """In memory every 5 steps, two copies; in storage every 20. One node: from memory; two: from storage."""
    savings = (Saving("memory", 5, copies=2, restore=1.0), Saving("storage", 20, restore=7.0))
    spec = replace(HUNDRED, savings=savings, idle_failures=False, deadline=60.0)
    result = play(replace(spec, components=(replace(ONCE, life=always(38.0)),)))
    two = play(replace(spec, components=(replace(ONCE, life=always(38.0), nodes=2),)))
    assert result.gpu_seconds["checkpoint restore"] == 8 * 1.0
    assert result.gpu_seconds["wasted progress"] == 8 * 3.0  # 38 → 35
    assert two.gpu_seconds["checkpoint restore"] == 8 * 7.0
    assert two.gpu_seconds["wasted progress"] == 8 * 18.0  # 38 → 20


def test_detection_diagnosis_and_allocation_come_one_after_the_other() -> None:
    crash = replace(ONCE, life=always(55.0))
    spec = replace(
        HUNDRED,
        components=(crash,),
        savings=(Saving("storage", 50),),
        heartbeat=1.0,
        timeout=600.0,
        diagnosis=always(2.0),
        allocation=4.0,
        idle_failures=False,
        deadline=80.0,
    )
    seconds = spent(play(spec))
    assert (seconds["detection"], seconds["diagnosis"], seconds["waiting for nodes"]) == (1.0, 2.0, 4.0)
    hang = play(replace(spec, components=(replace(crash, hang=1.0),), deadline=1000.0))
    assert spent(hang)["detection"] % 600.0 == pytest.approx(0.0)


def test_spares_are_held_and_idle() -> None:
    """Two spare nodes for 55 s, one of them after the failure."""
    spec = replace(HUNDRED, components=(ONCE,), savings=(Saving("storage", 1),), spares=2, pool=0, idle_failures=False)
    outcome = play(replace(spec, repair=Repair(always(1e9))))
    assert outcome.gpu_seconds["idle spares"] == pytest.approx(2 * (2 * 55.0 + 45.0))
    assert outcome.goodput < outcome.ettr == 1.0


def test_without_spares_the_job_waits_for_repairs() -> None:
    spec = replace(HUNDRED, components=(ONCE,), savings=(Saving("storage", 1),), pool=0, repair=Repair(always(30.0)))
    outcome = play(replace(spec, idle_failures=False))
    assert outcome.waited == 1
    assert outcome.gpu_seconds["waiting for nodes"] == 8 * 30.0


def test_a_job_that_waits_for_a_node_ends_at_its_deadline() -> None:
    spec = replace(HUNDRED, components=(ONCE,), pool=0, repair=Repair(always(1e9)), idle_failures=False, deadline=80.0)
    outcome = play(spec)
    assert outcome.seconds == 80.0
    assert spent(outcome) == {"wasted progress": 55.0, "waiting for nodes": 25.0}


def test_the_last_step_is_trained_again_where_it_fails() -> None:
    """The 99th step is saved; what fails half a step before the end takes that step again."""
    late = Component("gpu", always(99.5), unit="job")
    outcome = play(replace(HUNDRED, components=(late,), savings=(Saving("storage", 99),), idle_failures=False))
    assert outcome.steps == 100
    assert spent(outcome) == {"productive": 100.0, "wasted progress": 0.5}


def test_an_elastic_job_goes_on_without_a_replica() -> None:
    """Two replicas of two nodes; with one of them steps bring half. It comes back after 30 s, and grows at the next step."""
    elastic = Elastic((Pace(1.0, 0.5),), 2, 1.5, rollback=False)
    spec = replace(HUNDRED, components=(ONCE,), savings=(Saving("storage", 10),), pool=0, repair=Repair(always(30.0)))
    outcome = play(replace(spec, elastic=elastic, idle_failures=False, deadline=100.0), record=True)
    # 55 steps; 1.5 s; 28.5 s until the node is there, then the step under way: 29 steps of half; 1.5 s; 12 s until 100
    assert spent(outcome) == pytest.approx(
        {"productive": 55 + 14.5 + 13, "missing replicas": 14.5, "initialization": 3.0}, abs=1.0
    )
    assert outcome.gpu_seconds["wasted progress"] <= 8 * 1.0


def test_an_elastic_job_takes_in_a_free_node() -> None:
    """As before, but a free node is there after 10 s: 1.5 s, then 8.5 s and the step under way with half, 1.5 s, all again."""
    elastic = Elastic((Pace(1.0, 0.5),), 2, 1.5, rollback=False)
    spec = replace(HUNDRED, components=(ONCE,), savings=(Saving("storage", 10),), pool=1, repair=Repair(always(1e9)))
    outcome = play(replace(spec, elastic=elastic, allocation=10.0, idle_failures=False, deadline=100.0))
    assert spent(outcome) == pytest.approx(
        {"productive": 55 + 4.5 + 32.5, "missing replicas": 4.5, "initialization": 3.0}, abs=1.01
    )


def test_slow_nodes_make_steps_longer_for_a_while() -> None:
    """After 55 s steps take twice as long for 20 s: ten of them."""
    slow = Component("throttled", always(55.0), unit="job", slow=2.0, lasts=always(20.0))
    outcome = play(replace(HUNDRED, components=(slow,), savings=(Saving("storage", 1000),), idle_failures=False))
    assert outcome.seconds == pytest.approx(110.0, abs=11)
    assert outcome.gpu_seconds["slow steps"] == pytest.approx(8 * 10.0, abs=8 * 10)
    assert outcome.steps == 100


def test_equal_seeds_give_equal_runs() -> None:
    spec = replace(
        HUNDRED,
        components=(Component("gpu", Spread(mean=200.0, kind="weibull", shape=0.8)),),
        pool=3,
        savings=(Saving("storage", 7, 0.5),),
        repair=Repair(always(40.0)),
    )
    assert play(spec, 3) == play(spec, 3)
    assert play(spec, 3) != play(spec, 4)


lives = st.builds(
    lambda mean, kind, shape: Spread(mean=mean, kind=kind, shape=shape),
    st.floats(50, 5000),
    st.sampled_from(["exponential", "weibull", "lognormal"]),
    st.floats(0.5, 2.0),
)
components = st.builds(
    lambda number, life, unit, nodes, replaced, hang: Component(f"part {number}", life, unit, nodes, replaced, hang),
    st.integers(0, 10**6),
    lives,
    st.sampled_from(["node", "switch", "job"]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.3]),
)
savings = st.lists(
    st.builds(
        Saving,
        st.sampled_from(["a", "b"]),
        st.integers(1, 50),
        st.floats(0, 5),
        st.floats(0, 20),
        st.floats(0, 10),
        st.sampled_from([None, 1, 2]),
    ),
    max_size=2,
)
elastics = st.none() | st.builds(lambda paces, roll: Elastic(paces, 2, 1.0, roll), st.just((Pace(1.1, 0.5),)), st.booleans())
specs = st.builds(
    RunSpec,
    step=st.floats(0.5, 2.0),
    work=st.just(0.0),
    nodes=st.just(4),
    gpus_per_node=st.just(8),
    steps=st.floats(50, 2000),
    deadline=st.sampled_from([float("inf"), 900.0, 5000.0]),
    components=st.lists(components, max_size=3, unique_by=lambda each: each.name).map(tuple),
    savings=savings.map(tuple),
    repair=st.builds(Repair, st.just(always(60.0)), technicians=st.sampled_from([None, 1])),
    spares=st.integers(0, 2),
    pool=st.sampled_from([None, 0, 2]),
    allocation=st.sampled_from([0.0, 30.0]),
    bad=st.sampled_from([0.0, 0.3]),
    bad_factor=st.just(3.0),
    heartbeat=st.just(5.0),
    timeout=st.just(60.0),
    diagnosis=st.just(Spread(mean=10.0, kind="exponential")),
    misdiagnosis=st.sampled_from([0.0, 0.3]),
    initialization=st.just(Spread(mean=20.0, kind="lognormal", shape=0.4)),
    evaluation=st.just(3.0),
    evaluation_steps=st.sampled_from([0, 33]),
    elastic=elastics,
    idle_failures=st.booleans(),
).map(lambda spec: replace(spec, work=spec.step * spec.steps, deadline=min(spec.deadline, 20 * spec.step * spec.steps)))


@given(spec=specs, seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_the_ledger_closes(spec: RunSpec, seed: int) -> None:
    """Every GPU-second has one cause, none is negative, and what is productive is what the progress is worth."""
    run = Run(spec, np.random.SeedSequence(seed))
    outcome = run.outcome()
    job = outcome.held - outcome.gpu_seconds[ledger.SPARES]
    assert job == pytest.approx(outcome.seconds * spec.gpus, rel=1e-9)
    assert min(outcome.gpu_seconds.values()) >= -1e-6
    assert outcome.gpu_seconds[ledger.PRODUCTIVE] == pytest.approx(outcome.steps * spec.step * spec.gpus, rel=1e-9, abs=1e-6)
    assert outcome.seconds <= spec.deadline
    assert outcome.seconds == pytest.approx(spec.deadline) or outcome.steps == spec.steps
    assert -1e-9 <= outcome.goodput <= outcome.ettr + 1e-12 <= 1 + 1e-9


@given(seed=st.integers(0, 2**32), spares=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_more_spares_deliver_no_less(seed: int, spares: int) -> None:
    """On average of twenty runs that meet the same failures; a single run may be unlucky when the next one falls on a save."""
    spec = replace(
        HUNDRED,
        work=3e5,
        steps=3e5,
        deadline=3e5,
        components=(Component("gpu", Spread(mean=4e4, kind="exponential")),),
        savings=(Saving("storage", 300, 2.0),),
        pool=0,
        repair=Repair(Spread(mean=2e4, kind="exponential")),
    )
    fewer, more = (
        np.mean([play(replace(spec, spares=count), seed + number).steps for number in range(20)])
        for count in (spares, spares + 1)
    )
    assert more >= fewer * 0.995


@given(spec=specs.filter(lambda spec: spec.elastic is None and spec.deadline == 20 * spec.work), seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_the_record_says_what_the_ledger_says(spec: RunSpec, seed: int) -> None:
    """Pieces of a recorded run follow each other without a gap, and those of each cause add up to its entry."""
    outcome = play(spec, seed, record=True)
    pieces = [piece for span in outcome.timeline for piece in span.pieces(0.0, outcome.seconds)]
    assert [start for start, _, _ in pieces[1:]] == pytest.approx([end for _, end, _ in pieces[:-1]], abs=1e-5)
    seconds = dict.fromkeys(ledger.CAUSES, 0.0)
    for start, end, cause in pieces:
        seconds[cause] += end - start
    entries = {cause: entry / spec.gpus for cause, entry in outcome.gpu_seconds.items() if cause != ledger.SPARES}
    del seconds[ledger.SPARES]
    assert seconds == pytest.approx(entries, abs=1e-4, rel=1e-6)
