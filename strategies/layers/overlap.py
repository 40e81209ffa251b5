"""Collectives behind kernels: what a layer's items are when the compute stream goes on while a collective runs."""

from __future__ import annotations

from itertools import pairwise

from sim.program import Collective, Item, Join, Kernel, Start

Items = tuple[Item, ...]


def beside(kernels: Items, collectives: Items) -> Items:
    """The collectives run beside the kernels; what follows waits for both."""
    those = [item for item in collectives if isinstance(item, Collective)]
    return (*map(Start, those), *kernels, *map(Join, those))


def gathered(kernels: tuple[Kernel, ...], ring: Collective) -> Items:
    """A product of gathered tokens in one kernel per rank of the ring: each runs beside the round that brings the next tokens."""
    return tuple(item for kernel, _ in pairwise(kernels) for item in beside((kernel,), (ring,))) + kernels[-1:]


def scattered(kernels: tuple[Kernel, ...], ring: Collective) -> Items:
    """A product whose sums are scattered, in one kernel per rank: each runs beside the round that takes the sums before it."""
    return kernels[:1] + tuple(item for _, kernel in pairwise(kernels) for item in beside((kernel,), (ring,)))


def interleaved(first: Items, second: Items) -> Items:
    """Two passes that take turns: when one comes to a collective, the kernels of the other run beside it."""
    passes, result = (_stretches(first), _stretches(second)), list[Item]()
    under_way: list[Collective | None] = [None, None]
    for turn in range(max(map(len, passes))):
        for number, stretches in enumerate(passes):
            before = under_way[number]
            if before is not None:
                result.append(Join(before))
                under_way[number] = None
            if turn < len(stretches):
                kernels, collective = stretches[turn]
                result += kernels
                if collective is not None:
                    result.append(Start(collective))
                    under_way[number] = collective
    return (*result, *(Join(one) for one in under_way if one is not None))


def _stretches(items: Items) -> list[tuple[list[Item], Collective | None]]:
    """Items up to each collective that the compute stream waits for, with it; the rest with none."""
    result: list[tuple[list[Item], Collective | None]] = []
    kernels: list[Item] = []
    for item in items:
        if isinstance(item, Collective):
            result.append((kernels, item))
            kernels = []
        else:
            kernels.append(item)
    return [*result, (kernels, None)] if kernels else result
