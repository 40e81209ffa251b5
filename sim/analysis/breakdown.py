"""Where the time of a step goes: seconds by component on each lane, which add up to the step exactly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.op_columns import RepeatedCohort
from sim.op_index import op_index
from sim.pricing.block_costs import BlockCost
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import CPU, Collective, Op, Program
from sim.remembered import remembered
from sim.timeline import Timeline

AXES = ("tp", "cp", "ep", "dp", "replica", "pp", "host", "nvme", CPU)  # by priority in explaining an idle moment
PHASES = ("forward", "backward", "recompute", "optimizer")
EXPOSED = tuple(f"{axis} exposed" for axis in AXES)
IDLE = ("bubble", "wait", "launch")  # components in which compute is idle, besides exposed communication
BUBBLE, WAIT, LAUNCH = range(len(IDLE))
COMPONENTS = (*PHASES, *EXPOSED, "launch", "slowdown", "bubble", "wait")
COMPONENT = {name: name for name in COMPONENTS} | dict(zip(AXES, EXPOSED, strict=True))  # of what a block consists of

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


class Transfers(NamedTuple):
    """Transfers that compute streams may wait for, lane by lane in the order of their starts; axis: its place in AXES."""

    lane: Numbers
    start: Floats
    end: Floats
    axis: Numbers


class Idle(NamedTuple):
    """Times in which compute streams are idle, lane by lane: from when until when, how often, and which of IDLE that is where no
    transfer goes on.
    """

    lane: Numbers
    since: Floats
    until: Floats
    times: Floats
    reason: Numbers


def breakdowns(timeline: Timeline) -> list[dict[str, float]]:
    """Per lane: seconds by component of COMPONENTS, and by effect; they add up to the step exactly."""
    effects = sorted({name for owed in timeline.owed.values() for name in owed})
    every = [dict.fromkeys((*COMPONENTS, *effects), 0.0) for _ in timeline.lanes]
    each = [base + op_index(timeline.cohort(lane)).compute for lane, base in enumerate(timeline.offset)]
    lane, numbers = np.repeat(np.arange(len(each)), [len(own) for own in each]), np.concatenate(each)
    _add_idle(every, _idle(timeline, lane, numbers), _incoming(timeline))
    _add_busy(every, timeline, lane, numbers)
    return every


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


def _incoming(timeline: Timeline) -> Transfers:
    """The collectives of each lane, and what is sent to it."""
    first: dict[int, int] = {}  # by cohort
    for number, lane in enumerate(timeline.lanes):
        first.setdefault(lane.cohort, number)
    places, targets, axes = [np.empty(0, np.int64)], [0], [0]
    for number, lane in enumerate(timeline.lanes):
        for axis, to, ops in op_index(timeline.cohort(number)).transfers:
            places.append(timeline.offset[number] + ops)
            targets.append(number if to is None else first[to] + number - first[lane.cohort])
            axes.append(AXES.index(axis))
    place, counts = np.concatenate(places), [len(each) for each in places]
    lanes, every = np.repeat(targets, counts), np.repeat(axes, counts)
    start, end = timeline.starts[place], timeline.ends[place]
    order = np.lexsort((every, end, start, lanes))
    return Transfers(lanes[order], start[order], end[order], every[order])


def _idle(timeline: Timeline, lane: Numbers, numbers: Numbers) -> Idle:
    """When compute streams are idle, before each op and at the end of the step. lane, numbers: of the ops."""
    lanes, begins = np.arange(len(timeline.lanes)), np.array([timeline.begin(each) for each in range(len(timeline.lanes))])
    ended, first = np.append(timeline.ends[numbers], 0.0), np.searchsorted(lane, lanes)
    last = np.append(first[1:], len(lane)) - 1
    since, until = np.roll(ended, 1)[:-1], timeline.starts[numbers]
    through = np.where(last < first, begins, ended[last])
    since[first[last >= first]] = begins[last >= first]
    launched = _launched(timeline, lane, numbers).clip(since, until)
    finish = np.maximum(through, begins + timeline.played)
    reason = np.where(np.concatenate([_between_stages(timeline.program)[each.cohort] for each in timeline.lanes]), BUBBLE, WAIT)
    at_end = BUBBLE if timeline.program.grid.degree("pp") > 1 else WAIT
    own = np.concatenate([lane, lane, lanes])
    why = np.concatenate([np.full(len(lane), LAUNCH), reason, np.full(len(lanes), at_end)])
    start, end = np.concatenate([since, launched, through]), np.concatenate([launched, until, finish])
    gaps = own, np.concatenate([since, since, through]), np.concatenate([until, until, finish])  # of which each is a part
    parts = [Idle(own, start.clip(*edges), end.clip(*edges), times, why) for edges, times in _stretches(timeline, *gaps)]
    idle = Idle(*map(np.concatenate, zip(*parts, strict=True)))
    there = np.flatnonzero(idle.until > idle.since)
    there = there[np.argsort(idle.lane[there], kind="stable")]
    return Idle(idle.lane[there], idle.since[there], idle.until[there], idle.times[there], idle.reason[there])


def _stretches(timeline: Timeline, lane: Numbers, since: Floats, until: Floats) -> Iterator[tuple[tuple[float, float], Floats]]:
    """From when to when things happen as often, and how often parts of the gaps between ops of `lane` do, which last from `since`
    until `until`: in a last period as often as it is repeated, whatever began before it. A gap that goes on into the last period
    is one that ends each repetition: of the step's last gap of this kind what follows may be another op, for another reason.
    """
    once = np.ones(len(since))
    if timeline.period is None:
        yield (-np.inf, np.inf), once
        return
    end, often = timeline.period.end, np.full(len(since), 1.0 + timeline.periods)
    begin = end - timeline.period.seconds
    whole = (since < begin) & (end <= until)
    into = (since < begin) & (begin < until) & ~whole
    beyond = (begin <= since) & (since < end) & (end <= until) & np.isin(lane, lane[into])
    yield (-np.inf, begin), np.where(into, often, once)
    yield (begin, end), np.where(beyond, once, often)
    yield (end, np.inf), once


def _launched(timeline: Timeline, lane: Numbers, numbers: Numbers) -> Floats:
    """For each op of compute streams, until when the host is why nothing has begun: 0, or when that op, or what it waits for of
    its own rank, was launched, of transfers that began just then.
    """
    result = np.zeros(len(numbers))
    begun = np.flatnonzero(timeline.starts == np.array(timeline.launched)).tolist()
    hosted = {number: timeline.start[number] for number in begun if isinstance(timeline.cost[number], TransferCost)}
    for place, (own, number) in enumerate(zip(lane.tolist(), numbers.tolist(), strict=True)) if hosted else ():
        base, cohort = timeline.offset[own], timeline.lanes[own].cohort
        after = timeline.program.cohorts[cohort].waits(number - base)
        result[place] = max(hosted.get(each, 0.0) for each in (number, *(base + ref.op for ref in after if ref.cohort == cohort)))
    return result


@remembered
def _between_stages(program: Program) -> list[NDArray[np.bool_]]:
    """By cohort, of each op of its compute stream in the step, whether it waits for other stages."""
    numbers = [op_index(cohort).compute for cohort in program.cohorts]
    result = []
    for number, (cohort, own) in enumerate(zip(program.cohorts, numbers, strict=True)):
        if isinstance(cohort, RepeatedCohort):
            result.append(_waiting_for_stages(number, cohort)[own])
        else:
            result.append(np.array([_waits_for_stages(program, number, cohort.ops[each]) for each in own.tolist()], bool))
    return result


def _waiting_for_stages(number: int, cohort: RepeatedCohort) -> NDArray[np.bool_]:
    """By op, what `_waits_for_stages` says."""
    columns = cohort.columns
    met = np.array([isinstance(op.work, Collective) and op.work.cohorts is not None for op in columns.kinds])
    others = columns.cohort != number
    others[~others] = met[columns.kind[columns.awaited[~others]]]
    result = np.zeros(len(columns.kind), bool)
    result[columns.waiting[others]] = True
    return result


def _waits_for_stages(program: Program, cohort: int, op: Op) -> bool:
    """Whether an op waits for an op of another stage, or for a collective with one."""
    for ref in op.after:
        work = program.cohorts[ref.cohort].ops[ref.op].work
        if ref.cohort != cohort or (isinstance(work, Collective) and work.cohorts is not None):
            return True
    return False


def _add_idle(every: list[dict[str, float]], idle: Idle, incoming: Transfers) -> None:
    """Add idle times to the axes whose transfers went on then, the rest to their reasons; of several transfers the first of AXES
    counts. every: the components of each lane.
    """
    lane, since, until, times, reason = idle
    shown = np.zeros(len(lane))  # of idle times, in which transfers went on
    for axis in sorted(set(incoming.axis.tolist())):  # np.unique would import numpy.ma
        mine = incoming.axis <= axis
        covered = _covered(Transfers(*(column[mine] for column in incoming)), idle)
        _add(every, EXPOSED, lane, np.full(len(lane), axis), times * (covered - shown))
        shown = covered
    _add(every, IDLE, lane, reason, times * (until - since - shown))


def _covered(transfers: Transfers, idle: Idle) -> Floats:
    """For how long of each idle time any of `transfers` goes on."""
    lane, start, end = _stretches_of(transfers)
    begun, over = (_through(lane, start, idle.lane, times, "left") for times in (idle.since, idle.until))
    lane, start, end = np.append(lane, -1), np.append(start, 0.0), np.append(end, 0.0)
    first, last = begun - 1, over - 1  # the last that has begun when an idle time begins, and before it ends
    stop, late = np.minimum(end[last], idle.until), np.maximum(start[last], idle.since)
    seconds = np.where(lane[last] == idle.lane, (stop - late).clip(min=0.0), 0.0)
    more = np.flatnonzero((first < last) & (lane[first] == idle.lane))
    seconds[more] += (end[first[more]] - idle.since[more]).clip(min=0.0)
    between = np.flatnonzero(begun < last)
    if len(between):
        seconds[between] += np.add.reduceat(end - start, np.array((begun[between], last[between])).T.ravel())[::2]
    return seconds


def _stretches_of(transfers: Transfers) -> tuple[Numbers, Floats, Floats]:
    """When any transfer of a lane goes on, stretch by stretch: lanes, from when, until when."""
    lane, start = transfers.lane, transfers.start
    end = np.empty_like(transfers.end)  # of all transfers of the lane up to each
    for bounds in pairwise(np.searchsorted(lane, np.arange(int(lane.max()) + 2)).tolist()):
        np.maximum.accumulate(transfers.end[slice(*bounds)], out=end[slice(*bounds)])
    apart = np.flatnonzero((np.diff(lane, prepend=-1) > 0) | (start > np.append(-np.inf, end[:-1])))  # where others end before
    return lane[apart], start[apart], end[np.append(apart[1:], len(end)) - 1]


def _through(lanes: Numbers, sorted_times: Floats, lane: Numbers, times: Floats, side: Literal["left", "right"]) -> Numbers:
    """How many of times that are sorted in each of `lanes` are in lanes before each of `lane`, or before `times` there."""
    result = np.zeros(len(lane), np.int64)
    count = int(max(lanes.max(initial=0), lane.max(initial=0))) + 1
    first, begin = (np.searchsorted(each, np.arange(count + 1)).tolist() for each in (lanes, lane))
    for number in range(count):
        mine = slice(begin[number], begin[number + 1])
        result[mine] = first[number] + np.searchsorted(sorted_times[first[number] : first[number + 1]], times[mine], side)
    return result


def _add(every: list[dict[str, float]], names: tuple[str, ...], lane: Numbers, place: Numbers, seconds: Floats) -> None:
    table = np.bincount(lane * len(names) + place, seconds, len(every) * len(names)).reshape(-1, len(names))
    for parts, own in zip(every, table.tolist(), strict=True):
        for name, each in zip(names, own, strict=True):
            parts[name] += each


def _add_busy(every: list[dict[str, float]], timeline: Timeline, lane: Numbers, numbers: Numbers) -> None:
    """Add what compute streams do; what it takes longer than it is priced at is the host's, or of collectives beside. lane,
    numbers: of their ops.
    """
    counts, lanes = timeline.counts[numbers], len(every)
    busy = np.bincount(lane, (timeline.ends[numbers] - timeline.starts[numbers]) * counts, lanes).tolist()
    slowed = np.bincount(lane, timeline.stretches[numbers] * counts, lanes).tolist()
    for number, (parts, base, late, more) in enumerate(zip(every, timeline.offset, busy, slowed, strict=True)):
        rest = late - more
        for _, op, _, times in timeline.works[number]:
            cost = timeline.cost[op]
            if isinstance(cost, BlockCost):
                rest -= times * cost.busy
                for (name, _), seconds in cost.parts.items():
                    parts[COMPONENT[name]] += times * seconds
        for axis, same in op_index(timeline.cohort(number)).inline.items():
            place = base + same
            seconds = float((timeline.ends[place] - timeline.starts[place]) @ timeline.counts[place])
            parts[f"{axis} exposed"] += seconds
            rest -= seconds
        parts["slowdown"] += more
        parts["launch"] += rest
    for own, op, times in zip(lane.tolist(), numbers.tolist(), counts.tolist(), strict=True) if timeline.owed else ():
        for effect, seconds in timeline.owed.get(op, {}).items():
            every[own][effect] += times * seconds
            every[own]["launch"] -= times * seconds
