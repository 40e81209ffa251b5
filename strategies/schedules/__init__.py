"""Pipeline schedules: one file each, a pure generator of the actions of one stage.

`actions(stage, stages, microbatches)` yields `Action("F"|"B", microbatch)` in the order in which the stage runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from topologies.registry import Registry


class Action(NamedTuple):
    """One forward ("F") or full backward ("B") pass of a microbatch through a stage."""

    kind: str
    microbatch: int


Schedule = Callable[[int, int, int], Iterator[Action]]
schedules: Registry[Schedule] = Registry("schedule", package="strategies.schedules")
