"""What has to be said to a command so that it answers about another job: `--set` arguments, exact to the bit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from strategies.job import Job
from strategies.plan.plan import Plan
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
    """Of changes as plain data those that `job` has otherwise, what they set to nothing included."""
    own = {f"plan.{field}": plain(value) for field, value in job.plan} | {"nodes": job.cluster.nodes}
    return {name: value for name, value in changes.items() if name not in own or own[name] != value}


def as_arguments(changes: Mapping[str, Any]) -> str:
    """`--set plan.tp=4 --set nodes=2 …`, quoted for a shell."""
    return " ".join(f"--set {shlex.quote(text)}" for text in settings(changes))


def settings(changes: Mapping[str, Any]) -> list[str]:
    """`plan.tp=4`, `nodes=2` …, as `--set` reads them: bytes of a bucket with their unit."""
    return [
        argument(name, f"{value!r} B" if name == "plan.bucket" and isinstance(value, int | float) else value)
        for name, value in changes.items()
    ]
