"""Where the time of a step goes: seconds by component on each lane, which add up to the step exactly."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.op_index import op_index
from sim.pricing.block_costs import BlockCost
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import CPU, Collective, Op, Ref
from sim.timeline import Timeline

AXES = ("tp", "cp", "ep", "dp", "replica", "pp", "host", "nvme", CPU)  # by priority in explaining an idle moment
PHASES = ("forward", "backward", "recompute", "optimizer")
EXPOSED = tuple(f"{axis} exposed" for axis in AXES)
IDLE = ("bubble", "wait", "launch")  # components in which compute is idle, besides exposed communication
COMPONENTS = (*PHASES, *EXPOSED, "launch", "slowdown", "bubble", "wait")

Transfer = tuple[float, float, int]  # start, end, index of the axis in AXES
Columns = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]  # of transfers


def breakdowns(timeline: Timeline) -> list[dict[str, float]]:
    """Per lane: seconds by component of COMPONENTS, and by effect; they add up to the step exactly."""
    incoming = _incoming(timeline)
    effects = sorted({name for owed in timeline.owed.values() for name in owed})
    return [_breakdown(timeline, lane, incoming[lane], effects) for lane in range(len(timeline.lanes))]


def breakdown(timeline: Timeline) -> dict[str, float]:
    """Seconds by component, mean over all ranks."""
    return mean_breakdown(timeline, breakdowns(timeline))


def mean_breakdown(timeline: Timeline, per_lane: list[dict[str, float]]) -> dict[str, float]:
    """Mean over all ranks of `per_lane` (see `breakdowns`), in seconds; the largest component takes the rounding, so that the sum
    is the step.
    """
    world = sum(lane.ranks for lane in timeline.lanes)
    pairs = list(zip(timeline.lanes, per_lane, strict=True))
    mean = {name: sum(lane.ranks * parts[name] for lane, parts in pairs) / world for name in per_lane[0]}
    largest = max(mean, key=lambda name: mean[name])
    mean[largest] += timeline.step - sum(mean.values())
    return mean


def idle_seconds(parts: dict[str, float]) -> float:
    """Seconds of a lane's breakdown in which compute is idle."""
    return sum(seconds for name, seconds in parts.items() if name in IDLE or name.endswith(" exposed"))


def busy_seconds(timeline: Timeline, per_lane: list[dict[str, float]]) -> list[float]:
    """By pipeline stage: seconds in which a rank's compute stream does not wait for other stages, mean over its ranks.

    per_lane: see `breakdowns`.
    """
    total: dict[int, list[float]] = {}
    for number, (lane, parts) in enumerate(zip(timeline.lanes, per_lane, strict=True)):
        spent = sum(seconds for name, seconds in parts.items() if name not in ("bubble", "pp exposed", "wait"))
        sums = total.setdefault(timeline.stage(number), [0.0, 0.0])
        sums[0] += lane.ranks * spent
        sums[1] += lane.ranks
    return [total[stage][0] / total[stage][1] for stage in sorted(total)]


def _incoming(timeline: Timeline) -> list[list[Transfer]]:
    """Per lane, sorted: the transfers that its compute stream may wait for, its collectives and what is sent to it."""
    found: list[list[Columns]] = [[] for _ in timeline.lanes]
    first: dict[int, int] = {}  # by cohort
    for number, lane in enumerate(timeline.lanes):
        first.setdefault(lane.cohort, number)
    for number, lane in enumerate(timeline.lanes):
        for axis, to, ops in op_index(timeline.cohort(number)).transfers:
            target = number if to is None else first[to] + number - first[lane.cohort]
            place = timeline.offset[number] + ops
            axes = np.full(len(ops), AXES.index(axis))
            found[target].append((timeline.starts[place], timeline.ends[place], axes))
    return [_sorted(columns) for columns in found]


def _sorted(columns: list[Columns]) -> list[Transfer]:
    if not columns:
        return []
    start, end, axis = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.lexsort((axis, end, start))
    return list(zip(start[order].tolist(), end[order].tolist(), axis[order].tolist(), strict=True))


