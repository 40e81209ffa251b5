"""`plan: auto`: the best plan of a small space, found in seconds by the search that `shardyard plan` runs on a larger one.

The space: degrees of tensor parallelism; pipelines with DDP or ZeRO-1, or FSDP and HSDP; recomputation, microbatches; experts and
contexts where the model or the sequence asks for them. Schedules other than 1F1B, orders of ranks and offload are left to
`shardyard plan`; offload is tried where nothing else fits. No clock is asked: the same job has the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strategies.job import FOUND, Job
from strategies.plan.plan import SEQUENCE, Plan
from strategies.planner.advise import advise, best_of
from strategies.planner.arguments import arguments_of
from strategies.planner.balance import may_be_shared_out
from strategies.planner.ranking import HEADROOM
from strategies.planner.search.objective import Limits, objective
from strategies.planner.search.search import Search
from strategies.planner.search.space import Axis, Changes, Space, default_space
from strategies.planner.search.workers.in_process import in_process
from strategies.predict import predict
from topologies.cluster import Cluster, UnequalCluster
from topologies.reading import UserError

WITHIN = 0.01  # of the best of the space: less would double the seconds where many plans are alike
DEEPEST = 16  # pipeline stages
SEVERAL, ROUGHLY = 3, 0.05  # plans that are tried on nodes that are not alike, and how near to the best of alike ones
OF_THE_BATCH = ("dp", "accumulation", "microbatches_per_replica")  # fields that say a plan's batch by its degrees
FEW = 16  # experts up to which all degrees are looked at: each is priced by itself
CHOSEN = (
    "tp",
    "sequence_parallel",
    "pp",
    "cp",
    "ep",
    "schedule",
    "chunks",
    "microbatch",
    "recompute",
    "data_parallel",
    "reshard",
    "shard",
    "offload",
)
"""Fields of a plan that a search chooses."""
OF_WORK = ("plan.pp", "plan.data_parallel")  # axes that decide whether stages or dp ranks may have unequal work
LEFT_OUT = ("plan.order", "plan.overlap", "plan.offload")  # axes of the default space
_CHOSEN: dict[tuple[str, frozenset[str]], Chosen] = {}  # by hash and fields that were said: what this process chose


@dataclass(frozen=True)
class Chosen:
    """A plan that was chosen, and a sentence that says why."""

    plan: Plan
    why: str


def with_auto_plan(job: Job, kept: frozenset[str] = frozenset()) -> Job:
    """The job with the best plan of a small space, the fields that were said (`Job.auto`) and those of `kept` kept, and a remark
    that says why, with arguments for the same. Raises UserError for fields that contradict a choice of degrees, and where no plan
    of the space fits the model or the cluster.
    """
    said = kept | job.said
    for field in OF_THE_BATCH:
        if field in said:
            raise UserError(f"{job.where}: {field} contradicts plan: auto, which chooses degrees: say global_batch instead")
    key = job.hash, said
    if key not in _CHOSEN:
        try:
            _CHOSEN[key] = _chosen(job, said)
        except UserError:
            job.resolve()  # what is wrong with every plan is said of the plain one
            raise
    other = replace(job, plan=_CHOSEN[key].plan)
    remark = f"{FOUND}{_CHOSEN[key].why}; as arguments: {arguments_of(job, other)}"
    return replace(other, remarks=(remark, *job.remarks))


def quick_way(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    """The best plan of the small space as a way for `advise`: its name and fields; none where no plan is possible. It is looked
    for when it is asked for, while workers simulate other ways.
    """
    if isinstance(job.cluster, UnequalCluster):
        return
    with suppress(UserError):
        plan = with_auto_plan(job).plan
        yield name_of(plan), {field: getattr(plan, field) for field in CHOSEN}


def _chosen(job: Job, said: Collection[str]) -> Chosen:
    """The best plan that fits: with the headroom, without it, with offload; where none does, what needs least memory."""
    if isinstance(job.cluster, UnequalCluster):
        equal = len({len(group.gpus) for group in job.cluster.groups}) == 1
        return _on_unlike_nodes(job, said) if equal else _advised(job)
    space = quick_space(job, said)
    last: Search | None = None
    for asked, headroom in ((space, HEADROOM), (space, 0.0), (_with_offload(job, space, said), 0.0)):
        last = Search(lambda _: job, asked, objective("step"), in_process(), Limits(headroom=headroom), within=WITHIN, window=1)
        answer = last.run()
        if answer.ended:
            raise answer.ended
        if answer.best is not None:
            plan = _changed(job.plan, answer.best["changes"])
            kept = f"that keep {100 * headroom:.0f} % of the memory free" if headroom else "that fit"
            sure = f", none of which is more than {100 * answer.gap:.1f} % faster" if answer.gap else ""
            why = f"the fastest of {answer.counts['allowed']:,} usual plans {kept}{sure}"
            return Chosen(plan, f"{name_of(plan)}, {why}{_plain_ddp(last, job)}")
    assert last is not None
    return _smallest(last)


def _changed(plan: Plan, changes: Changes) -> Plan:
    """The plan with values of a search's row, which are plain data."""
    fields = {name.removeprefix("plan."): value for name, value in changes.items()}
    validated = Plan.model_validate(fields)
    return plan.model_copy(update={name: getattr(validated, name) for name in fields})


