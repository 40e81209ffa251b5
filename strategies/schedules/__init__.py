"""Pipeline schedules: one file each, a pure generator of the actions of one rank.

A rank holds one or more chunks: virtual stages, which the model's layers pass in order. A schedule's `order(rank, ranks,
microbatches, chunks)` yields the passes in the order in which the rank runs them. A name that ends in .csv is a file of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from strategies.schedules.order import Action, Order, Schedule, first_mistake
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
    order = tuple(schedule.order(rank, ranks, microbatches, chunks))
    wrong = first_mistake(order, microbatches, chunks)
    if wrong is not None:
        raise UserError(f"schedule '{name}': {tuple(order[wrong])} on rank {rank} of {ranks} is repeated, too early or unknown")
    weights = sum(action.kind in "BW" for action in order)
    if weights * schedule.copies != microbatches * chunks:
        raise UserError(
            f"schedule '{name}': {weights} backward passes on rank {rank} of {ranks} ≠ {microbatches}·{chunks // schedule.copies}"
        )
    return order
