"""How many microbatches each dp rank has in a step."""

from __future__ import annotations

from strategies.plan.plan import Plan
from strategies.schedules import schedules
from topologies.reading import UserError


def allotment(plan: Plan, dp: int, where: str) -> tuple[int, ...]:
    """Microbatches of each dp rank, or one number where all have as many. Raises UserError when the batch cannot be dealt out."""
    if plan.microbatches_per_replica is not None:
        return _given(plan, plan.microbatches_per_replica, dp, where)
    if plan.global_batch is None:
        return (plan.accumulation or schedules[plan.schedule].microbatches or 1,)
    each, rest = divmod(plan.global_batch, dp * plan.microbatch)
    if (rest and plan.uneven_batch == "refuse") or not each:
        raise UserError(
            f"{where}: global_batch={plan.global_batch} is not a multiple of dp·microbatch = {dp}·{plan.microbatch}; "
            f"{_nearest(plan.global_batch, dp * plan.microbatch)}"
        )
    if plan.accumulation not in (None, each):
        product = f"dp·microbatch·accumulation = {dp}·{plan.microbatch}·{plan.accumulation}"
        raise UserError(f"{where}: global_batch={plan.global_batch} ≠ {product} = {dp * plan.microbatch * plan.accumulation}")
    if not rest or plan.uneven_batch == "drop_last":
        return (each,)
    more, broken = divmod(rest, plan.microbatch)
    if broken:
        raise UserError(
            f"{where}: uneven_batch=join: global_batch={plan.global_batch} is not a multiple of microbatch={plan.microbatch}"
        )
    return (each + 1,) * more + (each,) * (dp - more)


def _nearest(batch: int, unit: int) -> str:
    """The multiples of `unit` beside a batch."""
    below = batch // unit * unit
    return f"{below} and {below + unit} are" if below else f"{unit} is"


def _given(plan: Plan, given: tuple[int, ...], dp: int, where: str) -> tuple[int, ...]:
    if plan.accumulation is not None:
        raise UserError(f"{where}: microbatches_per_replica and accumulation={plan.accumulation} both say how many microbatches")
    if len(given) != dp:
        raise UserError(f"{where}: microbatches_per_replica has {len(given)} numbers, and dp={dp}")
    batch = sum(given) * plan.microbatch
    if plan.global_batch not in (None, batch):
        product = f"microbatch · the sum of microbatches_per_replica = {plan.microbatch}·{sum(given)} = {batch}"
        raise UserError(f"{where}: global_batch={plan.global_batch} ≠ {product}")
    return given if len(set(given)) > 1 else given[:1]


def dropped(plan: Plan, dp: int) -> int:
    """Sequences of a global batch that uneven_batch=drop_last leaves out."""
    if plan.global_batch is None or plan.uneven_batch != "drop_last":
        return 0
    return plan.global_batch % (dp * plan.microbatch)
