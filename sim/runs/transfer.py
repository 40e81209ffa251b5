"""How long it takes all nodes to write or read a checkpoint, each at its own rate and all together through shared storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from simpy import Environment

from sim.engine.network import FlowPart, Network


def shared_seconds(loads: Sequence[float], each: float, together: float) -> float:
    """Seconds until nodes with these loads (bytes) are all done. each, together: bytes per second of one node and of the storage;
    infinite where there is no limit. Nodes share the storage max-min fairly, as flows share links.
    """
    env, ends = Environment(), [0.0]
    kinds = [(load, count) for load, count in sorted(Counter(loads).items()) if load > 0]
    limits = [rate for rate in (each, together) if rate < float("inf")]
    if not kinds or not limits:
        return 0.0
    storage = len(kinds)
    network = Network(env, [min(each, 1e30)] * storage + [min(together, 1e30)])
    for number, (load, count) in enumerate(kinds):  # equal nodes are one flow, `count` times on the storage's link
        network.start([FlowPart(load, ((number, 1.0), (storage, float(count))))], 0.0, lambda: ends.append(env.now))
    env.run()
    return max(ends)
