"""The job goes on without the replicas that lost a node, and grows again when nodes are back."""

from __future__ import annotations

from dataclasses import replace

from sim.runs.spec import Elastic, Pace, RunSpec
from strategies.job import Job
from strategies.resilience.recovery import recoveries
from topologies.reading import UserError

RECONFIGURE = (
    30.0  # seconds: new process groups; NCCL's initialisation takes less than 30 s beyond 10,000 GPUs (arXiv 2402.15627)
)


@recoveries("elastic")
def elastic(spec: RunSpec, job: Job) -> RunSpec:
    """Elastic data parallelism: a step keeps its length and its batch shrinks by the lost replicas' part (as torchft's replica
    groups). Down to half of the replicas; with fewer the job waits. What dp ranks shard among all of them is lost with one of
    them and read from a checkpoint; what each replica holds whole is not.
    """
    resolved = job.resolve()
    if resolved.dp < 2:
        raise UserError("run.recovery=elastic needs dp of at least 2: there is no other replica to go on")
    paces = tuple(Pace(spec.step, (resolved.dp - lost) / resolved.dp) for lost in range(1, resolved.dp // 2 + 1))
    sharded = bool(resolved.hook.shards) and resolved.replicas == 1
    nodes = max(1.0, spec.nodes / resolved.dp)
    return replace(spec, elastic=Elastic(paces, nodes, RECONFIGURE, rollback=sharded))
