"""What makes a job fit that runs out of memory: changes of the plan, or more nodes, each tried; the global batch is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from sim.analysis.summary import Summary
from strategies.frameworks.settings import EVERYTHING
from strategies.job import Job
from strategies.plan.options import Offload
from strategies.planner.arguments import arguments_of
from strategies.planner.tiles import with_tiles
from topologies.cluster import UnequalCluster
from topologies.reading import UserError

Changes = dict[str, Any]
Ideas = Callable[[Job], Iterator[Changes]]
OPTIMIZER = Offload.model_validate({"optimizer": "cpu"})
AHEAD = 2  # layers whose activations stay when others' are offloaded, so that copies run beside compute
DOUBLED = 4  # times that the nodes are doubled when no change of the plan is enough
_FREE: Changes = {"dp": None, "accumulation": None, "microbatches_per_replica": None}  # they follow from the others
_NEXT_ZERO = {"ddp": "zero1", "zero1": "zero2", "zero2": "zero3"}


class Fix(NamedTuple):
    """Changes of the plan (or "nodes") that make the job fit, the answer with them, and how to ask for it."""

    changes: Changes
    summary: Summary
    arguments: str

    def __str__(self) -> str:
        return self.arguments


def fixes(job: Job, summary: Summary, answer: Callable[[Job], Summary], effort: int = 100_000, limit: int = 3) -> list[Fix]:
    """Combinations of few changes that fit, the fastest first.

    The search goes on from the combination that needs least memory, for simulations of `effort` events. Changes of the plan are
    tried on the same cluster; only when none is enough, what the CPUs can hold, and then more nodes. Empty when nothing fits.
    """
    for ideas in (_ideas, _with_offload):
        if fitting := _best_first(job, summary, answer, effort, limit, ideas):
            return fitting
    if isinstance(job.cluster, UnequalCluster):  # more of which nodes?
        return []
    return _larger(job, _FREE | {"global_batch": job.resolve().global_batch}, answer)


def _best_first(
    job: Job,
    summary: Summary,
    answer: Callable[[Job], Summary],
    effort: int,
    limit: int,
    ideas: Ideas,
) -> list[Fix]:
    start = job.resolve()
    kept = _FREE | {"global_batch": start.global_batch}
    open_: list[tuple[float, int, Changes]] = [(summary.worst.peak, 0, {})]
    seen: list[Changes] = [{}]
    fitting: list[Fix] = []
    while open_ and effort > 0 and len(fitting) < 2 * limit:
        open_.sort(key=lambda entry: entry[:2])
        _, _, base = open_.pop(0)
        for idea in ideas(_changed(job, kept | base)):
            changes = base | idea
            if changes in seen or effort <= 0:
                continue
            seen.append(changes)
            try:
                result = answer(_changed(job, kept | changes))
            except UserError:
                continue
            effort -= result.events
            if result.fits:
                fitting.append(_fix(job, changes, kept, result))
            else:
                open_.append((result.worst.peak, len(seen), changes))
    return sorted(fitting, key=lambda fix: -fix.summary.tokens_per_second)[:limit]


def _larger(job: Job, kept: Changes, answer: Callable[[Job], Summary]) -> list[Fix]:
    """On the fewest nodes, doubled at most DOUBLED times, the change of the plan of least consequence; empty when none fits."""
    for times in range(1, DOUBLED + 1):
        nodes: Changes = {"nodes": job.cluster.nodes * 2**times}
        for idea in (
            {},
            {"recompute": "full"},
            {"data_parallel": "zero1"},
            {"data_parallel": "zero3"},
            {"data_parallel": "zero3", "recompute": "full"},
        ):
            new = {name: value for name, value in idea.items() if getattr(job.plan, name) != value}
            try:
                result = answer(_changed(job, kept | nodes | new))
            except UserError:
                continue
            if result.fits:
                return [_fix(job, nodes | new, kept, result)]
    return []


def _fix(job: Job, changes: Changes, kept: Changes, summary: Summary) -> Fix:
    return Fix(changes, summary, arguments_of(job, _changed(job, kept | changes)))


def _changed(job: Job, changes: Changes) -> Job:
    plan = {name: value for name, value in changes.items() if name != "nodes"}
    other = replace(job, plan=job.plan.model_copy(update=plan))
    if changes.get("nodes", job.cluster.nodes) == job.cluster.nodes:
        return other
    return replace(other, cluster=job.cluster.model_copy(update={"nodes": changes["nodes"]}))


def _ideas(job: Job) -> Iterator[Changes]:
    """Single changes that lower memory and that the plan does not make yet."""
    plan, model, node = job.plan, job.model, job.cluster.gpus_per_node
    dp = max(1, job.cluster.gpus // (plan.tp * plan.cp * plan.pp))
    if dp > 1 and plan.data_parallel in _NEXT_ZERO:
        yield {"data_parallel": _NEXT_ZERO[plan.data_parallel]}
        yield {"data_parallel": "zero3"}
    if dp > 1 and plan.shards_parameters and plan.tp == 1 and (tiled := with_tiles(job)):
        yield {"deepspeed": tiled}
    if plan.attention == "materialised":
        yield {"attention": "flash"}
    if plan.recompute != "full":
        yield {"recompute": "full"}
    if plan.microbatch > 1:
        yield {"microbatch": plan.microbatch // 2}
    if plan.tp > 1 and not plan.sequence_parallel:
        yield {"sequence_parallel": True}
    if dp % 2 == 0 and 2 * plan.tp <= node:
        yield {"tp": 2 * plan.tp, "sequence_parallel": True}
    more = plan.cp if plan.cp % 2 and plan.ep_of_copies < plan.cp else 2
    if model.experts and plan.cp * dp % (more * plan.ep_of_copies) == 0:
        yield {"ep": more * plan.ep}
    if dp % 2 == 0 and 2 * plan.pp <= model.layers:
        yield {"pp": 2 * plan.pp}


def _with_offload(job: Job) -> Iterator[Changes]:
    """The same, after what may be offloaded."""
    if job.cluster.topology().cpu is not None:
        if job.plan.hook.zero_stage and job.plan.offload is None:
            yield {"offload": OPTIMIZER}
        if job.plan.shards_parameters and job.plan.offload in (None, OPTIMIZER):
            yield {"offload": EVERYTHING}
        if job.plan.offload_activations is None and job.model.layers > AHEAD and job.model.module is None:
            yield {"offload_activations": job.model.layers - AHEAD}
        yield from _ideas(job)
