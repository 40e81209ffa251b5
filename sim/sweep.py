"""One collective at a time on an idle cluster: what nccl-tests measures, for every algorithm and protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.grid import Grid
from sim.prices import Prices
from sim.pricing import Pricing
from sim.program import Cohort, Collective, Op, Program
from topologies.reading import UserError
from topologies.topology import Topology

_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "gather": 1.0, "scatter": 1.0}


class Point(NamedTuple):
    """The price of one collective of `bytes` (full buffer S) by one algorithm and protocol, in seconds."""

    bytes: float
    algorithm: str
    protocol: str
    seconds: float

    @property
    def name(self) -> str:
        """As a plan spells it: "ring/ll128"."""
        return f"{self.algorithm}/{self.protocol}"


def bus_factor(operation: str, ranks: int) -> float:
    """busbw / algbw, where algbw = S / seconds (nccl-tests doc/PERFORMANCE.md): all-reduce 2(n−1)/n, broadcast and reduce 1."""
    return _FACTORS[operation] * (ranks - 1) / ranks if operation in _FACTORS else 1.0


def lone(
    topology: Topology, prices: Prices, operation: str, ranks: int, sizes: Sequence[float], algorithm: str = "auto"
) -> tuple[Pricing, list[Collective]]:
    """Prices of `operation` among the first `ranks` GPUs, and one collective per size. Raises UserError."""
    if not 2 <= ranks <= topology.gpus:
        raise UserError(f"ranks={ranks}: must be at least 2 and at most the cluster's {topology.gpus} GPUs")
    works = [Collective(operation, size, "dp", operation, algorithm) for size in sizes]
    program = Program(Grid.of(dp=ranks), [Cohort({}, [Op("s", work) for work in works])], 1, 1, "bf16", 1, 1)
    return Pricing(program, topology, prices), works


def sweep(
    topology: Topology, prices: Prices, operation: str, ranks: int, sizes: Sequence[float], algorithm: str = "auto"
) -> list[list[Point]]:
    """For each size, every choice that may run it, the cheapest first. Raises UserError."""
    pricing, works = lone(topology, prices, operation, ranks, sizes, algorithm)
    table = []
    for work in works:
        options = [Point(work.bytes, p.traffic.algorithm.split("/")[1], p.protocol, p.alone) for p in pricing.options(work, 0)]
        table.append(sorted(options, key=lambda point: point.seconds))
    return table
