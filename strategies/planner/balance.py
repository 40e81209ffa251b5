"""Work shared out so that nobody waits for the busiest: layers over the stages of a pipeline, from how busy each was when the job
was played, and microbatches over dp ranks on GPUs that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sim.analysis.breakdown import breakdowns, busy_seconds
from sim.program import COMPUTE, Kernel
from sim.timeline import Timeline
from strategies.job import Job
from strategies.layers.model_costs import parts
from strategies.lowering.allotments import replicas
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.reading import UserError

TRIES = 4  # allotments that are played


def may_be_shared_out(plan: Plan) -> bool:
    """Whether GPUs that differ may have unequal work: layers of a pipeline's stages, or microbatches of dp ranks that do not meet
    in each (`strategies.lowering.allotments.merged` refuses those that do).
    """
    reduces_each = "gradient" in plan.hook.shards and plan.syncs_gradients == "every"
    return plan.pp > 1 or not (plan.ep > 1 or plan.shards_parameters or reduces_each)


def balanced_by(job: Job, timeline: Timeline) -> Job | None:
    """The job with the layers per stage that its step, played with all microbatches, asks for; None as `balanced`."""
    return balanced(job, busy_seconds(timeline, breakdowns(timeline)), paces(job, timeline))


def balanced(job: Job, busy: Sequence[float], pace: Sequence[float] = ()) -> Job | None:
    """The job with other layers per stage; None where they are as even as whole layers can be, or ranks have several stages.

    busy: seconds of each stage's compute stream in a step. What a stage has besides its layers (embedding, head) stays where it
    is: a layer takes what it takes on the stage that spends least per layer, times the pace of the stage's GPU, see `paces`.
    """
    plan = job.resolve()
    layers = plan.layers
    if len(busy) < 2 or len(layers) != len(busy):
        return None
    pace = pace or [1.0] * len(layers)
    least = min(seconds / count / slow for seconds, count, slow in zip(busy, layers, pace, strict=True) if count)
    each = [least * slow for slow in pace]
    load = [seconds - layer * count for seconds, layer, count in zip(busy, each, layers, strict=True)]
    new = [0] * len(layers)
    for stage in range(1, len(layers) - 1):  # only the first and the last may have none
        _give(new, load, stage, each)
    while sum(new) < sum(layers):
        _give(new, load, min(range(len(load)), key=lambda stage: (load[stage] + each[stage] - min(each), stage)), each)
    if tuple(new) == layers:
        return None
    other = {"layers_per_stage": tuple(new), "first_stage_layers": None, "last_stage_layers": None}
    even = {"embedding_as_layer": False, "loss_as_layer": False}
    return replace(job, plan=job.plan.model_copy(update=other | even))


def _give(layers: list[int], load: list[float], stage: int, each: Sequence[float]) -> None:
    layers[stage] += 1
    load[stage] += each[stage]


def paces(job: Job, timeline: Timeline) -> list[float]:
    """By stage, the seconds of a layer's kernels on the slowest of its GPUs, relative to the quickest stage."""
    plan = job.resolve()
    layer = parts(job.model, plan).layer(0)
    kernels = [item for item in (*layer.forward, *layer.backward) if isinstance(item, Kernel)]
    seconds = {prices: sum(map(prices.seconds, kernels)) for prices in timeline.op_costs.prices.members}
    slowest = [0.0] * plan.pp
    for number in range(len(timeline.lanes)):
        stage = timeline.stage(number)
        slowest[stage] = max(slowest[stage], seconds[timeline.prices(number)])
    return [each / min(slowest) for each in slowest]


def allotted(job: Job, timeline: Timeline, play: Callable[[Job], Timeline]) -> tuple[Job, Timeline] | None:
    """The job with as many microbatches for each dp rank as make the step shortest, of a few that are played, and that step; None
    where none is shorter than `timeline`, dp ranks must have equally many, or the last of some is not full.

    A replica of whose microbatches each takes t has its share of the batch in the ratio of 1 / t.
    """
    plan = job.resolve()
    if plan.dp == 1 or plan.sequences_per_replica or len(timeline.op_costs.prices.members) == 1:
        return None
    counts = list(plan.allotted or (plan.microbatches,) * plan.dp)
    best, shortest, tried = None, timeline.step, {tuple(counts)}
    try:
        for _ in range(TRIES):
            ends = _ends(timeline, plan)
            counts = _shared_out(sum(counts), [count / end for count, end in zip(counts, ends, strict=True)])
            if tuple(counts) in tried:
                break
            tried.add(tuple(counts))
            fields = {
                "microbatches_per_replica": tuple(counts),
                "global_batch": None,
                "accumulation": None,
                "uneven_batch": "refuse",
            }
            other = replace(job, plan=job.plan.model_copy(update=fields))
            timeline = play(other)
            if timeline.step < shortest:
                best, shortest = (other, timeline), timeline.step
    except UserError:
        return None
    return best


def _ends(timeline: Timeline, plan: Resolved) -> list[float]:
    """When each dp rank is through with its microbatches: the last of its stages."""
    ends = [0.0] * plan.dp
    for number in range(len(timeline.lanes)):
        passes = [timeline.end[op] for op, each in timeline.ops(number) if each.stream == COMPUTE and each.microbatch >= 0]
        for replica in _replicas(timeline, number):
            ends[replica] = max(ends[replica], *passes)
    return ends


def _replicas(timeline: Timeline, number: int) -> list[int]:
    """The dp ranks of a lane."""
    grid, cohort, lane = timeline.program.grid, timeline.cohort(number), timeline.op_costs.lane
    every = replicas(grid, cohort)
    if lane is not None:
        place = int(np.searchsorted(grid.groups((), cohort.at).ravel(), timeline.lanes[number].rank))
        every = every[lane == lane[place]]
    return [int(replica) for replica in np.unique(every)]


def _shared_out(total: int, rates: Sequence[float]) -> list[int]:
    """`total` in the ratio of `rates`, each at least 1: whole numbers, the last to whoever is through first with one more."""
    shares = [max(1, int(total * rate / sum(rates))) for rate in rates]
    while sum(shares) < total:
        shares[min(range(len(shares)), key=lambda place: ((shares[place] + 1) / rates[place], place))] += 1
    while sum(shares) > total:
        shares[
            max((place for place in range(len(shares)) if shares[place] > 1), key=lambda place: shares[place] / rates[place])
        ] -= 1
    return shares
