"""Whether data come as fast as they are trained on."""

from __future__ import annotations

from strategies.job import Job
from strategies.resilience.settings import RunSettings


def data_loading(job: Job, settings: RunSettings, step: float) -> tuple[float, float]:
    """(seconds until the first microbatch is there after a start, seconds that each step waits for data).

    Each dp rank has a loader whose workers prepare its sequences one after the other, and all read from one storage: the slower
    of the two sets the pace. With prefetch a step waits only for what its own length does not hide.
    """
    loader = settings.input
    if loader is None:
        return 0.0, 0.0
    resolved, storage = job.resolve(), settings.checkpoint.shared
    nodes = job.cluster.nodes
    rate = min(storage.in_all(storage.read, nodes), (storage.node_read or float("inf")) * nodes)
    reading = resolved.global_batch * loader.bytes / rate
    preparing = resolved.global_batch / resolved.dp * loader.sample / loader.workers
    each = max(reading, preparing)
    first = resolved.microbatch * loader.sample + storage.latency * bool(loader.bytes)
    return first, max(0.0, each - step) if loader.prefetch else each
