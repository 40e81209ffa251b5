"""A program made of the passes of a few microbatches is the one that is lowered pass by pass, and is played to the same times."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from shardyard import UserError, read_job
from sim.analysis.summary import summarise
from sim.op_columns import RepeatedCohort
from sim.program import Op, Program
from strategies import predict
from strategies.job import Job
from strategies.lowering import repeated
from strategies.lowering.lower import lower
from strategies.lowering.repeated import lowered
from strategies.planner.uncertainty import interval_of

MODEL = {"name": "deep", "hidden": 512, "layers": 16, "heads": 8, "vocabulary": 8000, "context": 512}
CHUNKS = {"interleaved": 2, "looped-bfs": 2, "interleaved-zb": 2}


def job_of(schedule: str = "1f1b", nodes: int = 1, layers: int = 16, **plan: Any) -> Job:
    chunks = {"chunks": CHUNKS[schedule]} if schedule in CHUNKS else {}
    given = dict(sequence=512, pp=4, accumulation=24, schedule=schedule) | chunks | plan
    return read_job(model=MODEL | {"layers": layers}, cluster="dgx-h100", nodes=nodes, plan=given)


def both(job: Job) -> tuple[Program, Program]:
    return lowered(job.model, job.resolve()), lower(job.model, job.resolve())


def is_repeated(program: Program) -> bool:
    return all(isinstance(cohort, RepeatedCohort) for cohort in program.cohorts)


def plain(op: Op) -> Op:
    return replace(op, work=type(op.work))  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{}, {"data_parallel": "zero1"}, {"kernels": "torch", "schedule": "zb-h1"}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", *CHUNKS])
def test_passes_repeat_themselves(schedule: str, more: dict[str, Any]) -> None:
    program, by_pass = both(job_of(**{"schedule": schedule} | more))
    assert is_repeated(program)
    same = [field.name for field in fields(Program) if field.name != "cohorts"]
    assert [getattr(program, name) for name in same] == [getattr(by_pass, name) for name in same]
    for mine, theirs in zip(program.cohorts, by_pass.cohorts, strict=True):
        assert (mine.at, mine.resident, mine.hosted, mine.passes) == (theirs.at, theirs.resident, theirs.hosted, theirs.passes)
        assert mine.count == theirs.count
        assert list(map(plain, mine.ops)) == list(map(plain, theirs.ops))
        pairs = {(id(op.work), id(other.work)) for op, other in zip(mine.ops, theirs.ops, strict=True)}
        assert len(pairs) == len({first for first, _ in pairs}) == len({second for _, second in pairs})
        numbers = range(0, mine.count, 7)
        assert [mine.waits(number) for number in numbers] == [theirs.waits(number) for number in numbers]
        assert [mine.like(number).work for number in numbers] == [mine.ops[number].work for number in numbers]


@pytest.mark.parametrize(
    "more", [{"data_parallel": "zero3"}, {"overlap_p2p": False}, {"schedule": "chimera"}, {"accumulation": 8}], ids=str
)
def test_passes_that_wait_for_others_are_lowered_one_by_one(more: dict[str, Any]) -> None:
    """Parameters gathered ahead, sends that the next pass waits for, two copies of the model; and a few microbatches."""
    assert not is_repeated(lowered((job := job_of(**more)).model, job.resolve()))


JOBS = {
    "nothing contends": dict(pp=16, nodes=2, accumulation=40, variability=0.03),
    "split backward passes": dict(pp=16, nodes=2, accumulation=40, schedule="zb-h1"),
    "all microbatches are played": dict(pp=16, nodes=2, accumulation=24, schedule="gpipe"),
    "several places": dict(pp=8, nodes=2, accumulation=40, data_parallel="zero1"),
    "links are shared": dict(pp=4, tp=2, nodes=2, accumulation=40, sequence_parallel=True),
    "hosts wait": dict(pp=4, nodes=2, accumulation=40, schedule="interleaved", kernels="torch"),
}


@pytest.mark.parametrize("given", JOBS.values(), ids=JOBS)
def test_predictions_are_those_of_ops_one_by_one(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Times, the expected step, what it is made of, memory and the interval, to the bit."""
    plan = {name: value for name, value in given.items() if name != "variability"}
    job = replace(job_of(**plan), variability=0.03)
    monkeypatch.setattr(predict, "KEPT", 0)
    mine = predict.played(job)
    monkeypatch.setattr(predict, "lowered", lower)
    theirs = predict.played(job)
    assert is_repeated(mine.program)
    assert not is_repeated(theirs.program)
    assert (mine.start, mine.end, mine.launched, mine.periods) == (theirs.start, theirs.end, theirs.launched, theirs.periods)
    summaries = [summarise(each, total=True) for each in (mine, theirs)]
    assert summaries[0] == summaries[1]
    assert summaries[0].variability is not None
    intervals = [interval_of(each, summary.step_seconds) for each, summary in zip((mine, theirs), summaries, strict=True)]
    assert intervals[0] == intervals[1]


def test_a_deep_pipeline_is_worked_out_without_its_ops() -> None:
    """64 stages and 512 microbatches: as many events as there are passes, sends and updates, of which none is an object.

    Of sequences of 512 tokens four of some 8,600 sends would come to a GPU beside another one, and share its link by events.
    """
    stages, microbatches = 64, 512
    job = job_of(nodes=8, layers=stages, pp=stages, accumulation=microbatches, sequence=128)
    timeline = predict.played(replace(job, model=job.model.model_copy(update={"tied": False})))
    summary = summarise(timeline)
    assert summary.events == 2 * stages * microbatches + 2 * (stages - 1) * microbatches + stages
    assert is_repeated(timeline.program)
    assert not any("ops" in vars(cohort) for cohort in timeline.program.cohorts)


def test_a_step_of_too_many_ops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of()
    program = lowered(job.model, job.resolve())
    cohort = program.cohorts[0]
    assert isinstance(cohort, RepeatedCohort)
    with pytest.raises(UserError, match="not played or shown op by op"):
        _ = RepeatedCohort(cohort, cohort.columns, cohort.passes, cohort.count - 1).ops
    monkeypatch.setattr(repeated, "MOST", sum(each.count for each in program.cohorts) - 1)
    with pytest.raises(UserError, match="ops of all stages is not played"):
        lowered(job.model, job.resolve())
