"""Speed of one collective: `make bench`. Pairs are timed in turns, so that the machine's noise is in both."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import pytest

from sim.collectives import Place, algorithms
from sim.engine.stepped import stepped
from sim.grid import Grid
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.pricing.transfers import link_merging as merging
from sim.pricing.transfers import wiring
from sim.pricing.transfers.traffic import Traffic
from sim.pricing.transfers.wiring import endpoints, schedule
from sim.program import Cohort, Collective, Op, Program
from topologies.cluster_files import load_cluster

pytestmark = pytest.mark.benchmark
RING = Traffic("all_reduce/ring", ("dp",), ())
PROFILE = load_profile("h100")


def seconds(action: Callable[[], object], times: int = 5) -> float:
    durations = []
    for _ in range(times):
        start = perf_counter()
        action()
        durations.append(perf_counter() - start)
    return median(durations)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "auto"])
@pytest.mark.parametrize("nodes", [128, 2048])
def test_fluid(nodes: int, algorithm: str) -> None:
    """An all-reduce of 1,024 and 16,384 ranks priced on a cluster that has seen it before, and for the first time."""
    cluster = load_cluster("dgx-h100", nodes=nodes)
    work = Collective("all_reduce", 1e9, "dp", "test", algorithm)
    program = Program(Grid.of(dp=cluster.gpus), [Cohort({}, [Op("s", work)])], 1, 1, "bf16", 1, 1)
    topology, prices = cluster.topology(), Prices(PROFILE, cluster.node.gpu)

    def price() -> float:
        return OpCosts(program, topology, prices).collective(work, 0).alone

    def first() -> float:
        for cached in (*vars(wiring).values(), *vars(merging).values()):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        return price()

    cold = seconds(first, 3)
    warm = seconds(price)
    print(f"\nfluid all-reduce/{algorithm} over {cluster.gpus} ranks: {warm * 1e3:.2f} ms; first time {cold * 1e3:.0f} ms")
    assert warm < 5e-3


@pytest.mark.parametrize("name", ["aws-p5", "dgx-h100"])
def test_stepped(name: str) -> None:
    """A ring all-reduce of 1,024 ranks, every round played: on a fabric where all nodes are alike, and on four leaves."""
    took = {}
    for nodes in (16, 128):
        topology, grid = load_cluster(name, nodes=nodes).topology(), Grid.of(dp=8 * nodes)
        plan, ends = schedule(topology, grid, RING), endpoints(topology, grid, RING)
        took[nodes] = seconds(lambda t=topology, p=plan, e=ends: stepped(p, e, 1e9, t, PROFILE), 1 if name == "dgx-h100" else 3)
    tracemalloc.start()
    stepped(plan, ends, 1e9, topology, PROFILE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(
        f"\nstepped ring over 1,024 ranks of {name}: {took[128]:.2f} s, {took[128] / took[16]:.0f} times that over 128, "
        f"{peak / 1e6:.0f} MB"
    )
    assert peak < 350e6


def test_one_of_each_class() -> None:
    """What playing one of each class saves, on 64 ranks of one switch."""
    topology, plan, ends = (
        load_cluster("gb200-nvl72").topology(),
        algorithms["all_reduce/ring"](Place((0,) * 64)),
        np.arange(64)[None],
    )
    folded, each = (
        seconds(lambda fold=fold: stepped(plan, ends, 1e9, topology, PROFILE, fold=fold), 3) for fold in (True, False)
    )
    print(f"\nstepped ring over 64 ranks behind one switch: {folded * 1e3:.1f} ms, all transfers {each / folded:.0f} times that")
    assert folded < each
