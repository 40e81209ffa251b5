"""The stepped form against another simulator: all-reduces of ASTRA-sim's analytical network, tests/data/astra_sim_all_reduce.csv.

ASTRA-sim charges a fixed delay at every endpoint and time in local memory for each reduction. Neither is a network's: the delay
is part of our links' latency, and the memory time (3·⌊bytes/1600⌋ ns, one reduction after the other) is added here. It counts in
whole nanoseconds.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sim.collectives import Place, algorithms
from sim.engine.stepped import stepped
from topologies.board import KINDS
from topologies.links.topology import Ids, Values

DATA = Path(__file__).parents[2] / "data" / "astra_sim_all_reduce.csv"
ROWS = list(csv.DictReader(line for line in DATA.read_text().splitlines() if line[0] != "#"))
NAMES = {"ring": "ring", "direct": "direct", "halvingDoubling": "halving_doubling"}


@dataclass(frozen=True)
class Pairs:
    """A way of its own from every GPU to every other, as long as it is in `wiring`: what a network without congestion is."""

    gpus: int
    wiring: str
    rate: float  # bytes per second
    hop: float  # seconds per hop
    end: float  # seconds per message

    kinds = ("nvlink",)

    @property
    def links(self) -> int:
        return self.gpus**2

    def routes(self, source: Ids, destination: Ids) -> Ids:
        return (source * self.gpus + destination)[:, None]

    def node_of(self, gpu: Ids) -> Ids:
        return np.zeros_like(gpu)

    def kind(self, link: Ids) -> Ids:
        return np.zeros_like(link)

    def capacity(self, link: Ids) -> Values:
        return np.full(np.shape(link), self.rate)

    def latency(self, link: Ids) -> Values:
        apart = np.abs(link // self.gpus - link % self.gpus)
        hops = {
            "Ring": np.minimum(apart, self.gpus - apart),
            "FullyConnected": np.ones_like(apart),
            "Switch": np.full_like(apart, 2),
        }
        return hops[self.wiring] * self.hop + self.end

    def name(self, link: int) -> str:
        return f"gpu {link // self.gpus} to {link % self.gpus}"


def memory(algorithm: str, n: int, size: int) -> int:
    """Nanoseconds that ASTRA-sim spends on reductions."""
    if algorithm == "halvingDoubling":
        return sum(3 * int(size / 2**i / 1600) for i in range(2, n.bit_length()))
    return 3 * int(size / n / 1600) * (n - 1 if algorithm == "ring" else 1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(list(row.values())[:6]))
def test_stepped_agrees_with_astra_sim(row, toy_profile) -> None:
    n, size, delay = int(row["npus"]), int(row["bytes"]), float(row["endpoint_delay_ns"])
    rate = float(row["bw_GBps"]) * 2**30  # its GB is 2³⁰ bytes
    topology = Pairs(n, row["topology"], rate, float(row["lat_ns"]) * 1e-9, delay * 1e-9)
    plan = algorithms[f"all_reduce/{NAMES[row['algorithm']]}"](Place((0,) * n))
    links = {kind: {"efficiency": 1.0, "latency": "0 s"} for kind in KINDS}
    seconds = stepped(plan, np.arange(n)[None], size, topology, toy_profile(links=links))
    assert seconds * 1e9 + memory(row["algorithm"], n, size) + delay == pytest.approx(int(row["time_ns_max"]), rel=1e-3)
