"""One collective at a time on an idle cluster: what nccl-tests measures, for every algorithm and protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sim.analysis.notes import joined
from sim.grid import Grid
from sim.pricing.prices import Prices
from sim.pricing.transfers.collective_costs import CollectiveCosts
from sim.pricing.transfers.protocols import IN_SWITCH
from sim.program import Block, Cohort, Collective, Op, Program, Send
from sim.timeline import Timeline
from topologies.links.topology import Topology
from topologies.reading import UserError

MIB = 2.0**20
_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "gather": 1.0, "scatter": 1.0}


class Point(NamedTuple):
    """The price of one collective of `bytes` (full buffer S) by one algorithm and protocol, in seconds."""

    bytes: float
    algorithm: str
    protocol: str
    seconds: float

    @property
    def name(self) -> str:
        """As a plan spells it: "ring/ll128"; an algorithm with a kernel of its own by its name alone."""
        return self.algorithm if self.protocol in IN_SWITCH else f"{self.algorithm}/{self.protocol}"


def bus_factor(operation: str, ranks: int) -> float:
    """busbw / algbw, where algbw = S / seconds (nccl-tests doc/PERFORMANCE.md): all-reduce 2(n−1)/n, broadcast and reduce 1."""
    return _FACTORS[operation] * (ranks - 1) / ranks if operation in _FACTORS else 1.0


@dataclass(frozen=True)
class Sweep:
    """Prices of one operation by size; each size's choices are sorted: what a job uses, then the cheapest first.

    measured: (bytes, seconds) of the same operation; at_measured: the cheapest price at those sizes; used: sizes of a job.
    """

    operation: str
    where: str  # "4 × dgx-h100, 32 ranks"
    ranks: int
    prices: Sequence[Sequence[Point]]
    measured: Sequence[tuple[float, float]] = field(default_factory=tuple)
    at_measured: Sequence[float] = field(default_factory=tuple)
    used: Sequence[float] = ()

    @property
    def names(self) -> list[str]:
        """The names of all choices; the ones that are cheapest for small sizes first."""
        chosen = [options[0].name for options in self.prices]
        return list(dict.fromkeys([*chosen, *(point.name for options in self.prices for point in options)]))

    @property
    def errors(self) -> list[float]:
        """Predicted over measured − 1."""
        return [price / measured - 1 for (_, measured), price in zip(self.measured, self.at_measured, strict=True)]

    def rate(self, size: float, time: float) -> tuple[float, float]:
        """(algbw, busbw) in bytes per second."""
        return size / time, size / time * bus_factor(self.operation, self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """For machines, with stable keys."""
        rows = []
        for options in self.prices:
            first = options[0]
            algbw, busbw = self.rate(first.bytes, first.seconds)
            rows.append(
                {
                    "bytes": first.bytes,
                    "chosen": first.name,
                    "seconds": first.seconds,
                    "algbw": algbw,
                    "busbw": busbw,
                    "choices": {point.name: point.seconds for point in options},
                }
            )
        compared = [
            {"bytes": size, "seconds": time, "predicted": price, "error": error}
            for (size, time), price, error in zip(self.measured, self.at_measured, self.errors, strict=True)
        ]
        return {"operation": self.operation, "ranks": self.ranks, "rows": rows, "measured": compared}


def lone(
    topology: Topology, prices: Prices, operation: str, ranks: int, sizes: Sequence[float], algorithm: str = "auto"
) -> tuple[CollectiveCosts, Sequence[Collective | Send]]:
    """Prices of `operation` among the first `ranks` GPUs, and one collective per size; of sends from the first half of them, each
    to its peer in the other half, all at once. Raises UserError.
    """
    if not 2 <= ranks <= topology.gpus:
        raise UserError(f"ranks={ranks}: must be at least 2 and at most the cluster's {topology.gpus} GPUs")
    if operation == "send":
        return _sends(topology, prices, ranks, sizes)
    works = [Collective(operation, size, "dp", operation, algorithm) for size in sizes]
    program = Program(Grid.of(dp=ranks), [Cohort({}, [Op("s", work) for work in works])])
    return CollectiveCosts(program, topology, prices), works


def _sends(topology: Topology, prices: Prices, ranks: int, sizes: Sequence[float]) -> tuple[CollectiveCosts, list[Send]]:
    works = [Send(size, 1, "send") for size in sizes]
    cohorts = [Cohort({"pp": 0}, [Op("s", work) for work in works]), Cohort({"pp": 1}, [])]
    return CollectiveCosts(Program(Grid.of(dp=ranks // 2, pp=2), cohorts), topology, prices), works


def sweep(
    topology: Topology, prices: Prices, operation: str, ranks: int, sizes: Sequence[float], algorithm: str = "auto"
) -> list[list[Point]]:
    """For each size, every choice that may run it: what a job uses, then the cheapest first. Raises UserError."""
    pricing, works = lone(topology, prices, operation, ranks, sizes, algorithm)
    return [_choices(pricing, work, 0) for work in works]


def transport(
    topology: Topology, prices: Prices, operation: str, ranks: int, sizes: Sequence[float] = (MIB,), algorithm: str = "auto"
) -> tuple[tuple[int, int], dict[str, float], list[str]]:
    """(ranks, nodes) of `operation` among the first `ranks` GPUs, the kinds of links that it takes, see
    `CollectiveCosts.transport`, and caveats of its prices. Raises UserError.
    """
    pricing, works = lone(topology, prices, operation, ranks, sizes, algorithm)
    for work in works:
        pricing.collective(work, 0)
    return *pricing.transport(works[0], 0), joined(pricing.notes)


def _choices(pricing: CollectiveCosts, work: Collective | Send, cohort: int) -> list[Point]:
    chosen, *others = (
        Point(work.bytes, cost.traffic.algorithm.split("/")[1], cost.protocol, cost.alone)
        for cost in pricing.options(work, cohort)
    )
    return [chosen, *sorted(others, key=lambda point: point.seconds)]


def of_step(timeline: Timeline, sizes: Sequence[float], most: int = 2) -> list[Sweep]:
    """Sweeps of the operations that send most bytes along the (at most `most`) busiest axes of a step, priced among all groups of
    the job at once.
    """
    sent: dict[tuple[str, str], float] = {}
    works: dict[tuple[str, str], dict[float, tuple[Collective, int]]] = {}  # by axis and operation, by bytes
    op_costs = timeline.op_costs
    for lane, _, op, count in timeline.distinct:
        cohort, ranks = timeline.lanes[lane].cohort, timeline.lanes[lane].ranks
        for repeats, work in op.work.collectives if isinstance(op.work, Block) else [(1, op.work)]:
            if isinstance(work, Collective):
                key = work.axis, work.operation
                sent[key] = sent.get(key, 0.0) + count * repeats * ranks * op_costs.collective(work, cohort).sent
                works.setdefault(key, {})[work.bytes] = work, cohort
    busiest: dict[str, tuple[str, str]] = {}
    for key in sorted((key for key in sent if sent[key]), key=lambda key: (-sent[key], key)):
        busiest.setdefault(key[0], key)
    return [_swept(timeline, axis, works[key], sizes) for axis, key in list(busiest.items())[:most]]


def _swept(timeline: Timeline, axis: str, used: dict[float, tuple[Collective, int]], sizes: Sequence[float]) -> Sweep:
    work, cohort = used[max(used)]
    ranks = 2 if work.cohorts else timeline.program.grid.size(work.axes)
    table = [_choices(timeline.op_costs, replace(work, bytes=size, repeat=1), cohort) for size in sizes]
    return Sweep(work.operation, f"{axis}, groups of {ranks} ranks", ranks, table, used=sorted(used))
