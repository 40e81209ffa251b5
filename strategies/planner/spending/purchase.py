"""One purchase against another: a job on several clusters, each at its own best plan, with failures and checkpoints.

All train on the same tokens with the same global batch. Dollars are linear in the price of a GPU-hour, so the price at which an
offer costs as much as another follows by division; the nodes that it takes to be as quick are found by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sim.analysis.summary import Summary
from strategies.job import Job
from strategies.planner.replanned import Tell, replanned, silent
from strategies.planner.search.workers.executors import Engine
from strategies.planner.uncertainty import with_interval
from strategies.resilience.runs import RunAnswer, run_training
from topologies.cluster import UnequalCluster
from topologies.costs import Cost, mean_rates
from topologies.reading import UserError

ROUNDS = 4  # sizes that are tried to be as quick as another offer


@dataclass(frozen=True)
class Offer:
    """What may be bought: its name, the job on it (of any plan), dollars of a GPU-hour (None: a listed price), the cluster as it
    was asked for: a name or a file ("": by its name).
    """

    name: str
    job: Job
    price: float | None = None
    cluster: str = ""


@dataclass(frozen=True)
class Bought:
    """An offer at its best plan: the step with its interval, and the training over days; refused: why there is none."""

    offer: Offer
    job: Job
    summary: Summary | None = None
    run: RunAnswer | None = None
    training: Cost | None = None  # failures included
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether it trains at all."""
        return self.training is not None


@dataclass(frozen=True)
class Crossover:
    """When `offer` is as good as `other`: dollars of a GPU-hour at which it costs as much (None: a price is missing); nodes with
    which it is as quick (None: no size that was tried), and days and dollars then.
    """

    offer: str
    other: str
    price: float | None
    nodes: int | None
    days: float | None
    usd: float | None


def same_batch(offers: Sequence[Offer], said: bool) -> list[Offer]:
    """Offers with one global batch: what was said, or the largest of their defaults."""
    if said:
        return list(offers)
    batch = max(offer.job.global_batch for offer in offers)
    remark = f"global_batch: {batch:,} sequences for all offers, the largest of their defaults; plan.global_batch says otherwise"
    return [replace(offer, job=_with_batch(offer.job, batch, remark)) for offer in offers]


def buy(offers: Sequence[Offer], tokens: float, engine: Engine, seed: int = 0, tell: Tell = silent) -> list[Bought]:
    """Each offer at its best plan until `tokens` tokens are trained on; all meet the same failures. tell: hears how far it is."""
    best = replanned([(offer.job, frozenset()) for offer in offers], engine, tell)
    tell("playing runs")
    return [_bought(offer, job, outcome, tokens, engine, seed) for offer, (job, outcome) in zip(offers, best, strict=True)]


def _bought(offer: Offer, job: Job, outcome: Summary | str, tokens: float, engine: Engine, seed: int) -> Bought:
    if isinstance(outcome, str):
        return Bought(offer, job, refused=outcome)
    outcome = with_interval(job, outcome)
    if not outcome.fits:
        return Bought(offer, job, outcome, refused="no plan that was tried fits its memory")
    money = mean_rates(job.cluster, offer.price)
    try:
        answer = run_training(job, outcome, tokens, money, seed, engine.map)
    except UserError as error:
        return Bought(offer, job, outcome, refused=str(error))
    return Bought(offer, job, outcome, answer, answer.cost(money))


def crossovers(every: Sequence[Bought], tokens: float, engine: Engine) -> Iterator[Crossover]:
    """Each that trains against the quickest and against the cheapest one."""
    able = [each for each in every if each.training is not None]
    if len(able) < 2:
        return
    quickest, cheapest = min(able, key=_seconds), min(able, key=_dollars)
    for each in able:
        others = {other.offer.name: other for other in (quickest, cheapest) if other is not each}
        for other in others.values():
            yield _crossover(each, other, tokens, engine)


def _seconds(each: Bought) -> float:
    assert each.training is not None
    return each.training.seconds


def _dollars(each: Bought) -> float:
    assert each.training is not None
    return math.inf if each.training.usd is None else each.training.usd


def _crossover(mine: Bought, other: Bought, tokens: float, engine: Engine) -> Crossover:
    assert mine.training is not None
    assert other.training is not None
    price = None if other.training.usd is None else other.training.usd / mine.training.gpu_hours
    names = mine.offer.name, other.offer.name
    if mine.training.seconds <= other.training.seconds or isinstance(mine.job.cluster, UnequalCluster):
        return Crossover(*names, price, None, None, None)
    overhead = mine.training.seconds / _ideal(mine.job, mine.summary, tokens)  # failures and checkpoints, taken as they are
    nodes, seconds = mine.job.cluster.nodes, mine.training.seconds
    for _ in range(ROUNDS):
        nodes = _divided(max(nodes + 1, math.ceil(nodes * seconds / other.training.seconds)), mine.job)
        larger = replace(mine.offer.job, cluster=mine.job.cluster.model_copy(update={"nodes": nodes}))
        ((best, outcome),) = replanned([(larger, frozenset())], engine)
        if isinstance(outcome, str) or not outcome.fits:
            continue
        seconds = _ideal(best, outcome, tokens) * overhead
        if seconds <= other.training.seconds:
            rate = mean_rates(best.cluster, mine.offer.price).usd
            usd = None if rate is None else seconds / 3600 * best.cluster.gpus * rate * _spare(mine)
            return Crossover(*names, price, nodes, seconds / 86400, usd)
    return Crossover(*names, price, None, None, None)


def _divided(nodes: int, job: Job) -> int:
    """The next number of nodes over which dp ranks can share the batch: the odd part of its GPUs divides it."""
    batch, each = job.global_batch, job.cluster.gpus_per_node
    for more in range(nodes, 2 * nodes):
        gpus = more * each
        if batch % (gpus // (gpus & -gpus)) == 0:
            return more
    return 2 * nodes


def _ideal(job: Job, summary: Summary | None, tokens: float) -> float:
    """Seconds of the training without a failure."""
    assert summary is not None
    return tokens / summary.tokens_per_second


def _spare(each: Bought) -> float:
    """GPU-hours that are paid for by those that train."""
    assert each.training is not None
    return each.training.gpu_hours * 3600 / (each.training.seconds * each.job.cluster.gpus)


def _with_batch(job: Job, batch: int, remark: str) -> Job:
    remarks = [each for each in job.remarks if not each.startswith("global_batch: ")]
    return replace(job, plan=job.plan.model_copy(update={"global_batch": batch}), remarks=(*remarks, remark))
