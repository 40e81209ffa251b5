"""A snapshot in the hosts' memory, written to shared storage beside training."""

from __future__ import annotations

from strategies.resilience.checkpointing import Place, SaveCosts, policies


@policies("asynchronous")
def asynchronous(costs: SaveCosts) -> tuple[Place, ...]:
    """torch.distributed.checkpoint.async_save: GPUs wait for the copy to the host; a checkpoint counts when it is written."""
    return (Place("storage", costs.snapshot, costs.write, costs.read),)
