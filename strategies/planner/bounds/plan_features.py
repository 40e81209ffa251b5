"""What follows from the fields of plans that rules look at, as columns: one entry for each of `Candidates.resolved`."""

from __future__ import annotations

import numpy as np

from sim.pricing.prices import Profile
from strategies.data_parallel.hook import Moves, hook_of
from strategies.lowering.host import offloaded
from strategies.plan.resolved import Resolved
from strategies.planner.bounds.layer_cost_table import Floats
from strategies.planner.bounds.layer_layout import through
from strategies.planner.bounds.network_bound import Crossings, hosted_update
from strategies.planner.bounds.symmetric_groups import alike
from strategies.planner.search.candidates import Candidates

NOTHING = 1e30  # ranks that share a state of which none is on the GPUs
_STATES = ("parameter", "gradient", "optimizer")
NAMES = (
    "parameter", "gradient", "optimizer",  # ranks that share each model state on the GPUs
    "updated", "zeroed",  # ranks that share the update, and setting gradients to zero
    "ep", "communicators", "outer",  # degree; of a rank; bytes per parameter of an outer optimizer
    "reserve",  # whether the allocator loses the profile's share between blocks
    "moved", "last", "late", "in turn",  # bytes per parameter and when, see Moves; nothing beside them without overlap
    "kept", "whole", "gathered", "passing", "after loss",  # of sharded parameters and gradients, see Hook and zero3
    "dense", "experts", "dense alone", "experts alone", "host",  # seconds per byte or parameter, see `network_bound`
    "unlike",  # whether dp groups of a node may be at different times
)  # fmt: skip


def columns(plans: Candidates, profile: Profile) -> dict[str, Floats]:
    """Every column of NAMES."""
    crossings = Crossings(plans.job, profile)
    rows = [
        (*_own(one), *crossings.of(one), hosted_update(plans.job, one), not alike(plans.job.cluster, one.grid))
        for one in plans.resolved
    ]
    table = np.array(rows, dtype=np.float64).reshape(-1, len(NAMES))
    return dict(zip(NAMES, np.ascontiguousarray(table.T), strict=True))


def _own(one: Resolved) -> tuple[float, ...]:
    """The columns that need no prices."""
    plan, hook, shards, moves = one, hook_of(one.data_parallel), one.shards, Moves()
    shared = one.copies > 1
    if shared:
        passes = through(one)
        moves = hook.moves(one if passes == one.microbatches else one.model_copy(update={"microbatches": passes}))
    own = [shards if state in hook.shards else 1 for state in _STATES]
    elsewhere = offloaded(plan.offload, hook.shards)
    there = [NOTHING if state in elsewhere else ranks for state, ranks in zip(_STATES, own, strict=True)]
    whole = shared and "parameter" in hook.shards
    return (
        *there, own[2], own[1], plan.ep_of_dp, one.grid.communicators, hook.outer, not plan.expandable_segments,
        moves.gathered + moves.reduced, moves.last, moves.late, hook.in_turn(plan),
        whole and not plan.reshard, whole, plan.least_gathered, whole, plan.of_pytorch,
    )  # fmt: skip
