"""Jobs that functions of the API are asked about, and the same jobs with other fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from strategies.job import Job
from strategies.plan.plan import Plan
from strategies.planner.search.space import Axis, parse_axis, read_space
from strategies.planner.search.workers.executors import Engine, engine
from strategies.planner.search.workers.in_process import in_process
from strategies.read_job import read_job
from topologies.reading import UserError, build

Asked = Job | str | Path | Mapping[str, Any]
Vary = Mapping[str, Iterable[Any]] | Iterable[str]
Read = Callable[[dict[str, Any]], Job]


def job_of(asked: Asked) -> Job:
    """A job, or the one of a file or of fields."""
    return asked if isinstance(asked, Job) else read_job(asked)


def reader(job: Job) -> Read:
    """A function from changes, as {"nodes": 4, "cluster.node.nic": "25 GB/s", "plan.tp": 2}, to the job with them. Fields of the
    job's plan that are not changed stay. Raises UserError, also for fields of a cluster or model where the job was made by hand.
    """

    def read(changes: dict[str, Any]) -> Job:
        if not changes:
            return job
        if job.source is None:
            return _by_hand(job, changes)
        again, before = job.source(changes), job.source({})
        kept = {
            name: getattr(job.plan, name)
            for name in Plan.model_fields
            if f"plan.{name}" not in changes and getattr(job.plan, name) != getattr(before.plan, name)
        }
        plan = again.plan.model_copy(update=kept) if kept else again.plan
        return replace(again, plan=plan, effects=job.effects, auto=None, source=job.source)

    return read


def _by_hand(job: Job, changes: dict[str, Any]) -> Job:
    fields = {name.removeprefix("plan."): value for name, value in changes.items() if name.startswith("plan.")}
    for name in changes:
        if not name.startswith("plan.") and name != "nodes":
            raise UserError(f"{job.where}: {name}: a job that read_job did not read has no other {name.partition('.')[0]}")
    plan = job.plan.model_copy(update={name: getattr(build(Plan, fields, job.where), name) for name in fields})
    nodes = changes.get("nodes", job.cluster.nodes)
    return replace(job, plan=plan, cluster=job.cluster.model_copy(update={"nodes": nodes}), auto=None)


def stated(job: Job) -> Job:
    """The job as it was said, without the plan that was found for it."""
    return replace(job, plan=job.auto.plan, remarks=job.own_remarks) if job.auto else job


def axes_of(vary: Vary) -> list[Axis]:
    """{"nodes": [4, 8]}, or texts as on the command line, as axes."""
    if isinstance(vary, str):
        vary = [vary]
    if isinstance(vary, Mapping):
        return list(read_space({name: list(values) for name, values in vary.items()}, "vary").axes)
    return [parse_axis(text) for text in vary]


def engine_of(workers: int | None) -> AbstractContextManager[Engine]:
    """Worker processes; None: this process, which works wherever Python does."""
    return nullcontext(in_process()) if workers is None else engine(workers)
