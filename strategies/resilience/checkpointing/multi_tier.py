"""Often to the nodes' own disks, now and then to shared storage."""

from __future__ import annotations

from strategies.resilience.checkpointing import Place, SaveCosts, policies
from topologies.reading import UserError


@policies("multi_tier")
def multi_tier(costs: SaveCosts) -> tuple[Place, ...]:
    """What is on a node's disk is there after a crash of the processes, and gone with the node. GPUs wait for snapshots only."""
    if costs.disk is None:
        raise UserError("run.checkpoint.policy=multi_tier needs node.cpu.disk, which the cluster does not describe")
    return (
        Place("node disks", costs.snapshot, costs.disk, costs.disk_read, copies=1),
        Place("storage", costs.snapshot, costs.write, costs.read),
    )
