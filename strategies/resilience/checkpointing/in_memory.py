"""Often to the memory of another node, now and then to shared storage."""

from __future__ import annotations

from strategies.resilience.checkpointing import Place, SaveCosts, policies
from topologies.reading import UserError


@policies("in_memory")
def in_memory(costs: SaveCosts) -> tuple[Place, ...]:
    """Each node keeps its part and another node's (two copies, GEMINI, SOSP 2023): the loss of one node loses nothing."""
    if costs.peer is None:
        raise UserError(
            "run.checkpoint.policy=in_memory needs at least two nodes with a network, and node.cpu.memory with room for four "
            "times what a node saves: two parts, each while the next is written"
        )
    return (
        Place("memory of two nodes", costs.snapshot, costs.peer, costs.peer_read, copies=2),
        Place("storage", costs.snapshot, costs.write, costs.read),
    )
