"""From one member to all and back: broadcast, scatter, reduce, gather. A reduce or gather is a broadcast or scatter backwards.

Flat: the root serves one member after the other. Binomial: in every round all that have something pass it on, ⌈log₂ n⌉ rounds
(Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521). Chain: the buffer runs in pieces along the ring, which is
NCCL's way: S/B for any n when there are many pieces.
"""

from __future__ import annotations

import numpy as np

from sim.collectives import PIECES, Phase, Place, Schedule, algorithms, backwards, together
from sim.collectives.ring import orders


@algorithms("broadcast/flat")
def broadcast_flat(place: Place) -> Schedule:
    """The root sends the whole buffer to one member after the other: n − 1 rounds."""
    return Schedule(1, tuple(together(np.array([0]), np.array([m]), np.array([0])) for m in range(1, place.size)))


@algorithms("broadcast/binomial")
def broadcast_binomial(place: Place) -> Schedule:
    """In every round each member that has the buffer sends it to one that has not: ⌈log₂ n⌉ rounds."""
    phases = []
    have = 1
    while have < place.size:
        source = np.arange(min(have, place.size - have))
        phases.append(together(source, source + have, np.zeros_like(source)))
        have *= 2
    return Schedule(1, tuple(phases))


@algorithms("broadcast/chain")
def broadcast_chain(place: Place) -> Schedule:
    """Pieces of the buffer follow each other along the rings, from the root on: n − 2 + pieces rounds."""
    rings = orders(place)
    chains = np.stack([np.roll(ring, -int(np.flatnonzero(ring == 0)[0])) for ring in rings])
    channel = np.arange(len(chains))
    hops = (together(chains[:, p], chains[:, p + 1], channel, channel=channel) for p in range(place.size - 1))
    return Schedule(len(chains), tuple(hops), PIECES)


@algorithms("scatter/flat")
def scatter_flat(place: Place) -> Schedule:
    """The root sends each member its piece, one after the other."""
    return Schedule(place.size, tuple(together(np.array([0]), np.array([m]), np.array([m])) for m in range(1, place.size)))


@algorithms("scatter/binomial")
def scatter_binomial(place: Place) -> Schedule:
    """Whoever holds pieces passes the farther half of them on: ⌈log₂ n⌉ rounds; some pieces travel several times."""
    n = place.size
    phases: list[Phase] = []
    distance = 1 << max(0, (n - 1).bit_length() - 1)
    while distance and n > 1:
        source = np.arange(0, n - distance, 2 * distance)
        pieces = source[:, None] + distance + np.arange(distance)
        phases.append(together(source, source + distance, np.where(pieces < n, pieces, -1)))
        distance //= 2
    return Schedule(n, tuple(phases))


@algorithms("reduce/flat")
def reduce_flat(place: Place) -> Schedule:
    """The root takes the buffers of one member after the other."""
    return backwards(broadcast_flat(place), reduce=True)


@algorithms("reduce/binomial")
def reduce_binomial(place: Place) -> Schedule:
    """Sums meet in pairs: ⌈log₂ n⌉ rounds."""
    return backwards(broadcast_binomial(place), reduce=True)


@algorithms("reduce/chain")
def reduce_chain(place: Place) -> Schedule:
    """Pieces run along the rings towards the root and are added to on their way."""
    return backwards(broadcast_chain(place), reduce=True)


@algorithms("gather/flat")
def gather_flat(place: Place) -> Schedule:
    """The root takes the pieces of one member after the other."""
    return backwards(scatter_flat(place), reduce=False)


@algorithms("gather/binomial")
def gather_binomial(place: Place) -> Schedule:
    """Pieces are collected in pairs of growing groups: ⌈log₂ n⌉ rounds."""
    return backwards(scatter_binomial(place), reduce=False)
