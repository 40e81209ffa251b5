"""Blocks of kernels and collectives fused to three numbers.

The host launches kernels one after the other; the GPU runs each when it is launched and the one before has ended. For any
sequence of kernels that is a max-plus map: with the GPU free at g and the host at h, the sequence ends at max(g + busy,
h + critical) and leaves the host at h + host. Sequences compose, so a stage of any number of layers is three numbers and one
event, and small kernels make a model launch-bound by themselves.

Collectives that are started and joined later run on a side stream, one after the other on each, and slow down the kernels that
run meanwhile. The numbers come from playing the sequence twice: with a GPU that never
waits for the host, and with a GPU that always does. (Where kernels are slowed down, the map between the two is an approximation.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from sim.clock import on_grid
from sim.program import SIDE_STREAM, Collective, Item, Join, Kernel, Start

SLOWDOWN = "slowdown"  # seconds that kernels take longer because of collectives beside them
CostParts = dict[tuple[str, str], float]


class BlockCost(NamedTuple):
    """Kernels in sequence as a max-plus map; parts: (phase, axis or SLOWDOWN, label) -> seconds that the sequence takes on a GPU
    that never waits for the host, adding up to `busy` exactly; of collectives only what kernels wait for.

    kernels: seconds of kernels that no collective of the sequence runs beside, which slow down while other communication runs.
    """

    busy: float
    critical: float
    host: float
    parts: CostParts
    kernels: float


def fused(
    works: Sequence[tuple[Item, float]],
    launch: float,
    slowdown: float,
    wrapping: Sequence[float] = (),
    slowing: Mapping[Collective, float] = MappingProxyType({}),
) -> BlockCost:
    """Items with the seconds that each takes by itself. launch: seconds of the host for each; slowdown: of kernels beside
    collectives, as a factor; wrapping: more seconds of the host for each item; slowing: the factor of collectives that have
    their own.
    """
    more = wrapping or (0.0,) * len(works)
    parts = CostParts()
    ready = _played(works, more, 0.0, -inf, launch, slowdown, slowing, parts)
    late = _played(works, more, -inf, 0.0, launch, slowdown, slowing, None)
    return BlockCost(ready.gpu, late.gpu, late.host, parts, ready.kernels)


def chained(runs: Sequence[tuple[int, BlockCost]]) -> BlockCost:
    """The cost of `runs` one after the other, each repeated."""
    busy = critical = host = kernels = 0.0
    parts: CostParts = {}
    for times, once in runs:
        for key, seconds in once.parts.items():
            parts[key] = parts.get(key, 0.0) + times * seconds
        kernels += times * once.kernels
        repeated = (times * once.busy, once.critical + (times - 1) * max(once.busy, once.host), times * once.host)
        busy, critical, host = _then((busy, critical, host), repeated)
    return BlockCost(busy, on_grid(critical), on_grid(host), parts, kernels)


def _then(first: tuple[float, float, float], second: tuple[float, float, float]) -> tuple[float, float, float]:
    """Max-plus composition of (busy, critical, host)."""
    return first[0] + second[0], max(first[1] + second[0], first[2] + second[1]), first[2] + second[2]


class Beside:
    """Collectives beside kernels, which take longer until the last of them ends: by its own factor, or else the usual one."""

    __slots__ = ("end", "slowdown", "usual")

    def __init__(self, slowdown: float) -> None:
        self.end, self.slowdown, self.usual = -inf, slowdown, slowdown

    def add(self, end: float, own: float | None) -> None:
        """A collective that ends then. own: its factor, if it has one."""
        if end > self.end:
            self.end, self.slowdown = end, own or self.usual

    def slowed(self, seconds: float, start: float) -> float:
        """By how many seconds kernels that begin at `start` take longer than `seconds`."""
        return on_grid(min(seconds * (self.slowdown - 1), max(0.0, self.end - start) * (1 - 1 / self.slowdown)))


class _Played(NamedTuple):
    """A sequence that was played: when the GPU's compute stream and the host are free again; for the rest see `BlockCost`."""

    gpu: float
    host: float
    kernels: float


def _played(
    works: Sequence[tuple[Item, float]],
    wrapping: Sequence[float],
    gpu: float,
    host: float,
    launch: float,
    slowdown: float,
    slowing: Mapping[Collective, float],
    parts: CostParts | None,
) -> _Played:
    """Run items one after the other, or launch them beside. gpu, host: when they are free; parts: where it is asked for."""
    collectives, kernels = Beside(slowdown), 0.0
    beside: dict[str, float] = {}  # when each stream beside is free
    ends: dict[Collective, deque[float]] = {}  # of collectives that are not joined yet, by their object

    def add(part: str, label: str, seconds: float) -> None:
        if parts is not None:
            parts[part, label] = parts.get((part, label), 0.0) + seconds

    def wait(end: float, what: Collective) -> float:
        """When the GPU goes on, which waits for `what`."""
        if gpu < end and gpu > -inf:
            add(what.axis, what.label, end - gpu)
        return max(gpu, end)

    for (item, seconds), more in zip(works, wrapping, strict=True):
        if isinstance(item, Join):
            gpu = wait(ends[item.collective].popleft(), item.collective)
            continue
        host += launch + more
        start = max(gpu, host)
        if isinstance(item, Kernel):
            shared, factor, longer = collectives.end - start, collectives.slowdown, 0.0
            if shared <= 0 or factor == 1:
                kernels += seconds
            else:
                if seconds * factor > shared:
                    kernels += seconds - shared / factor
                longer = collectives.slowed(seconds, start)
                add(SLOWDOWN, item.label, longer)
            gpu = start + seconds + longer
            add(item.phase, item.label, seconds)
        elif isinstance(item, Start):
            end = max(start, beside.get(item.stream, -inf)) + seconds
            collectives.add(end, slowing.get(item.collective))
            beside[item.stream] = end
            ends.setdefault(item.collective, deque()).append(end)
        else:
            gpu = wait(beside.get(SIDE_STREAM, -inf), item)
            add(item.axis, item.label, seconds)
            gpu = max(gpu, host) + seconds
    return _Played(gpu, host, kernels)
