"""What one played step says: every table that is made of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from reports.api.step import predict as predict_with_interval
from sim.analysis.breakdown import breakdowns
from sim.analysis.collective_sweep import of_step
from sim.analysis.host_launches import host_launches
from sim.analysis.link_load import link_loads, matrix
from sim.analysis.memory import ledger, tensor_capacity
from sim.analysis.summary import summarise
from sim.analysis.volume import volumes
from sim.replay.step import StepReplay
from sim.timeline import Timeline, op_label
from strategies.memory_by_layer import memory_by_layer
from strategies.planner.variability import variability
from strategies.predict import from_some_microbatches, predict, prices_of, simulate
from strategies.together import together
from tests.results.jobs import EFFECTS, random_question_job
from tests.results.questions import question


def tables(timeline: Timeline) -> dict[str, Any]:
    """What analysis makes of a timeline."""
    lanes = range(len(timeline.lanes))
    books = [ledger(timeline, lane) for lane in lanes]
    return {
        "summary": summarise(timeline).to_dict(),
        "breakdown": breakdowns(timeline),
        "volume": volumes(timeline),
        "memory": [{"at": book.times, "held": book.held, "cached": book.cached, "updating": book.updating} for book in books],
        "tensors": tensor_capacity(timeline),
        "loads": link_loads(timeline),
        "traffic": matrix(timeline),
        "launches": [[(begin, end) for _, begin, end in host_launches(timeline, lane)] for lane in lanes],
        "ops": by_stream(timeline),
        "lanes": timeline.lanes,
        "resumed": list(timeline.resumptions.values()),
        "sweeps": [sweep.to_dict() for sweep in of_step(timeline, [1e5, 1e7])],
    }


def by_stream(timeline: Timeline) -> dict[str, Any]:
    """Columns of the rows of each stream."""
    rows: dict[str, list[Any]] = {}
    for row in timeline.rows():
        times = {"kind": row.kind, "start": row.start, "end": row.end, "bytes": row.bytes, "launched": row.launched}
        rows.setdefault(row.op.stream, []).append(times | {"label": op_label(row.op), "number": row.number})
    return rows


@question
def step(draw: random.Random) -> Any:
    """A played step."""
    job = random_question_job(draw)
    timeline = simulate(job)
    return tables(timeline) | {"layers": memory_by_layer(job, summarise(timeline)), "job": repr(job), "notes": job.notes}


@question
def effects(draw: random.Random) -> Any:
    """A step with effects, and what it is without each."""
    asked = draw.sample(EFFECTS, draw.choice([1, 1, 2]))
    job = random_question_job(draw, effects=asked)
    return tables(simulate(job)) | {"with interval": predict_with_interval(job, interval=draw.random() < 0.5).to_dict()}


@question
def long_step(draw: random.Random) -> Any:
    """A step of many microbatches, of which few are played."""
    job = random_question_job(draw, plan={"accumulation": draw.choice([24, 40]), "data_parallel": draw.choice(["ddp", "zero1"])})
    timeline = from_some_microbatches(job, job.resolve(), prices_of(job))
    played = {} if timeline is None else tables(timeline) | {"periods": timeline.periods}
    return {"predicted": predict(job), "played": played}


@question
def replay(draw: random.Random) -> Any:
    """A step worked out anew for ranks that differ."""
    job = random_question_job(draw)
    timeline = simulate(job)
    replayed = StepReplay(timeline)
    factors = 1 + 0.1 * np.random.default_rng(draw.randrange(1000)).random((job.cluster.gpus, 3))
    times = replayed.times(factors)
    spread = variability(job, 0.03, draw.choice([0.0, 0.1]), samples=20, seed=draw.randrange(10))
    return {"steps": times.steps, "ends": times.ends, "alone": replayed.times().steps, "variability": spread}


@question
def neighbours(draw: random.Random) -> Any:
    """Two jobs on one cluster."""
    cluster = {"cluster": draw.choice(["dgx-h100", "pcie-l40s", "perlmutter"]), "nodes": draw.choice([1, 2])}
    fixed = {"precision": "bf16", "offload": None, "data_parallel": draw.choice(["ddp", "zero1", "zero3"])}
    jobs = [random_question_job(draw, **cluster, plan=fixed) for _ in range(2)]
    return together(jobs, steps=draw.choice([1, 3]))


@question
def unfolded(draw: random.Random) -> Iterator[Any]:
    """A step of which every rank is played by itself."""
    job = random_question_job(draw, nodes=1, cluster=draw.choice(["dgx-h100", "pcie-l40s", "dgx-a100"]))
    timeline = simulate(job, fold=False)
    return {"ends": timeline.ends, "starts": timeline.starts, "events": timeline.events, "ops": by_stream(timeline)}
