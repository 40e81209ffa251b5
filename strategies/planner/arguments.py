"""What has to be said to a command so that it answers about another job: `--set` arguments, exact to the bit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from strategies.job import Job
from strategies.plan.plan import OPEN, Plan
from strategies.plan.repetitions import in_runs
from topologies.reading import argument, plain


def differences(job: Job, other: Job) -> dict[str, Any]:
    """Fields of `other`, a job with the same model, that `job` has otherwise, as `--set` names them: the plan's, and nodes."""
    fields = {
        f"plan.{field}": getattr(other.plan, field)
        for field in Plan.model_fields
        if getattr(job.plan, field) != getattr(other.plan, field)
    }
    nodes = {"nodes": other.cluster.nodes} if other.cluster.nodes != job.cluster.nodes else {}
    return nodes | fields


def stated_otherwise(job: Job, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Of changes of `job` as plain data those that what was said of it has otherwise, what they set to nothing included; with the
    fields of a plan that was found.
    """
    own = {f"plan.{field}": plain(value) for field, value in _said(job)} | {"nodes": job.cluster.nodes}
    every = {name: plain(value) for name, value in _found(job).items()} | dict(changes)
    return _without_auto(job, {name: value for name, value in every.items() if name not in own or own[name] != value})


def arguments_of(job: Job, other: Job) -> str:
    """What has to be added to the arguments of `job` so that they are `other`'s, a job with the same model."""
    found = {name: getattr(other.plan, name.removeprefix("plan.")) for name in _found(job)}
    changes = {**found, **differences(job, other)}
    said = dict(_said(job))
    return as_arguments(_without_auto(job, {name: v for name, v in changes.items() if name == "nodes" or said[name[5:]] != v}))


def _said(job: Job) -> Plan:
    """The plan as it was said."""
    return job.auto.plan if job.auto else job.plan


def _found(job: Job) -> dict[str, Any]:
    """Fields of a plan that was found."""
    return differences(replace(job, plan=job.auto.plan), job) if job.auto else {}


def _without_auto(job: Job, changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of a plan that is to be found end the search, where they are no OPEN fields: else this has to be said."""
    says = any(name.startswith("plan.") and name[5:] not in OPEN for name in changes)
    return {"plan.auto": False} | changes if job.auto and (job.auto.asked or not says) else changes


def as_arguments(changes: Mapping[str, Any]) -> str:
    """`--set plan.tp=4 --set nodes=2 …`, quoted for a shell; a price is an option of its own."""
    fields = {name: value for name, value in changes.items() if name != "price"}
    price = [f"--price {changes['price']}"] if changes.get("price") is not None else []
    return " ".join([*(f"--set {shlex.quote(text)}" for text in settings(fields)), *price])


def settings(changes: Mapping[str, Any]) -> list[str]:
    """`plan.tp=4`, `nodes=2` …, as `--set` reads them: bytes of a bucket with their unit, long lists of numbers as runs."""
    return [argument(name, _written(name, value)) for name, value in changes.items()]


def _written(name: str, value: Any) -> Any:
    if name == "plan.bucket" and isinstance(value, int | float):
        return f"{value!r} B"
    if name in ("plan.layers_per_stage", "plan.microbatches_per_replica") and value is not None:
        return in_runs(value)
    return value
