"""What might make a job fit that does not: hypotheses to try, each with the kinds of memory that it lowers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reports.words import Job, held
from sim.summary import Summary

STATES = ("parameter", "gradient", "optimizer")

_NEXT_ZERO = {"ddp": ("zero1", ("optimizer",)), "zero1": ("zero2", ("gradient",)), "zero2": ("zero3", ("parameter",))}

Idea = tuple[str, tuple[str, ...]]  # a change of the plan, the kinds of memory that it lowers


def advice(summary: Summary, job: Job, limit: int = 3) -> list[str]:
    """Changes of the plan to try when the job does not fit, the one that touches most bytes of the worst stage first.

    Only what the plan does not do already; whether it is enough is for the next simulation to say. Empty without a plan.
    """
    plan = job.get("plan")
    if summary.fits or not isinstance(plan, Mapping) or not plan:
        return []
    kinds = held(summary.worst)
    found = list(_ideas(plan, summary, int(job.get("gpus_per_node", 8))))
    found.sort(key=lambda idea: -sum(kinds[kind] for kind in idea[1]))  # a stable sort: ties stay in the order of _ideas
    return [text for text, _ in found][:limit] or ["a smaller model, or more GPUs with a higher tp or pp"]


def _ideas(plan: Mapping[str, Any], summary: Summary, node: int) -> Iterator[Idea]:
    tp, pp = int(plan.get("tp") or 1), int(plan.get("pp") or 1)
    dp = int(plan.get("dp") or max(1, summary.gpus // (tp * pp)))
    yield from _activations(plan, tp)
    sharding = _NEXT_ZERO.get(str(plan.get("data_parallel", "ddp")))
    if dp > 1 and sharding:
        yield f"data_parallel={sharding[0]}", sharding[1]
    if dp % 2 == 0:  # GPUs that dp gives up
        if 2 * tp <= node:
            yield f"tp={2 * tp} (dp={dp // 2})", (*STATES, "activation")
        yield f"pp={2 * pp} (dp={dp // 2})", STATES


def _activations(plan: Mapping[str, Any], tp: int) -> Iterator[Idea]:
    materialised = plan.get("attention") == "materialised"
    if materialised:
        yield "attention=flash", ("activation",)
    recompute = plan.get("recompute", "none")
    if recompute == "none" and materialised:  # a fused kernel keeps nothing that selective recomputation could drop
        yield "recompute=selective", ("activation",)
    elif recompute != "full":
        yield "recompute=full", ("activation",)
    if tp > 1 and not plan.get("sequence_parallel"):
        yield "sequence_parallel=true", ("activation",)
    microbatch = int(plan.get("microbatch") or 1)
    if microbatch > 1:
        yield f"microbatch={microbatch // 2}", ("activation", "temporary")
