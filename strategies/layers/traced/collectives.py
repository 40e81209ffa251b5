"""Collectives that a traced module issues by itself: DTensor's between tp ranks."""

from __future__ import annotations

from sim.program import Collective
from strategies.layers.rank_shapes import RankShapes
from strategies.models.tracing.records import TracedOp
from topologies.reading import UserError

COLLECTIVES = "_c10d_functional"  # as `strategies.models.tracing.tensor_parallel` has it, which imports torch
FULL = {  # by name of torch's operator: the operation, and whether its result is the full buffer
    "all_reduce": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
    "broadcast": ("broadcast", False),
}


def collective_of(rank: RankShapes, op: TracedOp) -> list[Collective]:
    """The collective along tp. Raises UserError for one that has no price here."""
    name = op.name.removeprefix(f"{COLLECTIVES}.")
    if name not in FULL:
        raise UserError(f"model: collective {name} in {op.label} is not simulated; known: {', '.join(FULL)}")
    operation, gathered = FULL[name]
    full = (op.outputs if gathered else op.inputs)[0]
    items = rank.collective(operation, f"{op.label} {name}", full.bytes, full.width)
    return [item for item in items if isinstance(item, Collective)]
