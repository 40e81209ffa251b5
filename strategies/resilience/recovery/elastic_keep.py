"""The job goes on without the replicas that lost a node, and the others do their share of the batch."""

from __future__ import annotations

from dataclasses import replace

from sim.runs.spec import Elastic, Pace, RunSpec
from strategies.job import Job
from strategies.plan.resolved import Resolved
from strategies.predict import predict
from strategies.resilience.recovery import recoveries
from strategies.resilience.recovery.elastic import elastic


@recoveries("elastic-keep")
def elastic_keep(spec: RunSpec, job: Job) -> RunSpec:
    """As `elastic`, but the batch stays what it is: each replica that is left takes more microbatches, the next whole number, and
    every step makes a whole step's progress. Down to half of the replicas, which take twice as many.
    """
    shrinking = elastic(spec, job).elastic
    assert shrinking is not None
    resolved = job.resolve()
    count, more = resolved.microbatches, _more_microbatches(spec, job, resolved)
    paces = []
    for lost in range(1, len(shrinking.paces) + 1):
        microbatches = -(-count * resolved.dp // (resolved.dp - lost))
        paces.append(Pace(spec.step + more * (microbatches - count), 1.0))
    return replace(spec, elastic=Elastic(tuple(paces), shrinking.nodes, shrinking.reconfigure, shrinking.rollback))


def _more_microbatches(spec: RunSpec, job: Job, resolved: Resolved) -> float:
    """Seconds that a step takes for each microbatch more: of a step of twice as many. The network is as large as ever."""
    plan = job.plan.model_copy(update={"global_batch": 2 * resolved.global_batch, "accumulation": None})
    return (predict(replace(job, plan=plan)).step_seconds - spec.step) / resolved.microbatches