def _plain_ddp(search: Search, job: Job) -> str:
    """What the plan that says nothing (DDP) would need where it does not fit."""
    capacity = job.cluster.node.gpu.memory
    for site in search.selection.sites:
        if len(site.plans) and _same(site.plans.job_of(0).plan, job.plan) and site.limits.memory[0] > capacity:
            needed = f"at least {site.limits.memory[0] / 1e9:,.1f} GB of {capacity / 1e9:,.1f} GB"
            return f" ({name_of(job.plan)} alone needs {needed})"
    return ""


def _same(plan: Plan, other: Plan) -> bool:
    return all(getattr(plan, name) == getattr(other, name) for name in Plan.model_fields if name not in OF_THE_BATCH)


def _smallest(search: Search) -> Chosen:
    """The plan whose bound of memory is the least."""
    best = min(search.selection.sites, key=lambda site: float(site.limits.memory.min()))
    plan = best.plans.job_of(int(np.argmin(best.limits.memory))).plan
    return Chosen(plan, f"{name_of(plan)}, as nothing fits and this needs least memory")


def _on_unlike_nodes(job: Job, said: Collection[str]) -> Chosen:
    """On nodes that are not alike, which searches do not bound: of the best plans on as many nodes that are all like the one that
    has least memory, or of equal memory is slowest, the one that is the fastest here. Where GPUs differ these are also the best
    of those whose work can be shared out by their speed.
    """
    alike = _with_alike_nodes(job)
    space = quick_space(alike, said)
    spaces = [space, *([_shared_out(space, job.plan)] if len(job.cluster.gpu_kinds) > 1 else [])]
    for headroom in (HEADROOM, 0.0):
        limits, ways, count = Limits(headroom=headroom), dict[str, dict[str, Any]](), 0
        for part in spaces:
            search = Search(lambda _: alike, part, objective("step"), in_process(), limits, top=SEVERAL, within=ROUGHLY, window=1)
            answer = search.run()
            if answer.ended:
                raise answer.ended
            count = count or answer.counts["allowed"]
            plans = [_changed(job.plan, row["changes"]) for row in answer.rows[:SEVERAL]]
            ways |= {name_of(plan): {field: getattr(plan, field) for field in CHOSEN} for plan in plans}
        if (best := best_of(job, predict, ways.items(), headroom)) is not None and best.summary.fits:
            where = f"on {alike.cluster.nodes} nodes of {alike.cluster.node.gpu.name} that are alike"
            why = f"the fastest here of {len(ways)} that are the best of {count:,} usual plans {where}"
            return Chosen(best.job.plan, f"{best.name}, {why}")
    return _advised(job)


def _shared_out(space: Space, plan: Plan) -> Space:
    """The part of a space whose plans can give unequal work to unlike GPUs."""

    def able(choice: Changes) -> bool:
        return may_be_shared_out(_changed(plan, choice))

    axes = ((axis, tuple(filter(able, axis.choices)) if axis.name in OF_WORK else axis.choices) for axis in space.axes)
    return Space(tuple(Axis(axis.name, choices or axis.choices) for axis, choices in axes))


def _with_alike_nodes(job: Job) -> Job:
    """The job on as many nodes as it has, all like one of them."""
    node = min((group.node for group in job.cluster.groups), key=lambda node: (node.gpu.memory, max(node.gpu.peak.values())))
    cluster = Cluster(name=job.cluster.name, node=node, nodes=job.cluster.nodes, fabric=job.cluster.fabric)
    return replace(job, cluster=cluster, profile=job.profile if len(job.cluster.gpu_kinds) == 1 else None, effects=())


def _advised(job: Job) -> Chosen:
    """The best of what `advise` simulates."""
    answer = advise(job, predict, depth=DEEPEST)
    first = answer.candidates[0]
    fitting = sum(candidate.comfortable for candidate in answer.candidates)
    why = (
        f"the fastest of {fitting} usual ways that keep {100 * HEADROOM:.0f} % of the memory free"
        if fitting
        else "as nothing fits"
    )
    return Chosen(first.job.plan, f"{first.name}, {why}")


