"""A job with parameter servers: where workers and servers are, and what a step costs them.

A worker is one GPU with the whole model. Each server holds an equal part of the model beside one GPU of the last nodes, which
updates it; workers are all GPUs of the other nodes. Gradients and parameters travel as the plan's types.

Links that all workers use are shared max-min fairly; of links that only some use (a NIC of several GPUs, a leaf's uplink) each
worker has its share as if all were sending: exact for synchronous steps and wherever workers have a NIC each.
Embedding tables beside the model are in `strategies.lowering.embeddings`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sim.analysis.breakdown import breakdown
from sim.analysis.summary import summarise
from sim.engine.parameter_servers import Played, Setting, play
from sim.engine.player import run
from sim.pricing.prices import Prices
from strategies.job import Job
from strategies.lowering.embeddings import Embeddings, Traffic, with_embeddings
from strategies.lowering.lower import lower
from strategies.plan.resolved import Resolved
from topologies.links.topology import Ids, Topology
from topologies.reading import UserError

MOST = 1_000_000  # steps of all workers that are played


@dataclass(frozen=True)
class Answer:
    """Bytes, seconds, tokens. most: gradients per second that the servers' links and updates let through."""

    servers: int
    bound: int | None
    setting: Setting
    played: Played
    steps: int
    tokens_per_second: float
    most: float
    worker_memory: float  # peak
    server_memory: float
    memory_capacity: float
    embeddings: Embeddings | None = None  # tables on the servers
    sparse: Traffic | None = None  # what of a worker's step is theirs
    sequence: int = 0  # tokens of a sample; 1 where it is no sequence

    @property
    def fits(self) -> bool:
        """Whether workers and servers have the memory that they need."""
        return max(self.worker_memory, self.server_memory) <= self.memory_capacity

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        hidden = {"sequence"} if self.embeddings else {"embeddings", "sparse", "sequence"}
        sparse = {"sparse": self.sparse._asdict()} if self.sparse else {}
        return {key: value for key, value in (asdict(self) | sparse).items() if key not in hidden} | {"fits": self.fits}


def parameter_servers(
    job: Job,
    prices: Prices,
    servers: int,
    staleness: str = "sync",
    steps: int = 100,
    jitter: float = 0.0,
    seed: int = 0,
    embeddings: Embeddings | None = None,
) -> Answer:
    """Play `steps` steps of every worker. staleness: "sync", "async", or by how many steps workers may run ahead. embeddings:
    tables that servers hold beside the job's model.
    """
    bound = bound_of(staleness)
    workers = _workers(job, servers, steps, jitter)
    if seed < 0:
        raise UserError(f"--seed {seed}: must be at least 0")
    topology = job.cluster.topology()
    alone, samples, tokens, memory = _alone(job, prices, workers)
    sparse, tables = None, 0.0
    if embeddings is not None:
        alone = with_embeddings(replace(alone, workers=workers), embeddings, samples, prices, bound)
        sparse, tables = embeddings.traffic(samples), embeddings.held
        memory += embeddings.buffers(samples)
    places = np.arange(workers), job.cluster.gpus - servers + np.arange(servers)
    into, out = (_links(topology, prices, *places, back) for back in (False, True))
    setting = replace(
        alone,
        workers=workers,
        into=into.shared,
        out=out.shared,
        worker=min(into.own, out.own),
        latency=max(into.latency, out.latency),
        update=alone.update / servers,
    )
    played = play(setting, steps, bound, jitter, seed)
    context, states = prices.profile.overhead.context, job.model.parameters * sum(job.plan.bytes_of_states.values())
    return Answer(
        servers,
        bound,
        setting,
        played,
        steps,
        tokens * played.gradients_per_second,
        most(setting, bound),
        memory,
        context + (states + tables) / servers,
        prices.gpu.memory,
        embeddings,
        sparse,
        job.plan.sequence_of(job.model),
    )


def most(setting: Setting, bound: int | None) -> float:
    """Gradients per second of any number of workers: links are duplex, but in a synchronous step pushes and pulls take turns."""
    push, pull = setting.gradient / setting.into, setting.parameters / setting.out
    return 1 / (push + pull) if bound == 0 else 1 / max(push, pull, setting.update)


def bound_of(staleness: str) -> int | None:
    """How many steps workers may run ahead of the slowest: none when "sync", any number (None) when "async". Raises UserError."""
    if staleness in ("sync", "async"):
        return 0 if staleness == "sync" else None
    if not staleness.isdecimal():
        raise UserError(f"--staleness {staleness}: expected sync, async or a number of steps")
    return int(staleness)