def _breakdown(timeline: Timeline, lane: int, incoming: list[Transfer], effects: list[str]) -> dict[str, float]:
    parts = dict.fromkeys((*COMPONENTS, *effects), 0.0)
    begin, index, base = timeline.begin(lane), op_index(timeline.cohort(lane)), timeline.offset[lane]
    numbers = base + index.compute
    start, end, counts = timeline.starts[numbers], timeline.ends[numbers], timeline.counts[numbers]
    idle_since = np.concatenate([[begin], end[:-1]]) if len(end) else end
    finish, next_transfer = begin + timeline.played, 0
    gaps = np.flatnonzero(start > idle_since)
    ops = timeline.cohort(lane).ops
    columns = (column[gaps].tolist() for column in (index.compute, idle_since, start, counts))
    for gap, cursor, until, times in zip(*columns, strict=True):
        hosted, idle = _cause_of_idle(timeline, base + gap, ops[gap], lane)
        if hosted > cursor:
            next_transfer = _explain(parts, cursor, min(hosted, until), incoming, next_transfer, "launch", times)
        if until > max(cursor, hosted):
            next_transfer = _explain(parts, max(cursor, hosted), until, incoming, next_transfer, idle, times)
    last = float(end[-1]) if len(end) else begin
    if finish > last:
        end_of_all = "bubble" if timeline.program.grid.degree("pp") > 1 else "wait"
        _explain(parts, last, finish, incoming, next_transfer, end_of_all)
    busy, priced = float((end - start) @ counts), 0.0
    for number, _, same in index.works:
        cost = timeline.cost[base + number]
        if isinstance(cost, BlockCost):
            times = float(timeline.counts[base + same].sum())
            priced += times * cost.busy
            for (name, _), seconds in cost.parts.items():
                parts[name if name in COMPONENTS else f"{name} exposed"] += times * seconds
    for axis, same in index.inline.items():
        place = base + same
        seconds = float((timeline.ends[place] - timeline.starts[place]) @ timeline.counts[place])
        parts[f"{axis} exposed"] += seconds
        busy -= seconds
    slowed = float(timeline.stretches[numbers] @ counts)
    for number, times in zip(numbers.tolist(), counts.tolist(), strict=True) if effects else ():
        for effect, seconds in timeline.owed.get(number, {}).items():
            parts[effect] += times * seconds
            busy -= times * seconds
    parts["slowdown"] += slowed
    parts["launch"] += busy - slowed - priced
    return parts


def _cause_of_idle(timeline: Timeline, number: int, op: Op, lane: int) -> tuple[float, str]:
    """Why compute was idle before an op: until when what it waits for could not begin because the host had not launched it; the
    component of the rest.
    """
    cohort, base = timeline.lanes[lane].cohort, timeline.offset[lane]
    hosted, between_stages = _hosted(timeline, number), False
    for ref in op.after:
        if ref.cohort != cohort:
            between_stages = True
            continue
        between_stages = between_stages or _joins_stages(timeline, ref)
        hosted = max(hosted, _hosted(timeline, base + ref.op))
    return hosted, "bubble" if between_stages else "wait"


def _hosted(timeline: Timeline, number: int) -> float:
    """When a transfer was launched, if it began just then; 0 if it would have begun no earlier with a faster host."""
    launched = timeline.launched[number]
    return launched if isinstance(timeline.cost[number], TransferCost) and launched == timeline.start[number] else 0.0


def _joins_stages(timeline: Timeline, ref: Ref) -> bool:
    """Whether an op is a collective between two stages."""
    work = timeline.program.cohorts[ref.cohort].ops[ref.op].work
    return isinstance(work, Collective) and work.cohorts is not None


def _explain(
    parts: dict[str, float], start: float, end: float, incoming: list[Transfer], ended: int, idle: str, times: float = 1.0
) -> int:
    """Add `times` the idle time from start to end to the axis whose transfer was going on, the rest to `idle`.

    ended: how many transfers have ended before; returns how many have now, so that the next search starts there.
    """
    count = len(incoming)
    while ended < count and incoming[ended][1] <= start:
        ended += 1
    during, at = [], ended
    while at < count and incoming[at][0] < end:
        if incoming[at][1] > start:
            during.append(incoming[at])
        at += 1
    if not during:
        parts[idle] += times * (end - start)
        return ended
    if len(during) == 1:
        first, last, axis = during[0]
        shown = min(last, end) - max(first, start)
        parts[EXPOSED[axis]] += times * shown
        parts[idle] += times * (end - start - shown)
        return ended
    changes: dict[float, Counter[int]] = {start: Counter(), end: Counter()}  # by time, how many more transfers of each axis
    for first, last, axis in during:
        changes.setdefault(max(first, start), Counter())[axis] += 1
        changes.setdefault(min(last, end), Counter())[axis] -= 1
    going_on: Counter[int] = Counter()
    for left, right in pairwise(sorted(changes)):
        going_on.update(changes[left])
        axes = [axis for axis, count in going_on.items() if count > 0]
        parts[EXPOSED[min(axes)] if axes else idle] += times * (right - left)
    return ended
