"""Which way to train: the usual candidates simulated on the job's model and cluster, and the questions asked first.

Each candidate is a plan of the space that `shardyard plan` searches (`strategies.planner.search.space.default_space`): what the
job says of its plan stays where it applies to the candidate, and is left out where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from sim.analysis.summary import Summary
from strategies.frameworks.settings import EVERYTHING
from strategies.job import Job
from strategies.layers.model_costs import parts
from strategies.plan.plan import SEQUENCE, Plan
from strategies.planner.applicable import applicable
from strategies.planner.balance import allotted, balanced_by, may_be_shared_out
from strategies.planner.bounds.every_plan import least
from strategies.planner.fixes import OPTIMIZER
from strategies.planner.ranking import HEADROOM, Key, rank
from strategies.planner.search.space import MICROBATCHES, doubling
from strategies.planner.tiles import with_tiles
from strategies.predict import prices_of, simulate
from topologies.cluster import Cluster, Node, UnequalCluster
from topologies.fabric import fabrics
from topologies.reading import UserError

Changes = dict[str, Any]
Answer = Callable[[Job], Summary]
OWN = "the job's plan"
DEEP = 8  # stages of a pipeline from which on its step takes long to play: it grows with stages and microbatches
EVENED = 8  # ways of which, on nodes that are not alike, layers or microbatches are shared out by the speed of GPUs
EVENED_OF_FEW = 2  # the same, where a plan is to be found in seconds
FINE = 4  # microbatches of a dp rank from which on they can be dealt out by the speed of GPUs, to within an eighth of its share
_PLAIN: Changes = {"cp": 1, "shard": None, "reshard": True, "offload": None}  # what is to be of a candidate unless it says more
_OF_ONE_GPU = (
    "sequence",
    "microbatch",
    "attention",
    "kernels",
    "precision",
    "gradients",
    "optimizer",
    "clip_gradients",
    "dropout",
)
"""Fields of a plan that one GPU alone has too."""


@dataclass(frozen=True)
class Candidate:
    """A way to train: its name, what it changes of the plan, the job with it, and the answer; comfortable: it fits with the
    headroom that was asked for; dropped: fields of the job's own plan that do not apply.
    """

    name: str
    changes: Changes
    job: Job
    summary: Summary
    comfortable: bool
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """Answers to the usual questions, and candidates: those that fit first, the fastest before the others; of the others the one
    that needs least memory first.

    fixes: where none fits, what would make the first one fit, as arguments beside its own; filled in by who asks for it.
    slower: ways that are proven to be none of the first `shown` (see `advise`) and were not simulated: what they leave out of the
    job's own plan, by name.
    """

    questions: tuple[tuple[str, str], ...]
    candidates: tuple[Candidate, ...]
    slower: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixes: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits comfortably; where none does, the fastest that fits at all."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.summary.fits else None

    @property
    def dropped(self) -> dict[str, list[str]]:
        """Fields of the job's own plan that some candidates leave out, and which."""
        names: dict[str, list[str]] = {}
        for name, dropped in (*((each.name, each.dropped) for each in self.candidates), *self.slower.items()):
            for left_out in dropped:
                names.setdefault(left_out, []).append(name)
        return names


def advise(
    job: Job,
    answer: Answer,
    run: Callable[..., Iterable[Candidate | None]] = map,
    depth: int | None = None,
    headroom: float = HEADROOM,
    more: Iterable[tuple[str, Changes]] = (),
    shown: int | None = None,
) -> Advice:
    """Simulate the candidates on all of the job's GPUs with one global batch; those that offload when nothing else fits. Raises
    UserError when none can be simulated. more: other ways, by what they change of the plan.

    run: as `map`, may work on several at a time, on the first before the last is known; depth: of the longest pipeline that is
    tried (None: as many stages as layers); headroom: part of a GPU's memory that is to be kept free, see `Summary.fits_with`;
    shown: so many of the first candidates matter, and long pipelines, which take longest, are simulated where they may be among
    these or tie with the best (None: all matter).
    """
    batch = job.global_batch

    def simulated(several: Iterable[tuple[str, Changes]]) -> dict[str, Candidate]:
        ways = ((name, changes | {"global_batch": batch}) for name, changes in several)
        every: dict[str, Candidate] = {}  # by their hashes: two ways may be one plan
        for candidate in filter(None, run(partial(_try, job, answer, headroom), ways)):
            every.setdefault(candidate.job.hash, candidate)
        return every

    usual = list(_candidates(job, depth or job.model.layers))
    deep = {name: changes | {"global_batch": batch} for name, changes in usual if shown and changes["pp"] > DEEP}
    first = (way for way in usual if way[0] not in deep)
    by_hash = simulated(chain(first, _contexts(job), [] if job.auto else [(OWN, {})], more))
    slower: dict[str, tuple[str, ...]] = {}
    if shown:
        slower = dict(_slower(job, deep, headroom, by_hash, shown))
        by_hash |= simulated((name, changes) for name, changes in deep.items() if name not in slower)
    if not any(candidate.comfortable for candidate in by_hash.values()):
        by_hash = simulated(_offloading(job)) | by_hash
    if isinstance(job.cluster, UnequalCluster):
        first_ones = _to_even(sorted(by_hash.values(), key=_place))[:EVENED]
        for candidate in filter(None, run(partial(_evened, answer, headroom), first_ones)):
            by_hash.setdefault(candidate.job.hash, candidate)
    if not by_hash:
        raise UserError(
            f"{job.where}: none of the usual ways divides {batch} sequences over {job.cluster.gpus} GPUs; set global_batch"
        )
    ranked = sorted(by_hash.values(), key=_place)
    return Advice(tuple(_questions(job, answer)), tuple(ranked), slower)


