"""What training over days says: runs with a seed, checkpoints, the loop around a step."""

from __future__ import annotations

import random
from typing import Any

from reports.tables.checkpoint import as_data as checkpoint_data
from reports.tables.loop import as_data as loop_data
from sim.runs.record import costliest
from sim.runs.replications import recorded
from strategies.job import Job
from strategies.planner.search.delivered import evaluate_run
from strategies.resilience.checkpoint_plan import checkpoint_plan
from strategies.resilience.compare_runs import compare_runs, scales
from strategies.resilience.run_spec import prepare
from strategies.resilience.runs import alternatives, best_interval, run_days
from strategies.resilience.settings import RunSettings
from tests.results.jobs import random_question_job
from tests.results.questions import question

CHECKPOINT: dict[str, list[Any]] = {
    "policy": ["synchronous", "asynchronous", "multi_tier", "in_memory"],
    "interval": ["daly", "young", "availability", "20 min", "300 steps", 50],
    "storage": [
        "superpod-good",
        "tectonic",
        {"write": "2 GB/s", "read": "3 GB/s", "node_write": "1 GB/s", "node_read": "2 GB/s"},
    ],
    "overhead": ["0 s", "5 s"],
    "parallel": [False],
    "parallel_load": [True],
}
RUN: dict[str, list[Any]] = {
    "failures": ["published", "llama-3", "rsc-2", "bloom-176b", "opt-175b", "byterobust"],
    "recovery": ["restart", "elastic", "elastic-keep"],
    "spares": [1, 2],
    "pool": [1, 3],
    "allocation": ["1 min"],
    "repair": [{"automatic": "exponential 6 h"}, {"automatic": "2 h", "escalates": 0.4, "manual": "1 day", "technicians": 1}],
    "heartbeat": ["10 s"],
    "timeout": ["20 min"],
    "diagnosis": ["2 min"],
    "misdiagnosis": [0.3],
    "initialization": ["5 min"],
    "restart": ["2 min"],
    "idle_failures": [False],
    "step_interval": [False],
    "loss": [{"steps": 1}, {"steps": 5, "values": 8}],
    "metrics": [{"steps": 10, "values": 8}],
    "buffers": ["48 MB"],
    "input": [
        {"sample": "2 ms", "workers": 2, "bytes": "64 kB", "pinned": False},
        {"sample": "40 ms", "workers": 1},
        {"sample": "10 ms", "workers": 4, "prefetch": True, "bytes": "1 MB"},
    ],
}
OFTEN = 2000.0  # times as often things fail, so that days are enough


def run_fields(draw: random.Random) -> dict[str, Any]:
    """A section `run`."""
    fields = {name: draw.choice(values) for name, values in RUN.items() if draw.random() < 0.3}
    checkpoint = {name: draw.choice(values) for name, values in CHECKPOINT.items() if draw.random() < 0.5}
    failures = fields.pop("failures", "published")
    fields |= {"checkpoint": checkpoint, "failures": {"based_on": failures, "mtbf_factor": 1 / OFTEN}}
    if draw.random() < 0.3:
        fields |= draw.choice([{"evaluation": "30 s"}, {"evaluation_sequences": 64}]) | {"evaluation_steps": 400}
    return fields


def run_job(draw: random.Random) -> Job:
    """A job with a section `run`, of which nodes may be missing."""
    nodes = draw.choice([2, 3, 4])
    cluster = {"based_on": draw.choice(["dgx-h100", "pcie-l40s"]), "node": {"gpus": 4, "nics": 2}}
    return random_question_job(draw, cluster=cluster, nodes=nodes, run=run_fields(draw))


@question
def run(draw: random.Random) -> Any:
    """Runs with a seed: what they deliver, what happened in one of them."""
    job = run_job(draw)
    days, tokens = draw.choice([(0.3, None), (2.0, None), (None, 3e8)])
    answer = run_days(job, days, tokens, price=2.0, seed=draw.randrange(9), count=3)
    prepared = prepare(job, job.run or RunSettings(), days, tokens)
    record = recorded(prepared.spec, 1).timeline
    spans = [(span.start, span.end, span.cause) for span in record]
    pieces = [piece for span in record[:20] for piece in span.pieces(100.0, 20_000.0)]
    return {"answer": answer, "spec": prepared.spec, "spans": spans, "pieces": pieces, "costliest": costliest(record)}


@question
def changes_of_runs(draw: random.Random) -> Any:
    """What to change of a run first, and the job at other sizes."""
    job = run_job(draw)
    prepared = prepare(job, job.run or RunSettings(), days=0.2)
    tried = [(each.change, each.goodput, each.gain, str(each.fields)) for each in alternatives(prepared, 0.2, None, 1)]
    return {"alternatives": tried, "intervals": best_interval(prepared, 2), "scales": str(scales(job))}


@question
def several_runs(draw: random.Random) -> Any:
    """A job with other inputs over days, and as a row of a search by goodput."""
    job = run_job(draw)
    assert job.source is not None
    inputs = [{"price": 2.0}, {"run.spares": 3}, {"run.checkpoint.policy": "synchronous"}, {"plan.tp": 64}]
    cases = compare_runs(job.source, inputs, 0.2, None, 1.0, seed=draw.randrange(9), count=2)
    rows = [
        (case.refused, case.answer.tokens.mean if case.answer else 0.0, case.answer.usd if case.answer else None)
        for case in cases
    ]
    row = {name: value for name, value in evaluate_run(job, 1e8).items() if name not in ("hash", "version")}
    return {"cases": rows, "row": row}


@question
def checkpoint(draw: random.Random) -> Any:
    """What a job's checkpoint is and costs."""
    job = random_question_job(draw, run=run_fields(draw))
    data = checkpoint_data(checkpoint_plan(job, job.run or RunSettings()))
    return {name: value for name, value in data.items() if name != "hash"}


@question
def loop(draw: random.Random) -> Any:
    """The training loop at its cut points."""
    job = run_job(draw)
    prepared = prepare(job, job.run or RunSettings(), days=1.0)
    data = loop_data(prepared)
    return {name: value for name, value in data.items() if name != "hash"} | {"spec": prepared.spec}
