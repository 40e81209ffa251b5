"""Clocks of ranks on several machines, which differ by milliseconds, set to one by what ranks do together.

Nobody ends an all-reduce, an all-gather or another collective in which each needs something of each before the last has begun,
and all end it within a few rounds of each other. So the median difference of the ends of two ranks, over all that they do
together, is by how much their clocks differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from calibration.readers.kineto_ops import RankTrace

APART = 1e-4  # seconds by which ends may differ on one clock
MEETINGS = 3  # collectives of two ranks by which their clocks are compared at least
SURE = 0.25  # part of a difference by which most may differ from it
ONE_WAY = frozenset({"send", "recv", "broadcast", "reduce", "gather", "scatter"})  # which some end before others begin


def on_one_clock(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], float]:
    """Traces in the order of their ranks with the times of the lowest rank's clock, and the most seconds by which one was moved.
    Ranks that never meet it, also through others, keep theirs.
    """
    ahead = _ahead(traces)
    most = max(map(abs, ahead.values()))
    return ([_moved(trace, -ahead[trace.rank]) for trace in traces], most) if most > APART else (list(traces), 0.0)


def _ahead(traces: Sequence[RankTrace]) -> dict[int, float]:
    """By rank, the seconds by which its clock is ahead of that of the lowest rank that it meets, also through others."""
    near: dict[int, list[tuple[int, float]]] = {trace.rank: [] for trace in traces}
    for (first, second), differences in _differences(traces).items():
        middle = median(differences)
        spread = median(abs(each - middle) for each in differences)
        if len(differences) >= MEETINGS and spread <= max(APART, SURE * abs(middle)):
            near[first].append((second, middle))
            near[second].append((first, -middle))
    ahead: dict[int, float] = {}
    for lowest in near:
        reached = [] if lowest in ahead else [lowest]
        ahead.setdefault(lowest, 0.0)
        for rank in reached:
            for other, more in near[rank]:
                if other not in ahead:
                    ahead[other] = ahead[rank] + more
                    reached.append(other)
    return ahead


def _differences(traces: Sequence[RankTrace]) -> dict[tuple[int, int], list[float]]:
    """By the lowest rank of a group and another, how much later the other ended each of their collectives."""
    ends: dict[tuple[int, str, int], list[tuple[int, float]]] = {}
    for trace in traces:
        for meeting, end in _ends(trace):
            ends.setdefault(meeting, []).append((trace.rank, end))
    result: dict[tuple[int, int], list[float]] = {}
    for (first, end), *others in ends.values():
        for rank, other in others:
            result.setdefault((first, rank), []).append(other - end)
    return result


def _ends(trace: RankTrace) -> Iterator[tuple[tuple[int, str, int], float]]:
    """What a rank does with all others of a group at once, by step, group and turn, and when that ends there."""
    for step, kernels in trace.steps.items():
        met = Counter[str]()
        for kernel in kernels:
            if kernel.peers and kernel.collective not in ONE_WAY:
                yield (step, kernel.peers, met[kernel.peers]), kernel.end
                met[kernel.peers] += 1


def _moved(trace: RankTrace, seconds: float) -> RankTrace:
    moved = {
        step: [
            each._replace(launched=each.launched + seconds, start=each.start + seconds, end=each.end + seconds)
            for each in kernels
        ]
        for step, kernels in trace.steps.items()
    }
    return trace._replace(steps=moved)