def quick_space(job: Job, said: Collection[str] = ()) -> Space:
    """The part of `default_space` that is searched in seconds, without axes of fields that were said."""
    long = job.plan.sequence_of(job.model) >= 2 * SEQUENCE
    node, experts = job.cluster.node.gpus, job.model.experts
    few_experts = experts is None or experts.experts <= FEW
    kept: dict[str, Any] = {
        "plan.tp": lambda c: few_experts or c["plan.tp"] in (1, node),
        "plan.pp": lambda c: c["plan.pp"] <= DEEPEST,
        "plan.cp": lambda c: c["plan.cp"] == 1 or long,
        "plan.ep": lambda c: few_experts or c["plan.ep"] in (1, node, 8 * node),
        "plan.schedule": lambda c: c["plan.schedule"] == job.plan.schedule and c["plan.chunks"] == job.plan.chunks,
        "plan.recompute": lambda c: c["plan.recompute"] != "selective",
        "plan.data_parallel": lambda c: c["plan.reshard"] and c["plan.data_parallel"] != "zero2",
    }
    return _joined(Space(tuple(_axes(default_space(job), kept, said))))


def _joined(space: Space) -> Space:
    """Pipelines and sharding as one axis, without parameters that are gathered anew for every microbatch of a pipeline: these are
    rarely the best, and take long to bound.
    """
    stages, sharding = (next((a for a in space.axes if a.name == name), None) for name in ("plan.pp", "plan.data_parallel"))
    if stages is None or sharding is None:
        return space
    both = [{**pp, **hook} for pp in stages.choices for hook in sharding.choices]
    able = tuple(each for each in both if each["plan.pp"] == 1 or each["plan.data_parallel"] != "zero3")
    rest = [axis for axis in space.axes if axis not in (stages, sharding)]
    return Space((*rest, Axis("plan.pp", able)))


def _axes(space: Space, kept: dict[str, Any], said: Collection[str]) -> Iterator[Axis]:
    """Axes with the choices that are kept; a field that was said keeps its value."""
    for axis in space.axes:
        if axis.name in LEFT_OUT or axis.name.removeprefix("plan.") in said:
            continue
        choices = [choice for choice in axis.choices if axis.name not in kept or kept[axis.name](choice)]
        free = [{field: value for field, value in c.items() if field.removeprefix("plan.") not in said} for c in choices]
        if free:  # else the job's own value is none of those that are tried, and stays
            yield Axis(axis.name, tuple(choice for at, choice in enumerate(free) if choice not in free[:at]))


def _with_offload(job: Job, space: Space, said: Collection[str]) -> Space:
    """States on the CPUs, where there are any; without a pipeline and with tp in a whole node or not at all, as each plan whose
    nodes may have too little memory is simulated.
    """
    whole = {"plan.tp": (1, job.cluster.node.gpus), "plan.pp": (1,), "plan.microbatch": (job.plan.microbatch,)}
    few = [
        Axis(axis.name, tuple(choice for choice in axis.choices if choice[axis.name] in whole[axis.name]))
        if axis.name in whole
        else axis
        for axis in space.axes
    ]
    more = [axis for axis in default_space(job).axes if axis.name == "plan.offload" and "offload" not in said]
    return Space((*few, *more))


def name_of(plan: Plan) -> str:
    """A plan as people say it: TP8 × PP2 + ZeRO-1, full recomputation, microbatch 2."""
    degrees = " × ".join(f"{axis.upper()}{getattr(plan, axis)}" for axis in ("tp", "cp", "pp", "ep") if getattr(plan, axis) > 1)
    names = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3 (FSDP)"}
    hook = f"HSDP, shards of {plan.shard}" if plan.shard else names.get(plan.data_parallel, plan.data_parallel)
    unlike = Plan.model_fields
    more = [plan.schedule + (f", {plan.chunks} chunks" if plan.chunks else "")] * (plan.schedule != unlike["schedule"].default)
    more += ["parameters kept"] * (not plan.reshard)
    more += [f"{plan.recompute} recomputation"] * (plan.recompute != "none")
    more += [f"microbatch {plan.microbatch}"] * (plan.microbatch > 1)
    more += [f"order {plan.order}"] * (plan.order != unlike["order"].default)
    more += ["no overlap"] * (not plan.overlap)
    more += ["states on CPUs"] * (plan.offload is not None)
    return ", ".join([f"{degrees} + {hook}" if degrees else hook, *more])