def best_of(job: Job, answer: Answer, ways: Iterable[tuple[str, Changes]], headroom: float) -> Candidate | None:
    """The first of a few ways, with work of the best shared out where nodes are not alike; None where all are refused."""
    batch = job.global_batch
    every = (_simulated(job, answer, headroom, name, changes | {"global_batch": batch}) for name, changes in ways)
    ranked = sorted(filter(None, every), key=_place)
    evened = filter(None, (_evened(answer, headroom, each) for each in _to_even(ranked)[:EVENED_OF_FEW]))
    return min((*ranked, *evened), key=_place, default=None)


def _place(candidate: Candidate) -> tuple[bool, float, Key]:
    """What is comfortable first, then what fits, then what needs least memory."""
    summary = candidate.summary
    needed = 0.0 if summary.fits else summary.worst.peak
    return not candidate.comfortable, needed, rank(summary, dict(candidate.job.plan), candidate.job.hash)


def _try(job: Job, answer: Answer, headroom: float, way: tuple[str, Changes]) -> Candidate | None:
    """The candidate without recomputation, or when it does not fit with it, without a pipeline with the microbatch that is the
    fastest; None when it is refused.
    """
    name, changes = way
    simulated = partial(_simulated, job, answer, headroom)
    if name == OWN or "microbatch" in changes:  # a whole plan
        return simulated(name, changes)
    keeping = changes | {"recompute": "none"}
    too_big = _too_big(job, headroom, name, keeping)  # which need not be simulated
    best = None if too_big else simulated(name, keeping)
    if too_big or (best is not None and not best.comfortable):
        best = simulated(f"{name} + recompute", changes | {"recompute": "full"}) or best or simulated(name, keeping)
    again = " + recompute" if best is not None and best.changes["recompute"] == "full" else ""
    if best is None or not best.comfortable or best.changes["pp"] > 1:
        return best
    for microbatch in (size for size in MICROBATCHES if size > job.plan.microbatch):  # fewer passes, where memory is left
        more = {"recompute": best.changes["recompute"], "microbatch": microbatch}
        larger = simulated(f"{name}{again}, microbatch {microbatch}", changes | more)
        if larger is None or not larger.comfortable or larger.summary.step_seconds >= best.summary.step_seconds:
            break
        best = larger
    return best


def _simulated(job: Job, answer: Answer, headroom: float, name: str, changes: Changes) -> Candidate | None:
    """The candidate; None when it is refused."""
    wanted = _wanted(job, name, changes)
    try:
        asked, _, dropped = applicable(job, wanted)
        summary = answer(asked)
        return Candidate(name, wanted | dropped, asked, summary, summary.fits_with(headroom), tuple(dropped))
    except UserError:
        return None


def _to_even(ranked: Iterable[Candidate]) -> list[Candidate]:
    """Candidates whose work can be shared out, in no long time."""
    short = (each for each in ranked if each.comfortable and each.changes.get("pp", 1) <= DEEP)
    return [each for each in short if may_be_shared_out(each.job.plan)]


