"""Everybody to everybody without detours: least latency, and n − 1 partners for each.

Direct: all pairs at once. Pairwise: in round t member i sends to member i + t, so that nobody receives from two at a time.
"""

from __future__ import annotations

import numpy as np

from sim.collectives import Ids, NotApplicable, Phase, Place, Schedule, algorithms, together

MAX_MEMBERS = 512  # members with all pairs at once; beyond it nobody does so, for every pair needs its own buffers


def _pairs(place: Place, operation: str) -> tuple[Ids, Ids]:
    """All ordered pairs of two members."""
    n = place.size
    if n > MAX_MEMBERS:
        raise NotApplicable(f"{operation}/direct: {n} members are {n * (n - 1)} pairs at once; at most {MAX_MEMBERS} members")
    source, destination = np.divmod(np.arange(n * n), n)
    return source[source != destination], destination[source != destination]


@algorithms("all_gather/direct")
def all_gather(place: Place) -> Schedule:
    """Everybody sends its piece to everybody."""
    source, destination = _pairs(place, "all_gather")
    return Schedule(place.size, (together(source, destination, source),) if place.size > 1 else ())


@algorithms("reduce_scatter/direct")
def reduce_scatter(place: Place) -> Schedule:
    """Everybody sends everybody's piece to it."""
    source, destination = _pairs(place, "reduce_scatter")
    return Schedule(place.size, (together(source, destination, destination, reduce=True),) if place.size > 1 else ())


@algorithms("all_reduce/direct")
def all_reduce(place: Place) -> Schedule:
    """Reduce-scatter, then all-gather: two rounds."""
    return Schedule(place.size, reduce_scatter(place).phases + all_gather(place).phases)


@algorithms("all_to_all/direct")
def all_to_all(place: Place) -> Schedule:
    """All messages at once."""
    source, destination = _pairs(place, "all_to_all")
    return Schedule(place.size, (together(source, destination, source * place.size + destination),) if place.size > 1 else ())


@algorithms("all_to_all/pairwise")
def all_to_all_pairwise(place: Place) -> Schedule:
    """n − 1 rounds with another partner each."""
    n, source = place.size, np.arange(place.size)
    partners = ((source + turn) % n for turn in range(1, n))
    return Schedule(n, tuple(together(source, partner, source * n + partner) for partner in partners))


@algorithms("all_to_allv/direct")
def all_to_allv(place: Place) -> Schedule:
    """All messages at once, of the sizes `place.counts`. S is the largest send buffer; a label is a whole message."""
    return _sized(all_to_all(place), place)


@algorithms("all_to_allv/pairwise")
def all_to_allv_pairwise(place: Place) -> Schedule:
    """n − 1 rounds with another partner each, of the sizes `place.counts`. S is the largest send buffer."""
    return _sized(all_to_all_pairwise(place), place)


def _sized(plan: Schedule, place: Place) -> Schedule:
    counts = np.array(place.counts, dtype=np.int64)
    if counts.shape != (place.size, place.size) or (counts < 0).any():
        raise NotApplicable(f"all_to_allv: counts of shape {counts.shape} are not {place.size} × {place.size} numbers from 0 up")
    phases = [_nonempty(phase, counts[phase.source, phase.destination]) for phase in plan.phases]
    return Schedule(max(1, int(counts.sum(axis=1).max())), tuple(phase for phase in phases if len(phase.source)))


def _nonempty(phase: Phase, amount: Ids) -> Phase:
    sending, chunk = amount > 0, phase.chunk(0)[amount > 0]
    return Phase(
        phase.source[sending], phase.destination[sending], phase.channel[sending], lambda turn: chunk, amount=amount[sending]
    )


@algorithms("send/direct")
def send(place: Place) -> Schedule:
    """Member 0 sends the buffer to member 1."""
    return Schedule(1, (together(np.array([0]), np.array([1]), np.array([0])),))
