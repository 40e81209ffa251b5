"""Pipeline schedules: one file each, a pure generator of the actions of one stage.

`actions(stage, stages, microbatches)` yields `Action("F"|"B", microbatch)` in the order in which the stage runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from topologies.reading import UserError
from topologies.registry import Registry


class Action(NamedTuple):
    """One forward ("F") or full backward ("B") pass of a microbatch through a stage."""

    kind: str
    microbatch: int


Schedule = Callable[[int, int, int], Iterator[Action]]
schedules: Registry[Schedule] = Registry("schedule", package="strategies.schedules")


@lru_cache(maxsize=1024)
def actions(name: str, stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """A stage's actions by the schedule `name`. Raises UserError when it leaves out, repeats or confuses passes."""
    order = tuple(schedules[name](stage, stages, microbatches))
    done: set[Action] = set()
    for action in order:
        ready = action.kind == "F" or (action.kind == "B" and ("F", action.microbatch) in done)
        if not ready or action in done or not 0 <= action.microbatch < microbatches:
            raise UserError(f"schedule '{name}': {tuple(action)} on stage {stage} of {stages} is repeated, too early or unknown")
        done.add(action)
    if len(order) != 2 * microbatches:
        raise UserError(
            f"schedule '{name}': {len(order)} passes on stage {stage} of {stages} ≠ 2·microbatches = {2 * microbatches}"
        )
    return order
