"""The job stops, replaces what is broken and starts again from a checkpoint."""

from __future__ import annotations

from sim.runs.spec import RunSpec
from strategies.job import Job
from strategies.resilience.recovery import recoveries


@recoveries("restart")
def restart(spec: RunSpec, job: Job) -> RunSpec:
    """In place where no node is lost; otherwise with a hot spare, a free node of the pool, or the first one that is repaired."""
    return spec
