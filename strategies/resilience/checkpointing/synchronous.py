"""Everybody waits until the checkpoint is in shared storage."""

from __future__ import annotations

from strategies.resilience.checkpointing import Place, SaveCosts, policies


@policies("synchronous")
def synchronous(costs: SaveCosts) -> tuple[Place, ...]:
    """torch.save and its like: GPUs wait for the slower of copying and writing, which overlap."""
    return (Place("storage", max(costs.snapshot, costs.write), 0.0, costs.read),)
