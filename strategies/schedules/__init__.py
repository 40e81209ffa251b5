"""Pipeline schedules: one file each, a pure generator of the actions of one rank.

A rank holds one or more chunks: virtual stages, which the model's layers pass in order. A schedule's `order(rank, ranks,
microbatches, chunks)` yields the passes in the order in which the rank runs them. A name that ends in .csv is a file of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from sim.analysis.repetition import PassesOfPeriod
from strategies.schedules.order import KINDS, Action, Order, OrderColumns, Schedule, first_mistake
from strategies.schedules.schedule_csv import read_schedule
from topologies.reading import UserError
from topologies.registry import Registry


class _Schedules(Registry[Schedule]):
    """Schedules by name, or by the path of a CSV file."""

    def __getitem__(self, name: str) -> Schedule:
        if not name.endswith(".csv"):
            return super().__getitem__(name)
        return read_schedule(name)


schedules = _Schedules("schedule", package="strategies.schedules")


def schedule(
    name: str, chunks: int | None = 1, placement: Literal["loop", "v", "mirror"] = "loop", **more: Any
) -> Callable[[Order], Order]:
    """Decorator that registers an order as a schedule."""

    def register(order: Order) -> Order:
        schedules(name)(Schedule(order, chunks, placement, **more))
        return order

    return register


def actions(name: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> tuple[Action, ...]:
    """A rank's actions by the schedule `name`. Raises UserError when it leaves out, repeats or confuses passes."""
    return _actions(schedules[name], name, rank, ranks, microbatches, chunks)


@lru_cache(maxsize=1024)
def _actions(schedule: Schedule, name: str, rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    return _checked(schedule, name, rank, ranks, microbatches, chunks)[0]


def order_columns(name: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> OrderColumns:
    """A rank's actions as columns. Raises UserError as `actions` does."""
    return _columns(schedules[name], name, rank, ranks, microbatches, chunks)


@lru_cache(maxsize=4096)
def _columns(schedule: Schedule, name: str, rank: int, ranks: int, microbatches: int, chunks: int) -> OrderColumns:
    return _checked(schedule, name, rank, ranks, microbatches, chunks)[1]


def _checked(
    schedule: Schedule, name: str, rank: int, ranks: int, microbatches: int, chunks: int
) -> tuple[tuple[Action, ...], OrderColumns]:
    order = tuple(schedule.order(rank, ranks, microbatches, chunks))
    columns = OrderColumns.of(order)
    plain = columns is not None and columns.is_plain(microbatches, chunks)
    wrong = None if plain else first_mistake(order, microbatches, chunks)
    if wrong is not None:
        raise UserError(f"schedule '{name}': {tuple(order[wrong])} on rank {rank} of {ranks} is repeated, too early or unknown")
    assert columns is not None
    weights = int(np.isin(columns.kind, (KINDS["B"], KINDS["W"])).sum())
    if weights * schedule.copies != microbatches * chunks:
        raise UserError(
            f"schedule '{name}': {weights} backward passes on rank {rank} of {ranks} ≠ {microbatches}·{chunks // schedule.copies}"
        )
    return order, columns


@lru_cache(maxsize=1024)
def passes_of_period(name: str, ranks: int, microbatches: int, chunks: int, period: int) -> tuple[PassesOfPeriod, ...] | None:
    """By rank, how the passes of a period of microbatches more repeat what it does before; None where they do something else."""
    result = []
    for rank in range(ranks):
        both = (order_columns(name, rank, ranks, count, chunks) for count in (microbatches, microbatches + period))
        short, long = ((each.kind * chunks + each.chunk) * 2 + each.beside for each in both)
        more = len(long) - len(short)
        end = int(np.append(np.flatnonzero(short != long[: len(short)]), len(short))[0])
        last = long[max(0, end - more) : end]
        if 2 * more > end or not np.array_equal(long[end : end + more], last):
            return None
        if not np.array_equal(long[end - 2 * more : end - more], last) or not np.array_equal(long[end + more :], short[end:]):
            return None
        result.append(PassesOfPeriod(more, end))
    return tuple(result)
