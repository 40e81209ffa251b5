"""⌈log₂ n⌉ rounds for any n: every piece travels the binary digits of its way.

A piece that has to go o members further (0 < o < n) jumps by the powers of two that o is the sum of. Bruck et al. 1997
(doi:10.1109/71.642949) jump near first, so that the far jumps carry most; PAT (parallel aggregated trees, Jeaugey 2025,
arXiv:2506.20252) far first, so that the long ways carry least; as in NCCL it is for one member per node. NCCL's also bounds its
buffers, for which it splits large messages into rounds; here a message goes in one.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from sim.collectives import Ids, NotApplicable, Phase, Place, Schedule, algorithms, backwards


def _jump(n: int, distance: int, ways: Ids) -> Phase:
    """Everybody sends `distance` further the pieces that are then `ways` members from their owners."""
    source = np.arange(n)
    amount = np.full(n, len(ways))
    return Phase(source, (source + distance) % n, np.zeros(n, np.int64), partial(_pieces, n, distance, ways), amount=amount)


def _pieces(n: int, distance: int, ways: Ids, turn: int) -> Ids:
    return np.asarray((np.arange(n)[:, None] + distance - ways) % n)


def _distances(n: int) -> list[int]:
    return [1 << bit for bit in range((n - 1).bit_length())]


@algorithms("all_gather/bruck")
def all_gather(place: Place) -> Schedule:
    """Near first: in each round everybody sends all it has (in the last one what is missing)."""
    n = place.size
    return Schedule(n, tuple(_jump(n, d, np.arange(d, min(2 * d, n))) for d in _distances(n)))


@algorithms("all_gather/pat")
def all_gather_pat(place: Place) -> Schedule:
    """Far first: the first round carries one piece, the last one half of all."""
    n = place.size
    if len(place.per_node()) < n:
        raise NotApplicable(f"PAT: {n} members on {len(place.per_node())} nodes; it is for one member per node")
    return Schedule(n, tuple(_jump(n, d, np.arange(d, n, 2 * d)) for d in reversed(_distances(n))))


@algorithms("reduce_scatter/bruck")
def reduce_scatter(place: Place) -> Schedule:
    """The all-gather backwards."""
    return backwards(all_gather(place), reduce=True)


@algorithms("reduce_scatter/pat")
def reduce_scatter_pat(place: Place) -> Schedule:
    """The all-gather backwards: the near round first, with half of all pieces."""
    return backwards(all_gather_pat(place), reduce=True)


@algorithms("all_to_all/bruck")
def all_to_all(place: Place) -> Schedule:
    """In the round of each power of two, everybody passes on what has that digit in its way: about n/2 pieces a round."""
    n, phases = place.size, []
    for distance in _distances(n):
        ways = np.flatnonzero(np.arange(n) & distance)
        source, amount = np.arange(n), np.full(n, len(ways))
        blocks = partial(_blocks, n, distance, ways)
        phases.append(Phase(source, (source + distance) % n, np.zeros_like(source), blocks, amount=amount))
    return Schedule(n, tuple(phases))


def _blocks(n: int, distance: int, ways: Ids, turn: int) -> Ids:
    """Labels of what is passed on: it has come as far as the lower digits of its way."""
    owner = (np.arange(n)[:, None] - (ways & (distance - 1))) % n
    return np.asarray(owner * n + (owner + ways) % n)


@algorithms("barrier/dissemination")
def barrier(place: Place) -> Schedule:
    """Empty messages to the member 1, 2, 4, … further: then everybody has heard from everybody (Hensgen et al. 1988)."""
    return Schedule(1, tuple(_jump(place.size, d, np.empty(0, np.int64)) for d in _distances(place.size)))
