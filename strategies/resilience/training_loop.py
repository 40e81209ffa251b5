"""What a training loop does beside its steps: input, copies to the GPUs, buffers, losses and metrics summed, evaluation.

Collectives have the prices of the job's own; each that the host waits for costs the launch of the next kernel, too, as the GPUs'
queues are empty then (`loss.item()`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.analysis.summary import Summary
from sim.pricing.transfers.collective_costs import CollectiveCosts
from sim.program import Collective
from strategies.job import Job
from strategies.plan.resolved import Resolved
from strategies.predict import prices_of, profile_of, programs
from strategies.resilience.loop_settings import InputSettings, Reduction
from strategies.resilience.settings import RunSettings
from topologies.reading import UserError

FP32 = 4
INT64 = 8  # bytes of a token and of a label, as torch's embedding and cross entropy take them


@dataclass(frozen=True)
class Input:
    """Seconds of each step. preparing: of the slowest replica's workers; reading: all sequences from storage; copying: to the
    GPUs; exposed: of all this, what training waits for; first: until the first microbatch is there after a start.
    """

    preparing: float = 0.0
    reading: float = 0.0
    copying: float = 0.0
    exposed: float = 0.0
    first: float = 0.0


@dataclass(frozen=True)
class Loop:
    """Exposed seconds: of each step (input, buffers), of each time (loss, metrics, evaluation)."""

    input: Input
    buffers: float = 0.0
    loss: float = 0.0
    metrics: float = 0.0
    evaluation: float = 0.0


def training_loop(job: Job, settings: RunSettings, summary: Summary) -> Loop:
    """What the section `run` asks for, priced for the job. Raises UserError."""
    sums = _Reductions(job)
    return Loop(
        _input(job, settings, summary.step_seconds),
        sums.buffers(settings.buffers),
        sums.seconds(settings.loss),
        sums.seconds(settings.metrics),
        _evaluation(job, settings, summary, sums),
    )


def _input(job: Job, settings: RunSettings, step: float) -> Input:
    """Workers of each dp rank prepare its sequences one by one, and all ranks read from one storage: the slower sets the
    pace. With prefetch a step waits only for what its own length does not hide, with pinned memory a microbatch's copy only for
    what the one before it does not.
    """
    loader = settings.input
    if loader is None:
        return Input()
    resolved, storage, nodes = job.resolve(), settings.checkpoint.shared, job.cluster.nodes
    rate = min(storage.in_all(storage.read, nodes), (storage.node_read or float("inf")) * nodes)
    reading = resolved.global_batch * loader.bytes / rate
    preparing = resolved.global_batch / resolved.dp * loader.sample / loader.workers
    each = max(reading, preparing)
    exposed = max(0.0, each - step) if loader.prefetch else each
    copy, count = _copy(job, resolved, loader), resolved.microbatches
    late = count * max(0.0, copy - step / count) if loader.pinned else count * copy
    first = resolved.microbatch * loader.sample + storage.latency * bool(loader.bytes) + copy
    return Input(preparing, reading, count * copy, exposed + late, first)


def _copy(job: Job, resolved: Resolved, loader: InputSettings) -> float:
    """Seconds of a microbatch's copy to a GPU: tokens to the first stage, labels to the last one, at the same time. GPUs behind
    one PCIe switch share its uplink.
    """
    node = job.cluster.node
    if not node.pcie:
        return 0.0
    each = loader.copy_bytes or 2 * INT64 * resolved.sequence
    part = each / 2 if resolved.pp > 1 else each
    return node.latency.pcie + resolved.microbatch * part * max(1, node.gpus_per_switch or 1) / node.pcie


class _Reductions:
    """Sums over all replicas, by the job's prices."""

    def __init__(self, job: Job) -> None:
        self.job, self.resolved = job, job.resolve()

    def _collective(self, operation: str, size: float) -> float:
        """Seconds of a collective of the ranks that have the same parameters, alone on the network."""
        if self.resolved.copies == 1:
            return 0.0
        program = programs(self.job.model, self.resolved, None)
        costs = CollectiveCosts(program, self.job.cluster.topology(), prices_of(self.job))
        work = Collective(operation, size, "dp", operation, along=self.resolved.sharing)
        return max(kind.alone for cohort in range(len(program.cohorts)) for kind in costs.kinds(work, cohort))

    def seconds(self, asked: Reduction | None) -> float:
        """Of one reduction, and what the host's waiting for it costs."""
        if asked is None:
            return 0.0
        waits = profile_of(self.job).launching(not self.resolved.kernel_set.compiled) if asked.wait else 0.0
        return self._collective("all_reduce", FP32 * asked.values) + waits

    def buffers(self, size: float) -> float:
        """Of a broadcast of buffers before each step, as DDP does it. Raises UserError where parameters or states are sharded."""
        if size and self.resolved.hook.shards:
            raise UserError(
                f"run.buffers: are broadcast by DDP; data_parallel={self.resolved.data_parallel} does not: leave them out"
            )
        return self._collective("broadcast", size) if size else 0.0


def _evaluation(job: Job, settings: RunSettings, summary: Summary, sums: _Reductions) -> float:
    """A given time; or of sequences, forward passes as long as their part of the step, and their metrics summed."""
    if not settings.evaluation_sequences:
        return settings.evaluation
    parts, step = summary.breakdown, summary.step_seconds
    passes = step - sum(parts.get(name, 0.0) for name in ("optimizer", "recompute", "dp exposed"))
    forward = passes * parts["forward"] / (parts["forward"] + parts["backward"])
    return forward * settings.evaluation_sequences / job.resolve().global_batch + sums.seconds(settings.metrics or Reduction())