def _evened(answer: Answer, headroom: float, candidate: Candidate) -> Candidate | None:
    """The candidate with its layers shared out over stages on faster and slower GPUs, or its microbatches over dp ranks on them,
    smaller ones where replicas have few; None where neither is faster.
    """
    best, size = candidate, candidate.job.plan.microbatch
    for job in _finer(candidate.job):
        timeline = simulate(job)
        shared = allotted(job, timeline, simulate)
        others = {"uneven layers": balanced_by(job, timeline), "uneven microbatches": shared and shared[0]}
        smaller = f", microbatch {job.plan.microbatch}" if job.plan.microbatch > 1 else ""
        name = candidate.name.replace(f", microbatch {size}", smaller)
        for what, other in others.items():
            with suppress(UserError):
                summary = answer(other) if other is not None else None
                if other is None or summary is None or summary.step_seconds >= best.summary.step_seconds:
                    continue
                changed = {name: value for name, value in other.plan if value != getattr(candidate.job.plan, name)}
                changes = candidate.changes | changed
                best = Candidate(f"{name}, {what}", changes, other, summary, summary.fits_with(headroom), candidate.dropped)
    return None if best is candidate or not best.comfortable else best


def _finer(job: Job) -> Iterator[Job]:
    """The job, and with microbatches of half as many sequences until each dp rank has FINE of them."""
    plan = job.resolve()
    size, count = plan.microbatch, plan.microbatches
    yield job
    while count < FINE and not size % 2:
        size, count = size // 2, 2 * count
        yield replace(job, plan=job.plan.model_copy(update={"microbatch": size}))


def _wanted(job: Job, name: str, changes: Changes) -> Changes:
    """The changes with what else they change of the job's plan."""
    wanted = {"dp": None, "accumulation": None} | changes
    if job.plan.microbatches_per_replica is not None and name != OWN:
        wanted = {"microbatches_per_replica": None} | wanted
    return wanted


def _too_big(job: Job, headroom: float, name: str, changes: Changes) -> bool:
    """Whether a candidate is certain not to fit comfortably; False also where it is refused, or that is not known."""
    if isinstance(job.cluster, UnequalCluster):
        return False
    try:
        asked = applicable(job, _wanted(job, name, changes)).job
        return least(asked, prices_of(asked))[1] > (1 - headroom) * job.cluster.node.gpu.memory
    except UserError:
        return False


