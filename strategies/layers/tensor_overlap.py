"""Collectives behind kernels: what a layer's items are when the compute stream goes on while a collective runs."""

from __future__ import annotations

from itertools import pairwise

from sim.program import SIDE_STREAM_ACROSS_NODES, Collective, Item, Join, Kernel, Start

Items = tuple[Item, ...]


def beside(kernels: Items, collectives: Items) -> Items:
    """The collectives run beside the kernels; what follows waits for both."""
    waiting = [item for item in collectives if isinstance(item, Collective)]
    return (*map(Start, waiting), *kernels, *map(Join, waiting))


def pipelined(across: Collective, inside: Items) -> Items:
    """An exchange over the network, and the one inside nodes that passes on what has come, piece by piece: both at once."""
    return (Start(across, SIDE_STREAM_ACROSS_NODES), *inside, Join(across))


def gathered(pieces: tuple[tuple[Kernel, ...], ...], ring: Collective) -> Items:
    """Products of gathered tokens, kernels per rank of the ring: they run beside the round that brings the next tokens."""
    return tuple(item for kernels, _ in pairwise(pieces) for item in beside(kernels, (ring,))) + pieces[-1]


def scattered(kernels: tuple[Kernel, ...], ring: Collective) -> Items:
    """A product whose sums are scattered, in one kernel per rank: each runs beside the round that takes the sums before it."""
    return kernels[:1] + tuple(item for _, kernel in pairwise(kernels) for item in beside((kernel,), (ring,)))


def scattered_behind(kernels: tuple[Kernel, ...], part: Collective) -> Items:
    """A product in pieces, one kernel each, of which the sums are scattered while the next one is computed; the last one's when
    nothing is left to compute.
    """
    return tuple(item for kernel in kernels for item in (kernel, Start(part))) + (Join(part),) * len(kernels)


def interleaved(first: Items, second: Items) -> Items:
    """Two passes that take turns: when one comes to collectives, the kernels of the other run beside them."""
    passes, result = (_stretches(first), _stretches(second)), list[Item]()
    under_way: list[list[Collective]] = [[], []]
    for turn in range(max(map(len, passes))):
        for number, stretches in enumerate(passes):
            result += map(Join, under_way[number])
            under_way[number] = []
            if turn < len(stretches):
                kernels, under_way[number] = stretches[turn]
                result += (*kernels, *map(Start, under_way[number]))
    return (*result, *(Join(collective) for collectives in under_way for collective in collectives))


def _stretches(items: Items) -> list[tuple[list[Item], list[Collective]]]:
    """Kernels (and what is beside some already), with the collectives that come next and that the compute stream waits for."""
    result: list[tuple[list[Item], list[Collective]]] = []
    for item in items:
        if isinstance(item, Collective):
            result = result or [([], [])]
            result[-1][1].append(item)
        elif result and not result[-1][1]:
            result[-1][0].append(item)
        else:
            result.append(([item], []))
    return result
