"""Broadcast from member 0: one by one, or by a binomial tree in ⌈log₂ n⌉ rounds."""

from __future__ import annotations

import numpy as np

from sim.collectives import Ids, Phase, Place, Schedule, algorithms


def _whole(source: Ids, destination: Ids) -> Phase:
    zeros = np.zeros_like(source)
    return Phase(source, destination, zeros, lambda turn: zeros)


@algorithms("broadcast/flat")
def flat(place: Place) -> Schedule:
    """The root sends the whole buffer to one member after the other: n − 1 rounds."""
    return Schedule(1, tuple(_whole(np.array([0]), np.array([member])) for member in range(1, place.size)))


@algorithms("broadcast/binomial")
def binomial(place: Place) -> Schedule:
    """In every round each member that has the buffer sends it to one that has not: ⌈log₂ n⌉ rounds."""
    phases = []
    have = 1
    while have < place.size:
        source = np.arange(min(have, place.size - have))
        phases.append(_whole(source, source + have))
        have *= 2
    return Schedule(1, tuple(phases))


@algorithms("send/direct")
def send(place: Place) -> Schedule:
    """Member 0 sends the buffer to member 1."""
    return Schedule(1, (_whole(np.array([0]), np.array([1])),))
