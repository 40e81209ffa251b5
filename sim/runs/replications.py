"""Many runs that differ by chance only: how they are seeded, when there are enough of them, and what they say together.

Run i of any alternative has the i-th child of the seed, and draws each kind of thing from a stream of its own: alternatives meet
the same failures and repairs as far as they can (common random numbers), so their difference is known sooner than each of them.
Runs come in batches of fixed size, whoever plays them: same seed, same answer, whatever the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from sim.runs.run import Outcome, Run
from sim.runs.spec import RunSpec

BATCH = 20  # runs after which it is looked whether there are enough
MOST = 200  # runs, where as many are played as are needed
ENOUGH = 0.002  # half of the 95 % confidence interval of the mean goodput
NORMAL = 1.96  # of a 95 % confidence interval
LOW, HIGH = 0.1, 0.9  # ends of an 80 % interval
GOLDEN = (math.sqrt(5) - 1) / 2

Map = Callable[[Callable[[tuple[RunSpec, int, int]], Outcome], Iterable[tuple[RunSpec, int, int]]], Iterable[Outcome]]


def play(task: tuple[RunSpec, int, int]) -> Outcome:
    """Replication `number` of a seed: (spec, seed, number)."""
    return _outcome(*task)


def _outcome(spec: RunSpec, seed: int, number: int, record: bool = False) -> Outcome:
    factor = step_factor(spec, number)
    outcome = Run(spec.with_steps(factor), np.random.SeedSequence(seed, spawn_key=(number,)), record).outcome()
    return replace(outcome, step_factor=factor)


def step_factor(spec: RunSpec, number: int) -> float:
    """By which the steps of replication `number` are longer. Replications are spread evenly over the distribution (an additive
    recurrence by the golden ratio) and not drawn, so that few of them have its tails; the first two are at the median, and every
    two are as far below as above it, so that their mean does not depend on how many there are.
    """
    pair, below = divmod(number, 2)
    normal = NormalDist().inv_cdf((1.0 + pair * GOLDEN % 1.0) / 2.0)
    return math.exp(-normal * spec.faster if below else normal * spec.slower)


def recorded(spec: RunSpec, seed: int = 0, number: int = 0) -> Outcome:
    """A replication with its timeline."""
    return _outcome(spec, seed, number, record=True)


def replicate(spec: RunSpec, seed: int = 0, count: int | None = None, each: Map = map) -> list[Outcome]:
    """`count` runs, or (None) batches until the mean goodput is known within ±`ENOUGH` with 95 % confidence. each: as
    `map`.
    """
    outcomes: list[Outcome] = []
    most = MOST if count is None else count
    while len(outcomes) < most:
        numbers = range(len(outcomes), min(most, len(outcomes) + BATCH))
        outcomes += each(play, [(spec, seed, number) for number in numbers])
        if count is None and half_width([outcome.goodput for outcome in outcomes]) <= ENOUGH:
            break
    return outcomes


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean."""
    if len(values) < 2:
        return math.inf
    return NORMAL * float(np.std(values, ddof=1)) / math.sqrt(len(values))


@dataclass(frozen=True)
class Estimate:
    """A quantity over all runs: its mean, the median and the interval that 80 % of runs are in."""

    mean: float
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Of one value per run."""
        low, median, high = np.quantile(values, [LOW, 0.5, HIGH]).tolist()
        return cls(math.fsum(values) / len(values), median, low, high)
