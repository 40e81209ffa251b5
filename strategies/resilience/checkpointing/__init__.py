"""Where to save, and what waits for it: a policy is one file of this folder, found by being there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from topologies.registry import Registry


@dataclass(frozen=True)
class SaveCosts:
    """Seconds that a job's checkpoint takes, whatever the policy.

    snapshot: until the GPUs' states are in their hosts' memory, with what every save costs; write, read: to and from storage;
    disk, disk_read: node-local disks (None: there are none); peer: to another node's memory (None: there is no network, or no
    room); peer_read: from there.
    """

    snapshot: float
    write: float
    read: float
    disk: float | None = None
    disk_read: float = 0.0
    peer: float | None = None
    peer_read: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where a policy saves: as `sim.runs.spec.Saving`, but how often is not said yet."""

    name: str
    blocking: float
    flush: float
    restore: float
    copies: int | None = None


Policy = Callable[[SaveCosts], tuple[Place, ...]]  # the quickest place first, the one that survives everything last

policies: Registry[Policy] = Registry("checkpoint policy", package="strategies.resilience.checkpointing")
