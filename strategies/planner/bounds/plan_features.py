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
    "parameter",  # ranks that share the parameters on the GPUs
    "gradient",  # ranks that share the gradients
    "optimizer",  # ranks that share the optimizer states
    "updated",  # ranks that share the update
    "zeroed",  # ranks that share setting gradients to zero
    "ep",  # degree
    "communicators",  # of a rank
    "outer",  # bytes per parameter of an outer optimizer
    "reserve",  # whether the allocator loses the profile's share between blocks
    "moved",  # bytes per parameter gathered and reduced, see Moves
    "last",  # bytes per parameter gathered after the update
    "late",  # whether nothing moves before the last backward pass
    "in turn",  # whether nothing runs beside them without overlap
    "kept",  # whether gathered parameters stay until the backward pass
    "whole",  # whether sharded parameters of a part are gathered together
    "gathered",  # bytes of a gathered parameter, at least
    "passing",  # whether gradients of a part are whole until they are reduced
    "owed",  # bytes of a gradient that is whole until that of the last microbatch is there
    "after loss",  # whether the loss is outside of what parameters are gathered for
    "dense",  # seconds per byte, see `network_bound`
    "experts",  # the same for experts
    "dense alone",  # seconds per byte where the exchange is by itself
    "experts alone",  # the same for experts
    "host",  # seconds per parameter that CPUs update
    "unlike",  # whether dp groups of a node may be at different times
)


def columns(plans: Candidates, profile: Profile) -> dict[str, Floats]:
    """Every column of NAMES."""
    crossings, cluster = Crossings(plans.job, profile), plans.job.cluster

    def priced(plan: Resolved) -> tuple[float, ...]:
        return *crossings.of(plan), hosted_update(plans.job, plan), not alike(cluster, plan.grid)

    several = (_shared, _ranks, _always, _moved, _gathered, priced)  # each looks at few fields
    parts = [(np.array(rows, dtype=np.float64), which) for rows, which in map(plans.each, several)]
    table = np.concatenate([rows[which] for rows, which in parts], axis=1) if len(plans) else np.zeros((0, len(NAMES)))
    return dict(zip(NAMES, np.ascontiguousarray(table.T), strict=True))


# The columns that need no prices, in the order of NAMES.


def _shared(plan: Resolved) -> tuple[float, ...]:
    hook, shards = hook_of(plan.data_parallel), plan.shards
    own: list[float] = [shards if state in hook.shards else 1 for state in _STATES]
    elsewhere = offloaded(plan.offload, hook.shards)
    if plan.outside_optimizer:  # of which parameters is not looked at
        own[2] = NOTHING
    there = [NOTHING if state in elsewhere else ranks for state, ranks in zip(_STATES, own, strict=True)]
    return *there, own[2], own[1]


def _ranks(plan: Resolved) -> tuple[float, ...]:
    return plan.ep_of_copies, plan.grid.communicators


def _always(plan: Resolved) -> tuple[float, ...]:
    return hook_of(plan.data_parallel).outer, not plan.options.expandable_segments


def _moved(plan: Resolved) -> tuple[float, ...]:
    moves = Moves()
    if plan.copies > 1:
        passes = through(plan)
        again = plan if passes == plan.microbatches else plan.model_copy(update={"microbatches": passes})
        moves = hook_of(plan.data_parallel).moves(again)
    return moves.gathered + moves.reduced, moves.last, moves.late


def _gathered(plan: Resolved) -> tuple[float, ...]:
    hook = hook_of(plan.data_parallel)
    whole = plan.copies > 1 and "parameter" in hook.shards
    at_once = whole and (plan.deepspeed is None or plan.deepspeed.tiles == 1)  # a part's parameters and gradients
    late = "gradient" in hook.shards and plan.syncs_gradients == "last" and plan.copies > 1
    owed = plan.bytes_per_gradient if late and plan.deepspeed is None and plan.offload is None else 0
    return hook.in_turn(plan), whole and not plan.reshard, at_once, plan.least_gathered, at_once, owed, plan.of_pytorch
