"""Several jobs on one cluster at the same time, each on GPUs of its own: how much they slow each other down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from sim.engine.player import run
from sim.engine.together import play_together
from sim.pricing.prices import Prices
from sim.program import Program
from sim.replay.draws import samples_of
from sim.replay.step import replay_of
from sim.replay.waiting import waiting
from sim.timeline import Timeline
from strategies.job import Job
from strategies.lowering.lower import lower
from strategies.predict import prices_of, uncollected, variability_of
from topologies.cluster import Cluster, UnequalCluster
from topologies.gpu_targets import gpus_named
from topologies.links.placed import PlacedTopology
from topologies.reading import UserError, build

STEPS = 3  # of each job at least


@dataclass(frozen=True)
class Neighbour:
    """A job among others. Seconds; steps: of each of its steps while the others ran, one after the other; alone: its step on the
    same GPUs with nobody else on the network; kinds: kinds of links that it shares with others; ideal: whether these are steps
    of GPUs that are alike, as they were played, and not the expected ones of GPUs that are not quite.
    """

    name: str
    where: str
    gpus: int
    alone: float
    steps: tuple[float, ...]
    kinds: tuple[str, ...]
    ideal: bool

    @property
    def together(self) -> float:
        """The mean step while the others ran."""
        return fsum(self.steps) / len(self.steps)

    @property
    def slowdown(self) -> float:
        """How many times as long a step takes beside the others."""
        return self.together / self.alone


def together(
    jobs: Sequence[Job], on: Sequence[str] = (), cluster: Cluster | None = None, steps: int = STEPS
) -> tuple[Neighbour, ...]:
    """Play the jobs side by side, each with `steps` steps at least, and each alone.

    on: where each job is, as "nodes 0-3" or "gpus 0,2"; by default one behind the other, each on nodes of its own. cluster: what
    they share; by default what all of them describe, with as many nodes as they have together.
    Raises UserError for jobs that do not fit, or describe different clusters, and for what is not played side by side.
    """
    if len(jobs) < 2:
        raise UserError("together: needs at least two jobs")
    if on and len(on) != len(jobs):
        raise UserError(f"together: --on is given {len(on)} times for {len(jobs)} jobs: give it once for each, or never")
    whole = cluster or shared_cluster(jobs)
    where = list(on) or _behind_each_other(jobs, whole)
    topology = whole.topology()
    placed = [PlacedTopology(topology, gpus_named(text, topology, f"--on '{text}'").tolist()) for text in where]
    _check(jobs, where, placed)
    prices = prices_of(replace(jobs[0], cluster=whole))
    with uncollected():
        programs = [(lower(job.model, job.resolve()), place) for job, place in zip(jobs, placed, strict=True)]
        each = [_Seconds(job, *program, prices) for job, program in zip(jobs, programs, strict=True)]
        played = play_together(programs, prices, steps, lambda number, timeline: each[number].of(timeline))
    result = []
    for job, text, seconds, steps_of, kinds in zip(jobs, where, each, played.steps, played.kinds, strict=True):
        number = seconds.alone.program.steps
        alone = seconds.of(seconds.alone)
        # what shares nothing takes what it takes alone; worked out from blocks that are cut, rounding might say otherwise
        each_step = tuple((step if kinds else alone) / number for step in steps_of)
        result.append(Neighbour(job.name, text, job.cluster.gpus, alone / number, each_step, kinds, seconds.ideal))
    return tuple(result)


class _Seconds:
    """Seconds of a job's steps, as in `strategies.predict`: the expected ones, where GPUs of one kind are not quite alike.
    Of all its steps GPUs are drawn alike, so that they differ by nothing but what was played.
    """

    def __init__(self, job: Job, program: Program, place: PlacedTopology, prices: Prices) -> None:
        self.alone = run(program, place, prices)
        self._variability = variability_of(job, prices)
        self.ideal = not any(self._variability)
        self._samples = 0 if self.ideal else samples_of(replay_of(self.alone).places.count)

    def of(self, timeline: Timeline) -> float:
        """Seconds of all that was played in `timeline`."""
        if self.ideal:
            return timeline.step
        timeline.variability = self._variability
        return timeline.step + waiting(timeline, self._samples).seconds * timeline.program.steps


def shared_cluster(jobs: Sequence[Job], nodes: int | None = None) -> Cluster:
    """The cluster that all jobs describe, with the nodes of all of them, or so many. Raises UserError where they differ."""
    first = jobs[0].cluster
    for job in jobs:
        if isinstance(job.cluster, UnequalCluster):
            raise UserError(f"together: the nodes of {job.name} are not alike: give the cluster that the jobs share")
        if job.cluster.model_copy(update={"nodes": first.nodes}) != first:
            raise UserError(f"together: {jobs[0].name} and {job.name} describe different clusters: give the one that they share")
    fields = {name: getattr(first, name) for name in Cluster.model_fields}  # dict(first) has what is worked out once, too
    return build(Cluster, fields | {"nodes": nodes or sum(job.cluster.nodes for job in jobs)}, "together")


def _behind_each_other(jobs: Sequence[Job], whole: Cluster) -> list[str]:
    """Each job on nodes behind those of the jobs before it."""
    node, first, result = whole.topology().node_of(np.arange(whole.gpus)), 0, []
    for job in jobs:
        last = first + job.cluster.gpus - 1
        if last >= whole.gpus:
            left = f"{max(0, whole.gpus - first)} of {whole.gpus} are left"
            raise UserError(f"together: {job.name} needs {job.cluster.gpus} GPUs, and {left}")
        result.append(f"gpus {first}-{last}")
        first = int(np.searchsorted(node, node[last], side="right"))
    return result


def _check(jobs: Sequence[Job], where: Sequence[str], placed: Sequence[PlacedTopology]) -> None:
    owner: dict[int, str] = {}
    for job in jobs[1:]:
        if job.profile != jobs[0].profile:
            several = f"{jobs[0].name}: {jobs[0].profile or 'of the GPU'}, {job.name}: {job.profile or 'of the GPU'}"
            raise UserError(f"together: profile must be one for all jobs, whose links are one network ({several})")
    for job, text, place in zip(jobs, where, placed, strict=True):
        if place.gpus != job.cluster.gpus:
            raise UserError(f"--on '{text}': {place.gpus} GPUs, and {job.name} is for {job.cluster.gpus}")
        for what, given in (("has effects", bool(job.effects)), ("offloads to CPUs", job.plan.offload is not None)):
            if given:
                raise UserError(f"together: {job.name} {what}, which is not played beside other jobs")
        for gpu in place.whole_gpus:
            if gpu in owner:
                raise UserError(f"--on '{text}': GPU {gpu} belongs to {owner[gpu]} and to {job.name}")
            owner[gpu] = job.name
