"""Pipeline schedules: one file each, a pure generator of the actions of one rank.

A rank holds one or more chunks: virtual stages, which the model's layers pass in order. A schedule's `order(rank, ranks,
microbatches, chunks)` yields the passes in the order in which the rank runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from topologies.reading import UserError
from topologies.registry import Registry


class Action(NamedTuple):
    """One pass of a microbatch through a chunk.

    "F": forward; "B": whole backward; or in two parts, "I": gradient of the input, which the stage before waits for, and "W":
    gradient of the weights, which nobody waits for.
    """

    kind: str
    microbatch: int
    chunk: int = 0


Order = Callable[[int, int, int, int], Iterator[Action]]


@dataclass(frozen=True)
class Schedule:
    """An order, how many chunks it takes (None: any number from 2), and where virtual stage s is.

    "loop": chunk s // ranks of rank s % ranks. "v": the second chunk of a rank comes back: rank 0 has the first and the last.
    """

    order: Order
    chunks: int | None = 1
    placement: Literal["loop", "v"] = "loop"

    def stage(self, rank: int, ranks: int, chunk: int) -> int:
        """The virtual stage of a rank's chunk."""
        if self.placement == "v" and chunk % 2:
            return (chunk + 1) * ranks - 1 - rank
        return chunk * ranks + rank


schedules: Registry[Schedule] = Registry("schedule", package="strategies.schedules")


def schedule(name: str, chunks: int | None = 1, placement: Literal["loop", "v"] = "loop") -> Callable[[Order], Order]:
    """Decorator that registers an order as a schedule."""

    def register(order: Order) -> Order:
        schedules(name)(Schedule(order, chunks, placement))
        return order

    return register


@lru_cache(maxsize=1024)
def actions(name: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> tuple[Action, ...]:
    """A rank's actions by the schedule `name`. Raises UserError when it leaves out, repeats or confuses passes."""
    order = tuple(schedules[name].order(rank, ranks, microbatches, chunks))
    before = {"F": None, "B": "F", "I": "F", "W": "I"}
    done: set[Action] = set()
    for action in order:
        earlier = before.get(action.kind, "unknown")
        ready = earlier is None or action._replace(kind=earlier) in done
        if not ready or action in done or not (0 <= action.microbatch < microbatches and 0 <= action.chunk < chunks):
            raise UserError(f"schedule '{name}': {tuple(action)} on rank {rank} of {ranks} is repeated, too early or unknown")
        done.add(action)
    weights = sum(action.kind in "BW" for action in order)
    if weights != microbatches * chunks:
        raise UserError(f"schedule '{name}': {weights} backward passes on rank {rank} of {ranks} ≠ {microbatches}·{chunks}")
    return order
