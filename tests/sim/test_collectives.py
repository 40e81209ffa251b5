"""Schedules move real arrays to the right result, send what theory says, and fluid equals stepped."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sim.collectives import Place, Schedule, algorithms
from sim.grid import Grid
from sim.pricing import Pricing
from sim.program import Cohort, Collective, Op, Program
from sim.stepped import stepped
from sim.wiring import endpoints, schedule

PLACES = [Place((0,) * n) for n in range(2, 18)] + [
    Place(tuple(i // k for i in range(n * k))) for n in (2, 3, 4) for k in (2, 3, 4)
]
PLACES += [Place((0, 0, 0, 1, 1)), Place((0, 1, 0, 1))]


def play(plan: Schedule, buffers: np.ndarray) -> np.ndarray:
    """Move buffers (members, chunks, width) by the schedule, every round from the state before it."""
    for phase in plan.phases:
        for turn in range(phase.times):
            before = buffers.copy()
            for source, destination, chunk in zip(phase.source, phase.destination, phase.chunk(turn), strict=True):
                if phase.reduce:
                    buffers[destination, chunk] += before[source, chunk]
                else:
                    buffers[destination, chunk] = before[source, chunk]
    return buffers


def random(plan: Schedule, size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(-1000, 1000, (size, plan.chunks, 3))


@pytest.mark.parametrize("place", PLACES, ids=lambda p: "".join(map(str, p.node)))
def test_ring_gives_the_mathematical_result(place: Place) -> None:
    n = place.size
    reduce = algorithms["all_reduce/ring"](place)
    given = random(reduce, n)
    assert (play(reduce, given.copy()) == given.sum(axis=0)).all()

    scatter = algorithms["reduce_scatter/ring"](place)
    own = np.arange(scatter.chunks).reshape(n, -1)  # member-major pieces
    given = random(scatter, n)
    result = play(scatter, given.copy())
    for member in range(n):
        assert (result[member, own[member]] == given.sum(axis=0)[own[member]]).all()

    gather = algorithms["all_gather/ring"](place)
    given = random(gather, n)
    start = np.zeros_like(given)
    for member in range(n):
        start[member, own[member]] = given[member, own[member]]
    everything = np.concatenate([given[member, own[member]] for member in range(n)])
    assert (play(gather, start) == everything).all()


@pytest.mark.parametrize("n", range(2, 18))
@pytest.mark.parametrize("name", ["flat", "binomial"])
def test_broadcast_reaches_everybody(name: str, n: int) -> None:
    plan = algorithms[f"broadcast/{name}"](Place((0,) * n))
    given = random(plan, n)
    assert (play(plan, given.copy()) == given[0]).all()
    assert len(plan.phases) == (n - 1 if name == "flat" else math.ceil(math.log2(n)))
    assert sum(len(phase.source) for phase in plan.phases) == n - 1  # everybody receives it once


@pytest.mark.parametrize("place", PLACES, ids=lambda p: "".join(map(str, p.node)))
def test_ring_volumes_are_nccl_tests_factors(place: Place) -> None:
    n = place.size
    for operation, factor in (("all_reduce", 2 * (n - 1) / n), ("all_gather", (n - 1) / n), ("reduce_scatter", (n - 1) / n)):
        assert algorithms[f"{operation}/ring"](place).sent(n) == pytest.approx(np.full(n, factor))


def both(operation: str, algorithm: str, size: float, axis: str, grid: Grid, cluster, prices) -> tuple[float, float]:
    """Seconds (fluid, stepped) of one collective of all groups along the axis."""
    work = Collective(operation, size, axis, "test", algorithm)
    program = Program(grid, [Cohort({}, [Op("s", work)])], 1, 1, "bf16", 1, 1)
    topology = cluster.topology()
    fluid = Pricing(program, topology, prices).collective(work, 0)
    plan = schedule(topology, grid, fluid.traffic)
    return fluid.alone, stepped(plan, endpoints(topology, grid, fluid.traffic), size, topology, prices.profile)


LINKS = {kind: {"efficiency": 0.8, "latency": "2 us"} for kind in ("nvlink", "pcie", "host", "nic", "leaf", "spine", "loopback")}
ALL = [
    ("all_reduce", "ring"),
    ("all_gather", "ring"),
    ("reduce_scatter", "ring"),
    ("broadcast", "flat"),
    ("broadcast", "binomial"),
]


@pytest.mark.parametrize(("operation", "algorithm"), ALL)
@pytest.mark.parametrize("size", [1e3, 1e8])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_fluid_equals_stepped_behind_a_switch(operation, algorithm, size, n, toy_cluster, toy_prices) -> None:
    prices = toy_prices(links=LINKS, collective_launch="5 us")
    cluster = toy_cluster(n, latency={"nvlink": "1 us", "pcie": "1 us", "nic": "3 us"})
    fluid, reference = both(operation, algorithm, size, "dp", Grid.of(dp=n), cluster, prices)
    if (algorithm, n) == ("binomial", 5):  # the last round's path is one hop shorter than the longest: fluid adds the longest
        assert reference < fluid < reference + 3.1e-6
    else:
        assert fluid == pytest.approx(reference, rel=1e-6)


@pytest.mark.parametrize(("operation", "algorithm"), ALL)
@pytest.mark.parametrize("size", [1e3, 1e8])
@pytest.mark.parametrize(("tp", "nodes"), [(8, 4), (8, 2), (1, 2), (4, 4)])
def test_fluid_and_stepped_across_nodes(operation, algorithm, size, tp, nodes, toy_cluster, toy_prices) -> None:
    """One member per node agrees exactly; rings through fast and slow links agree to a tenth."""
    prices = toy_prices(links=LINKS | {"nic": {"efficiency": 0.9, "latency": "10 us"}})
    cluster = toy_cluster(8, nodes, nvlink="8 GB/s")
    fluid, reference = both(operation, algorithm, size, "dp", Grid.of(tp=tp, dp=8 * nodes // tp), cluster, prices)
    assert fluid == pytest.approx(reference, rel=1e-6 if tp == 8 else 0.1)


def test_ring_time_is_flat_in_n_for_large_messages_and_linear_for_small_ones(toy_cluster, toy_prices) -> None:
    prices = toy_prices(links=LINKS)
    large, small = ([both("all_reduce", "ring", size, "dp", Grid.of(dp=n), toy_cluster(n), prices)[0] for n in (4, 8, 16)]
                    for size in (1e10, 1.0))  # fmt: skip
    assert large[2] / large[0] == pytest.approx((15 / 16) / (3 / 4), rel=1e-3)
    assert small[2] / small[0] == pytest.approx(15 / 3, rel=1e-2)


def test_seven_friends(toy_cluster, toy_prices) -> None:
    """5 MB to 7 friends at 1 MB/s: 35 s one by one, 15 s by a binomial tree."""
    cluster = toy_cluster(8, nvlink="1 MB/s")
    for algorithm, seconds in (("flat", 35.0), ("binomial", 15.0)):
        fluid, reference = both("broadcast", algorithm, 5e6, "dp", Grid.of(dp=8), cluster, toy_prices())
        assert fluid == pytest.approx(seconds)
        assert reference == pytest.approx(seconds)


def test_auto_takes_the_cheapest(toy_cluster, toy_prices) -> None:
    """A pipeline of 64 pieces: 5 s for all of them and 6 hops of the first."""
    cluster = toy_cluster(8, nvlink="1 MB/s")
    assert both("broadcast", "auto", 5e6, "dp", Grid.of(dp=8), cluster, toy_prices())[0] == pytest.approx(5 * (1 + 6 / 64))
