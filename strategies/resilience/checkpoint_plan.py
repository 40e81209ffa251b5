"""A job's checkpoint under each policy: what it costs, how often to save, and what bandwidth would be enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strategies.job import Job
from strategies.resilience.checkpointing import SaveCosts, policies
from strategies.resilience.intervals import intervals
from strategies.resilience.run_spec import Prepared, prepare
from strategies.resilience.settings import RunSettings
from topologies.reading import UserError

TARGETS = (0.01, 0.02, 0.05)  # parts of the time that saves and lost work may take


@dataclass(frozen=True)
class PolicyCost:
    """One policy. blocking, flush, restore: seconds in its first place; interval: seconds of training between saves by each rule;
    waste: part of the time that saves and lost work take at the job's own rule; refused: why the job cannot have it.
    """

    policy: str
    place: str = ""
    blocking: float = 0.0
    flush: float = 0.0
    restore: float = 0.0
    intervals: dict[str, float] | None = None
    waste: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class CheckpointPlan:
    """bandwidth: bytes per second of shared storage that keep saves and lost work within parts of the time, by how GPUs wait for
    them: (part, synchronous, asynchronous).
    """

    prepared: Prepared
    policies: tuple[PolicyCost, ...]
    bandwidth: tuple[tuple[float, float, float], ...]


def checkpoint_plan(job: Job, settings: RunSettings) -> CheckpointPlan:
    """Work out every policy that the cluster can have."""
    prepared = prepare(job, settings, days=1.0)
    every = tuple(_policy(name, prepared) for name in policies)
    return CheckpointPlan(prepared, every, _bandwidth(prepared) if prepared.mtbf < math.inf else ())


def _policy(name: str, prepared: Prepared) -> PolicyCost:
    costs, mtbf = prepared.costs, prepared.mtbf
    try:
        first = policies[name](costs)[0]
    except UserError as error:
        return PolicyCost(name, refused=str(error))
    between = {rule: max(first.flush, intervals[rule](first.blocking, mtbf, prepared.restart)) for rule in intervals}
    interval = prepared.settings.checkpoint.interval
    rule = interval if isinstance(interval, str) and interval in between else "daly"
    waste = expected_waste(between[rule], first.blocking, first.flush, mtbf)
    return PolicyCost(name, first.name, first.blocking, first.flush, first.restore, between, waste)


def expected_waste(interval: float, blocking: float, flush: float, mtbf: float) -> float:
    """The part of the time that saves take, and work done since the last complete one when a failure comes, to first order."""
    if interval == math.inf or mtbf == math.inf:
        return 0.0
    return min(1.0, blocking / (interval + blocking) + (flush + (interval + blocking) / 2) / mtbf)


def _bandwidth(prepared: Prepared) -> tuple[tuple[float, float, float], ...]:
    """By Young when GPUs wait: a part √(2·δ/MTBF) of the time is lost, with δ = bytes / bandwidth. When they do not, an interval
    is no shorter than the flush, and both the flush and half of the interval are lost.
    """
    size, costs, mtbf = prepared.size.total, prepared.costs, prepared.mtbf
    return tuple((target, size / (target**2 * mtbf / 2), _asynchronous(target, size, costs, mtbf)) for target in TARGETS)


def _asynchronous(target: float, size: float, costs: SaveCosts, mtbf: float) -> float:
    """Bytes per second so that saving as often as flushes allow, or as Young says, wastes no more than `target`."""
    low, high = size / (10 * mtbf), 1e18
    for _ in range(200):
        middle = math.sqrt(low * high)
        flush = size / middle
        interval = max(flush, math.sqrt(2 * costs.snapshot * mtbf))
        if expected_waste(interval, costs.snapshot, flush, mtbf) > target:
            low = middle
        else:
            high = middle
    return high if high < 1e17 else math.inf
