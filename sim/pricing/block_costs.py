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
    ready, late = (_Player(*free, launch, slowdown, slowing) for free in ((0.0, -inf), (-inf, 0.0)))
    for (item, seconds), more in zip(works, wrapping or (0.0,) * len(works), strict=True):
        ready.play(item, seconds, more)
        late.play(item, seconds, more)
    return BlockCost(ready.gpu, late.gpu, late.host, ready.parts, ready.kernels)


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


class _Player:
    """A sequence being played: when the GPU's compute stream, the stream beside it and the host are free."""

    def __init__(self, gpu: float, host: float, launch: float, slowdown: float, slowing: Mapping[Collective, float]) -> None:
        self.gpu, self.host = gpu, host
        self.beside: dict[str, float] = {}  # when each stream beside is free
        self.launch, self.slowing, self.collectives = launch, slowing, Beside(slowdown)
        self.ends: dict[Collective, deque[float]] = {}  # of collectives that are not joined yet, by their object
        self.parts: CostParts = {}
        self.kernels = 0.0

    def play(self, item: Item, seconds: float, more: float = 0.0) -> None:
        """Run one item, or launch it beside."""
        if isinstance(item, Join):
            self._wait(self.ends[item.collective].popleft(), item.collective)
            return
        self.host += self.launch + more
        if isinstance(item, Start):
            end = max(self.gpu, self.beside.get(item.stream, -inf), self.host) + seconds
            self.collectives.add(end, self.slowing.get(item.collective))
            self.beside[item.stream] = end
            self.ends.setdefault(item.collective, deque()).append(end)
            return
        if isinstance(item, Collective):
            self._wait(self.beside.get(SIDE_STREAM, -inf), item)
            self._add(item.axis, item.label, seconds)
            self.gpu = max(self.gpu, self.host) + seconds
            return
        start = max(self.gpu, self.host)
        self.gpu = start + seconds + self._slowed(item, seconds, start)
        self._add(item.phase, item.label, seconds)

    def _wait(self, end: float, what: Collective) -> None:
        if end > self.gpu:
            if self.gpu > -inf:
                self._add(what.axis, what.label, end - self.gpu)
            self.gpu = end

    def _slowed(self, kernel: Kernel, seconds: float, start: float) -> float:
        """Seconds that a kernel takes longer because of the collectives beside it."""
        shared, slowdown = self.collectives.end - start, self.collectives.slowdown
        if shared <= 0 or slowdown == 1:
            self.kernels += seconds
            return 0.0
        if seconds * slowdown > shared:
            self.kernels += seconds - shared / slowdown
        more = self.collectives.slowed(seconds, start)
        self._add(SLOWDOWN, kernel.label, more)
        return more

    def _add(self, part: str, label: str, seconds: float) -> None:
        self.parts[part, label] = self.parts.get((part, label), 0.0) + seconds
