"""What a plan that says nothing of it has by its cluster, the same for every command and said in the answer: batch, precision."""

from __future__ import annotations

import math
from collections.abc import Collection

from strategies.plan.plan import Plan
from strategies.schedules import schedules
from topologies.hardware import Gpu

PER_GPU = 4  # sequences
PRECISIONS = ("bf16", "fp16", "fp32")  # the first that all GPUs compute in


def with_batch(plan: Plan, gpus: int, framework: bool = False, of: str = "sequences") -> tuple[Plan, tuple[str, ...]]:
    """The plan with a global batch, and what is to be said of it.

    Where neither `global_batch` nor `accumulation` nor a schedule that was written down says it, it is PER_GPU sequences for each
    GPU, rounded up to whole microbatches of all dp ranks. framework: the plan is of a framework's settings, where it is then one
    microbatch of each dp rank (DeepSpeed, Megatron-LM, torchtitan, accelerate). of: what is in a batch, in words.
    """
    if plan.global_batch or plan.accumulation or plan.microbatches_per_replica or schedules[plan.schedule].microbatches:
        return plan, ()
    if framework:
        return plan.model_copy(update={"accumulation": 1}), ()
    whole = plan.microbatch * (plan.dp or gpus // (plan.tp * plan.cp * plan.pp))
    if not whole:  # more ranks than GPUs, which is refused later
        return plan, ()
    batch = whole * math.ceil(PER_GPU * gpus / whole)
    least = "" if batch == PER_GPU * gpus else "at least "  # whole microbatches may be more
    remark = f"{least}{PER_GPU} for each GPU; plan.global_batch or plan.accumulation says otherwise"
    return plan.model_copy(update={"global_batch": batch}), (f"global_batch: {batch:,} {of} by default, {remark}",)


def with_precision(plan: Plan, gpus: Collection[Gpu]) -> tuple[Plan, tuple[str, ...]]:
    """The plan in a precision that all of the cluster's kinds of GPUs have, where it says none, and what is to be said of it."""
    able = [dtype for dtype in PRECISIONS if all(dtype in gpu.peak for gpu in gpus)]
    if "precision" in plan.model_fields_set or not able or plan.precision == able[0]:
        return plan, ()
    without = next(gpu.name for gpu in gpus if plan.precision not in gpu.peak)
    remark = f"precision: {able[0]} by default, as {without} does not compute in {plan.precision}; plan.precision says otherwise"
    return plan.model_copy(update={"precision": able[0]}), (remark,)
