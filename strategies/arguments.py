"""What has to be said to a command so that it answers about another job: `--set` arguments, exact to the bit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from strategies.job import Job
from strategies.plan import Plan
from topologies.reading import as_argument


def differences(job: Job, other: Job) -> dict[str, Any]:
    """Fields of `other`, a job with the same model, that `job` has otherwise, as `--set` names them: the plan's, and nodes."""
    fields = {f"plan.{field}": getattr(other.plan, field) for field in Plan.model_fields
              if getattr(job.plan, field) != getattr(other.plan, field)}  # fmt: skip
    nodes = {"nodes": other.cluster.nodes} if other.cluster.nodes != job.cluster.nodes else {}
    return nodes | fields


def as_arguments(changes: Mapping[str, Any]) -> str:
    """`--set plan.tp=4 --set nodes=2 …`; what has a unit with it."""
    words = [as_argument(name, f"{value!r} B" if name == "plan.bucket" else value) for name, value in changes.items()]
    return " ".join(f"--set {word}" for word in words)


def command_line(command: str, given: Sequence[str], changes: Mapping[str, Any]) -> str:
    """The line that runs `command` on the job that `given` (its file and options) makes, with these changes."""
    return " ".join(filter(None, ("shardyard", command, shlex.join(given), as_arguments(changes))))
