"""What orders of passes exclude, and what excludes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from strategies.models.model import Model
from strategies.schedules import actions, schedules

if TYPE_CHECKING:
    from strategies.plan.plan import Plan


def asynchronous(plan: Plan, model: Model, microbatches: int) -> Iterator[str]:
    """What stages that are updated at different times can do."""
    if schedules[plan.schedule].versions is None:
        return
    said = f"schedule={plan.schedule} is asynchronous"
    if not plan.hook.asynchronous:
        yield f"{said}: each rank keeps whole versions of its parameters, which data_parallel={plan.data_parallel} shards"
    if (model.tied or model.mtp) and plan.pp > 1:
        yield f"{said}: the first and the last stage, updated at different times, cannot share {model.name}'s embedding"
    if microbatches < plan.pp:
        why = "the steady state repeats, and two versions suffice, from then on"
        yield f"{said}: needs at least pp={plan.pp} microbatches in a step, and has {microbatches}; {why}"


def partial(plan: Plan, sequences: Sequence[int], microbatches: int, chunks: int) -> Iterator[str]:
    """What needs microbatches that are all of one size. sequences: of each dp rank; none where they are."""
    if not sequences:
        return
    order = actions(plan.schedule, 0, plan.pp, microbatches, chunks)
    unknown = {
        f"schedule={plan.schedule}, whose steps follow each other without a flush": schedules[plan.schedule].versions is not None,
        f"schedule={plan.schedule}, in which kernels of two microbatches take turns": any(action.beside for action in order),
        f"data_parallel={plan.data_parallel}, which splits them among GPUs": plan.data_parallel == "dataparallel",
        "packing": plan.packing is not None,
    }
    yield from (f"uneven_batch=partial is not simulated with {what}" for what, there in unknown.items() if there)


def blocks(plan: Plan, microbatches: int, chunks: int) -> Iterator[str]:
    """What would run beside a kernel, or a part of a pass, that the host waits for."""
    timed, blocking = plan.kernel_set.times_parts, plan.options.blocking_launches
    if not timed and not blocking:
        return
    order = actions(plan.schedule, 0, plan.pp, microbatches, chunks)
    if timed and any(action.beside or action.kind not in "FB" for action in order):
        yield f"timed_parts=true contradicts schedule={plan.schedule}: passes are whole, one after the other"
    if not blocking:
        return
    beside = {
        "overlap=true": plan.overlap,
        "overlap_p2p=true": plan.pp > 1 and plan.overlap_p2p,
        f"overlap_tp={plan.beside_products}": plan.tp > 1 and plan.beside_products != "none",
        f"schedule={plan.schedule}": any(action.beside for action in order),
        "offload": plan.offload is not None,
        "cuda_graph=true": plan.kernel_set.graphed,
    }
    yield from (
        f"blocking_launches=true contradicts {what}: nothing runs beside a kernel" for what, runs in beside.items() if runs
    )
    if not plan.hook.blocks:
        yield f"blocking_launches=true with data_parallel={plan.data_parallel} is not simulated"