def _slower(
    job: Job, ways: Mapping[str, Changes], headroom: float, known: Mapping[str, Candidate], shown: int
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Those of `ways` that are certain neither to be among the first `shown` nor to tie with the best of all, and what they leave
    out of the job's plan: with recomputation, or without it where that may fit, they take longer by their lower bounds.
    """
    from strategies.planner.uncertainty import TIE

    steps = sorted(each.summary.step_seconds for each in known.values() if each.comfortable)
    if len(steps) < shown or isinstance(job.cluster, UnequalCluster) or job.effects or job.plan.uneven_batch == "drop_last":
        return  # what drops sequences is not ranked by its step
    slow = max(steps[shown - 1], (1 + TIE) * steps[0])
    for name, changes in ways.items():
        with suppress(UserError):  # refused, with or without recomputation: its simulation says so
            plans = [applicable(job, _wanted(job, name, changes | {"recompute": how})) for how in ("full", "none")]
            full, none = (least(plan.job, prices_of(plan.job)) for plan in plans)
            too_big = none[1] > (1 - headroom) * job.cluster.node.gpu.memory
            if full[0] > slow and (too_big or none[0] > slow) and not any(plan.job.hash in known for plan in plans):
                yield name, tuple(plans[0].dropped)


def _candidates(job: Job, depth: int) -> Iterator[tuple[str, Changes]]:
    gpus, node = job.cluster.gpus, job.cluster.gpus_per_node
    for hook, name in (("ddp", "DDP"), ("zero1", "ZeRO-1"), ("zero2", "ZeRO-2"), ("zero3", "ZeRO-3 (FSDP)")):
        yield name, _PLAIN | {"data_parallel": hook, "tp": 1, "pp": 1}
    if tiled := with_tiles(job):
        changes = {"data_parallel": "zero3", "tp": 1, "pp": 1, "deepspeed": tiled}
        yield f"ZeRO-3 (DeepSpeed), {tiled.tiles} tiles", _PLAIN | changes
    if job.cluster.nodes > 1:
        yield f"HSDP, shards of {node}", _PLAIN | {"data_parallel": "zero3", "shard": node, "tp": 1, "pp": 1}
    for tp in doubling(node):
        for pp in doubling(min(gpus // tp, depth, job.model.layers)):
            if tp * pp > 1:
                degrees = " × ".join(f"{axis}{degree}" for axis, degree in (("TP", tp), ("PP", pp)) if degree > 1)
                sequence = {"sequence_parallel": True} if tp > 1 else {}
                yield f"{degrees} + ZeRO-1", _PLAIN | {"data_parallel": "zero1", "tp": tp, "pp": pp} | sequence


def _contexts(job: Job) -> Iterator[tuple[str, Changes]]:
    """Ranks that share long sequences, each with at least SEQUENCE tokens of one."""
    gpus, node = job.cluster.gpus, job.cluster.gpus_per_node
    for cp in doubling(min(gpus, job.plan.sequence_of(job.model) // SEQUENCE))[1:]:
        for tp in doubling(min(node, gpus // cp)):
            degrees = f"TP{tp} × CP{cp}" if tp > 1 else f"CP{cp}"
            shared = {"cp": cp, "tp": tp, "pp": 1} | ({"sequence_parallel": True} if tp > 1 else {})
            for hook, name in (("zero1", "ZeRO-1"), ("zero3", "ZeRO-3 (FSDP)")):
                yield f"{degrees} + {name}", _PLAIN | {"data_parallel": hook} | shared


def _offloading(job: Job) -> Iterator[tuple[str, Changes]]:
    if job.cluster.topology().cpu is not None:
        for hook, name in (("zero1", "ZeRO-1"), ("zero2", "ZeRO-2"), ("zero3", "ZeRO-3")):
            yield f"{name}, optimizer on CPUs", _PLAIN | {"data_parallel": hook, "tp": 1, "pp": 1, "offload": OPTIMIZER}
        everything = _PLAIN | {"data_parallel": "zero3", "tp": 1, "pp": 1, "offload": EVERYTHING}
        yield "ZeRO-3, everything on CPUs", everything
        if tiled := with_tiles(job):
            yield f"ZeRO-3 (DeepSpeed), everything on CPUs, {tiled.tiles} tiles", everything | {"deepspeed": tiled}


def _questions(job: Job, answer: Answer) -> Iterator[tuple[str, str]]:
    """Does it fit a GPU, does its largest layer, does it fit a node?"""
    node = _tightest(job.cluster)
    memory = node.gpu.memory
    small = {"accumulation": 1, "recompute": "full", **_tuned(job.plan)}
    on_one_gpu = type(job.plan).model_validate({name: getattr(job.plan, name) for name in _OF_ONE_GPU} | small)
    alone = replace(job, plan=on_one_gpu, cluster=_cluster(job, 1), profile=_profile(job))
    peak = answer(alone).worst.peak
    yield "fits one GPU", _fits(peak, memory)
    work = parts(job.model, alone.resolve())
    width = sum(on_one_gpu.bytes_of_states[kind] for kind in ("parameter", "gradient"))
    largest = max((work.embedding, work.layer(0), work.head), key=lambda part: part.parameters * width + part.frozen_bytes)
    held = largest.parameters * width + largest.frozen_bytes + largest.saved + largest.restored + largest.backward_workspace
    yield f"its largest part ({largest.name}) fits one GPU when everything else is elsewhere", _fits(held, memory)
    if node.gpus > 1 and node.wiring != "bare":  # bare: nothing but the fabric, of which a node is a corner, joins them
        sharded = on_one_gpu.model_copy(update={"data_parallel": "zero3"})
        whole = answer(replace(job, plan=sharded, cluster=_cluster(job, node.gpus), profile=_profile(job)))
        yield "fits one node when everything is sharded", _fits(whole.worst.peak, memory)


def _tuned(plan: Plan) -> Changes:
    """What is trained, as one GPU alone trains it."""
    lora = plan.lora and plan.lora.model_copy(update={"all_to_all": False})
    return {"freeze": plan.freeze, "lora": lora} | ({"fp8": plan.fp8} if lora and lora.weights == "fp8" else {})


def _tightest(cluster: Cluster) -> Node:
    """The node whose GPUs have least memory."""
    return min((group.node for group in cluster.groups), key=lambda node: node.gpu.memory)


def _profile(job: Job) -> str | None:
    """The job's profile, where it is for the GPUs with least memory."""
    return job.profile if len(job.cluster.gpu_kinds) == 1 else None


def _cluster(job: Job, gpus: int) -> Cluster:
    """GPUs of one node of the job's cluster; one GPU alone has no links that matter."""
    node, fabric = _tightest(job.cluster), job.cluster.fabric
    if gpus < node.gpus:
        alone = {"gpus": gpus, "nics": 0, "nic": 0.0, "wiring": "bare", "edges": (), "cpu": None}
        node, fabric = node.model_copy(update=alone), fabrics["single"]()
    return Cluster.model_construct(
        name=job.cluster.name, node=node, nodes=1, fabric=fabric, source=job.cluster.source, notes=job.cluster.notes
    )


def _fits(size: float, memory: float) -> str:
    return f"{'yes' if size <= memory else 'no'}: {size / 1e9:,.1f} of {memory / 1e9:,.1f} GB"
