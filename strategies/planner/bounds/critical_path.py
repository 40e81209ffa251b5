"""When the passes of a pipeline end when nothing but passes, and sends of their results, takes time: the schedule's own order,
many kinds of plans at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from strategies.plan.resolved import Resolved
from strategies.planner.bounds.layer_cost_table import Floats
from strategies.planner.bounds.layer_layout import Layout
from strategies.schedules import actions
from strategies.schedules.order import Action


class Critical(NamedTuple):
    """Seconds, each of shape (kinds,): when the last pass of any rank and of the first rank ends, at least; and when the first
    rank's last pass that makes gradients of a chunk begins, in that order: shape (chunks, kinds), with the chunks' numbers.
    """

    end: Floats
    first: Floats
    final: Floats
    chunks: tuple[int, ...]


def critical(
    plan: Resolved, layout: Layout, time: dict[str, Floats], sends: Mapping[tuple[str, int], float] | None = None
) -> Critical:
    """The longest paths through the passes of `plan`'s schedule, for each row of `time`'s (kinds, stages).

    sends: seconds in which a stage sends a microbatch's result forward ("F") or back ("B"), one after the other, beside passes.
    """
    orders = [actions(plan.schedule, rank, plan.pp, plan.microbatches, plan.chunks) for rank in range(plan.pp)]
    durations = {"F": time["forward"], "I": time["input"], "W": time["weight"], "B": time["backward"]}
    columns = {kind: [np.ascontiguousarray(table[:, s]) for s in range(table.shape[1])] for kind, table in durations.items()}
    done: dict[tuple[str, int, int], Floats] = {}
    none = np.zeros(len(time["forward"]))
    free = [none for _ in orders]
    sent: dict[tuple[str, int], Floats] = {}  # of each way and rank, when its latest result is there
    place = [0] * len(orders)
    final: dict[int, Floats] = {}
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                action = order[place[rank]]
                stage = layout.stages[rank][action.chunk]
                before = _before(action, stage, layout.last)
                if before is not None and before not in done:
                    break
                start = free[rank] if before is None else np.maximum(free[rank], done[before])
                end = free[rank] = start + columns[action.kind][stage]
                if action.kind != "W":
                    way = "F" if action.kind == "F" else "B"
                    if sends and (seconds := sends.get((way, stage))):
                        end = sent[way, rank] = np.maximum(end, sent.get((way, rank), none)) + seconds
                    done[way, stage, action.microbatch] = end
                if rank == 0 and action.kind in "BW":
                    final.pop(action.chunk, None)
                    final[action.chunk] = start
                place[rank] += 1
                moving = True
    return Critical(np.maximum.reduce(free), free[0], np.array(list(final.values())), tuple(final))


def _before(action: Action, stage: int, last: int) -> tuple[str, int, int] | None:
    """The pass of another stage that an action waits for."""
    if action.kind == "F":
        return ("F", stage - 1, action.microbatch) if stage else None
    if action.kind == "W":
        return None
    return ("B", stage + 1, action.microbatch) if stage < last else None