def _workers(job: Job, servers: int, steps: int, jitter: float) -> int:
    """How many GPUs work; UserError for what makes no sense."""
    cluster, plan = job.cluster, job.plan
    for name, value in (("servers", servers), ("steps", steps)):
        if value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if not 0 <= jitter < float("inf"):
        raise UserError(f"--jitter {jitter}: must be a number of at least 0")
    nodes = -(-servers // cluster.node.gpus)
    if nodes >= cluster.nodes:
        raise UserError(f"--servers {servers}: take {nodes} of {cluster.nodes} nodes and leave no workers; give more --nodes")
    for name, degree in (("tp", plan.tp), ("pp", plan.pp)):
        if degree > 1:
            raise UserError(f"{job.where}: {name}={degree}: a worker of parameter servers is one GPU with the whole model")
    if plan.data_parallel != "ddp":
        raise UserError(f"{job.where}: data_parallel={plan.data_parallel}: parameter servers are in its place")
    for name, there in (("lora", plan.lora), ("freeze", plan.freeze), ("outside_optimizer", plan.outside_optimizer)):
        if there:
            raise UserError(f"{job.where}: {name}: parameter servers hold and update all parameters")
    workers = (cluster.nodes - nodes) * cluster.node.gpus
    if workers * steps > MOST:
        raise UserError(f"--steps {steps}: {workers} workers · {steps} steps are too many to play (at most {MOST:,})")
    return workers


def _alone(job: Job, prices: Prices, workers: int) -> tuple[Setting, int, int, float]:
    """What one worker does between pull and push, its samples and tokens, its peak memory: a step on one GPU less its update."""
    nodes = workers // job.cluster.node.gpus
    common = replace(job, cluster=job.cluster.model_copy(update={"nodes": nodes})).resolve()
    changes = {"dp": 1, "global_batch": None, "accumulation": common.microbatches}
    plan = Resolved.of(job.plan.model_copy(update=changes), job.model, 1, job.where)
    timeline = run(lower(job.model, plan), job.cluster.topology(), prices)
    update, parameters = breakdown(timeline)["optimizer"], job.model.parameters
    memory = summarise(timeline).worst.peak - parameters * job.plan.bytes_per_optimizer_state
    gradient, weights = parameters * job.plan.bytes_per_gradient, parameters * job.plan.bytes_per_element
    setting = Setting(1, timeline.step - update, gradient, weights, 1.0, 1.0, 1.0, update=update)
    return setting, plan.global_batch, plan.global_batch * plan.sequence, memory


class _Links(NamedTuple):
    """Bytes of models per second: of what all workers share, of one worker at most; seconds of a message."""

    shared: float
    own: float
    latency: float


def _links(topology: Topology, prices: Prices, workers: Ids, servers: Ids, back: bool) -> _Links:
    """Between every worker and every server, one n-th of the model each; back: from the servers."""
    ends = np.repeat(workers, len(servers)), np.tile(servers, len(workers))
    routes = topology.routes(*(ends[::-1] if back else ends)).reshape(len(workers), -1)
    links = np.unique(routes[routes >= 0])
    kinds = [topology.kinds[kind] for kind in topology.kind(links)]
    capacity = topology.capacity(links) * np.array([prices.profile.links[kind].efficiency for kind in kinds])
    flows = np.bincount(np.searchsorted(links, routes[routes >= 0]), minlength=len(links))
    pairs = np.unique(np.stack([np.nonzero(routes >= 0)[0], routes[routes >= 0]]), axis=1)  # (worker, link), each once
    users = np.bincount(np.searchsorted(links, pairs[1]), minlength=len(links))
    each = len(servers) * capacity / flows  # bytes of the model per second and worker when all send
    common = users == len(workers)
    shared = float(len(workers) * each[common].min(initial=each.max()))  # of no common link: their own are what limits
    own = float(each[~common].min(initial=shared))
    paths = routes.reshape(len(workers) * len(servers), -1)
    used = paths >= 0
    wire = np.where(used, topology.latency(np.maximum(paths, 0)), 0.0).sum(axis=1).max()
    outermost = max(kinds, key=topology.kinds.index)
    return _Links(shared, own, float(wire) + prices.profile.links[outermost].latency)
