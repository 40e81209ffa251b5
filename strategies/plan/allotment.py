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
    if partial := sequences(plan, dp):
        if plan.accumulation is not None:
            raise UserError(f"{where}: uneven_batch=partial and accumulation={plan.accumulation} both say how many microbatches")
        return tuple(-(-count // plan.microbatch) for count in partial)
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
            f"{where}: uneven_batch=join: global_batch={plan.global_batch} is not a multiple of microbatch={plan.microbatch}; "
            "uneven_batch=partial has microbatches that are not full"
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


def sequences(plan: Plan, dp: int) -> tuple[int, ...]:
    """Sequences of each dp rank in a step where uneven_batch=partial leaves a last microbatch that is not full; else none."""
    if plan.global_batch is None or plan.uneven_batch != "partial":
        return ()
    each, more = divmod(plan.global_batch, dp)
    if not each or not (more or each % plan.microbatch):  # too few, or whole microbatches
        return ()
    return (each + 1,) * more + (each,) * (dp - more)


def dropped(plan: Plan, dp: int) -> int:
    """Sequences of a global batch that uneven_batch=drop_last leaves out."""
    if plan.global_batch is None or plan.uneven_batch != "drop_last":
        return 0
    return plan.global_batch % (dp * plan.microbatch)


def said_of_uneven(plan: Plan, dp: int) -> str | None:
    """Which dp ranks have more to do than others in a step, or a last microbatch that is not full."""
    if plan.global_batch is None:
        return None
    each, rest = divmod(plan.global_batch, dp * plan.microbatch)
    if rest and each and plan.uneven_batch == "join":
        busiest = f"{rest // plan.microbatch:,} of {dp:,} dp ranks have {each + 1:,} microbatches in a step"
        return f"uneven_batch=join: {busiest}, the others, which wait for them, {each:,}"
    if not (shares := sequences(plan, dp)):
        return None
    most, least = max(shares), min(shares)
    others = f", the others {least:,}" if least < most else ""
    who = f"{shares.count(most):,} of {dp:,} dp ranks have" if others else "each dp rank has"
    short = sum(count % plan.microbatch > 0 for count in shares)
    ends = f"; the last microbatch of {short:,} is not full" if short else ""
    return f"uneven_batch=partial: {who} {most:,} sequences in a step{others}{ends}"
