"""Partners at distances 1, 2, 4, …: ⌈log₂ n⌉ rounds each way, bandwidth-optimal when the halves shrink.

Thakur, Rabenseifner and Gropp 2005 (doi:10.1177/1094342005051521). Halves are exchanged near first and large first, so that long
ways carry least. All-gather and reduce-scatter need n to be a power of two; Rabenseifner's all-reduce and recursive doubling take
the members beyond it in by a round before and after.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from sim.collectives import Ids, NotApplicable, Phase, Place, Schedule, algorithms, backwards, lift, together


def _power_of_two(place: Place, name: str) -> int:
    n = place.size
    if n & (n - 1):
        raise NotApplicable(f"{name}: n={n} is not a power of two")
    return n


def _halving(n: int) -> Schedule:
    """Reduce-scatter over n = 2^k members: member i ends with piece i."""
    phases = []
    for bit in range(n.bit_length() - 1):
        source, amount = np.arange(n), np.full(n, n >> bit + 1)
        other = source ^ (1 << bit)
        phases.append(Phase(source, other, np.zeros_like(source), partial(_half, other, bit), reduce=True, amount=amount))
    return Schedule(n, tuple(phases))


def _half(other: Ids, bit: int, turn: int) -> Ids:
    """Pieces of the members that share the partner's lowest digits."""
    step = 2 << bit
    return np.asarray((other % step)[:, None] + np.arange(0, len(other), step))


@algorithms("reduce_scatter/recursive_halving")
def reduce_scatter(place: Place) -> Schedule:
    """Exchange halves, quarters, …, with members 1, 2, 4, … away."""
    return _halving(_power_of_two(place, "reduce_scatter/recursive_halving"))


@algorithms("all_gather/recursive_doubling")
def all_gather(place: Place) -> Schedule:
    """Exchange one piece, two, four, …, with members n/2, n/4, … away."""
    return backwards(_halving(_power_of_two(place, "all_gather/recursive_doubling")), reduce=False)


@algorithms("all_reduce/halving_doubling")
def halving_doubling(place: Place) -> Schedule:
    """Recursive halving, then recursive doubling."""
    halving = _halving(_power_of_two(place, "all_reduce/halving_doubling"))
    return Schedule(place.size, halving.phases + backwards(halving, reduce=False).phases)


@algorithms("all_reduce/recursive_doubling")
def recursive_doubling(place: Place) -> Schedule:
    """Exchange the whole buffer with members 1, 2, 4, … away: fewest rounds, log₂ n·S sent. Odd members step aside first."""
    core, aside, partner = _core(place.size)
    whole = np.zeros_like(aside)
    phases = [together(aside, partner, whole, reduce=True)] if len(aside) else []
    number = np.arange(len(core))
    for bit in range(len(core).bit_length() - 1):
        phases.append(together(core, core[number ^ (1 << bit)], np.zeros_like(core), reduce=True))
    return Schedule(1, (*phases, *([together(partner, aside, whole)] if len(aside) else [])))


@algorithms("all_reduce/rabenseifner")
def rabenseifner(place: Place) -> Schedule:
    """Halving and doubling among 2^k members; each of the others works with one of them before and gets the result after."""
    core, aside, partner = _core(place.size)
    chunks = max(len(core), 2)
    halving = _halving(len(core))
    inner = halving.phases + backwards(halving, reduce=False).phases
    labels = np.arange(chunks).reshape(1, len(core), -1)
    phases = lift(Schedule(len(core), inner), core[None], labels)
    if len(aside):
        low = np.tile(np.arange(chunks // 2), (len(aside), 1))
        high, every = low + chunks // 2, np.tile(np.arange(chunks), (len(aside), 1))
        ends = np.concatenate([aside, partner]), np.concatenate([partner, aside])
        swap = together(*ends, np.concatenate([low, high]), reduce=True)
        phases = (swap, together(aside, partner, high), *phases, together(partner, aside, every))
    return Schedule(chunks, phases)


def _core(n: int) -> tuple[Ids, Ids, Ids]:
    """2^k members that do the work; those that step aside, each beside its partner in the core."""
    beyond = n - (1 << n.bit_length() - 1)
    partner = np.arange(0, 2 * beyond, 2)
    return np.concatenate([partner, np.arange(2 * beyond, n)]), partner + 1, partner
