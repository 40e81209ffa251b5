"""How far workers come apart that do the same work: those of a stage on several dp ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from calibration.stragglers.replay import Replay
from calibration.stragglers.trace import BACKWARD, FORWARD, Booleans, Trace
from sim.replay.graph import Floats, Integers

STRAGGLER = 0.1  # a worker whose ops take so much longer or shorter than the middle one's is left out


class Spread(NamedTuple):
    """workers: standard deviation of the logarithm of their mean seconds for one kind of op (op type, stage and chunk); ops: of a
    single op around its worker's mean. cost: by which part a step without stragglers is longer when workers differ as they do
    in the mean; cost_of_ops: when each op lasts as it did. Workers that are stragglers count in none of these.
    """

    workers: float
    ops: float
    cost: float
    cost_of_ops: float


def spread(trace: Trace, replay: Replay) -> Spread | None:
    """The spread of passes; None where no two workers have the same work. Communication lasts as in a job without stragglers."""
    rows = np.flatnonzero(trace.is_type(FORWARD, BACKWARD) & (replay.own > 0))
    kind = _numbered(trace.op_type[rows], trace.stage[rows], trace.chunk[rows])
    own = replay.own[rows]
    mine, worker_of = _mean_of_each(kind * len(trace.dp_ranks) + trace.dp_rank[rows], own)
    kinds = np.zeros(len(mine), np.int64)
    kinds[worker_of] = kind
    middle = _of_each(kinds, mine, np.median)
    kept: Booleans = np.abs(mine / middle - 1) <= STRAGGLER
    compared = np.bincount(kinds[kept])
    freedom = int((compared - (compared > 0)).sum())
    if not freedom:
        return None
    middle[kept] = _of_each(kinds[kept], mine[kept], np.mean)
    usual, alike = kept[worker_of], replay.ideal.copy()
    alike[rows] = middle[worker_of]
    different, single = alike.copy(), alike.copy()
    different[rows[usual]] = mine[worker_of][usual]
    single[rows[usual]] = own[usual]
    base = float(replay.steps(alike).mean())
    off, around = np.log(mine / middle)[kept], np.log(own / mine[worker_of])[usual]
    return Spread(
        float(np.sqrt((off**2).sum() / freedom)),
        float(np.sqrt((around**2).mean())),
        float(replay.steps(different).mean()) / base - 1,
        float(replay.steps(single).mean()) / base - 1,
    )


def _numbered(*columns: Integers) -> Integers:
    """A number from 0 on for each different row."""
    result: Integers = np.unique(np.stack(columns), axis=1, return_inverse=True)[1].ravel()
    return result


def _mean_of_each(number: Integers, values: Floats) -> tuple[Floats, Integers]:
    """Means of values with one number, and by value which of them is its own."""
    _, place = np.unique(number, return_inverse=True)
    return np.bincount(place, values) / np.bincount(place), place


def _of_each(number: Integers, values: Floats, of: Callable[[Floats], Any]) -> Floats:
    """By value, `of` all values with its number."""
    result = np.empty(len(values))
    for each in np.unique(number):
        result[number == each] = of(values[number == each])
    return result
