"""Fluid equals stepped; what collectives cost as the group grows. That schedules are right: test_schedules.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.collectives import NotApplicable, algorithms
from sim.engine.player import run
from sim.engine.stepped import stepped
from sim.grid import Grid
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.pricing.transfers import wiring
from sim.pricing.transfers.traffic import Traffic
from sim.pricing.transfers.wiring import applicable, endpoints, schedule
from sim.program import Cohort, Collective, Op, Program
from topologies.cluster import Cluster
from topologies.reading import UserError


def both(operation: str, algorithm: str, size: float, axis: str, grid: Grid, cluster, prices) -> tuple[float, float]:
    """Seconds (fluid, stepped) of one collective of all groups along the axis."""
    work = Collective(operation, size, axis, "test", algorithm)
    program = Program(grid, [Cohort({}, [Op("s", work)])], 1, 1, "bf16", 1, 1)
    topology = cluster.topology()
    fluid = OpCosts(program, topology, prices).collective(work, 0)
    plan = schedule(topology, grid, fluid.traffic)
    return fluid.alone, stepped(plan, endpoints(topology, grid, fluid.traffic), size, topology, prices.profile)


LINKS = {kind: {"efficiency": 0.8, "latency": "2 us"} for kind in ("nvlink", "pcie", "host", "nic", "leaf", "spine", "loopback")}
# By how much fluid may differ from stepped: lowest and highest ratio minus 1; (0, 0) is equality but for the clock's grid.
# Where it differs:
#  binomial: the fluid form adds the longest path of hops to the slowest rounds, which need not be the same path;
#  trees, in the switch: other pieces use the time that the first one waits out its latency, which the fluid form lets pass;
#  rings and chains through fast and slow links: another channel is the slowest in another round, fluid adds them up;
#  pairwise, Bruck, recursive doubling beyond 2^k: members whose rounds are short run ahead and meet the others' transfers.
BEHIND_A_SWITCH = {
    "all_reduce/in_switch": (-0.008, 0.05),
    "all_reduce/rabenseifner": (-0.18, 0),
    "all_reduce/recursive_doubling": (-0.28, 0),
    "all_reduce/tree": (0, 0.08),
    "broadcast/binomial": (0, 0.11),
    "reduce/binomial": (0, 0.11),
    "gather/binomial": (0, 0.03),
}
ACROSS_NODES = {
    "all_gather/bruck": (-0.19, 0.02),
    "reduce_scatter/bruck": (0, 0.02),
    "all_to_all/bruck": (-0.30, 0.06),
    "all_to_all/pairwise": (-0.31, 0.01),
    "all_reduce/recursive_doubling": (-0.29, 0),
    "all_reduce/tree": (-0.02, 0.05),
    "all_gather/ring": (0, 0.01),
    "reduce_scatter/ring": (0, 0.01),
    "all_reduce/ring": (0, 0.01),
    "broadcast/chain": (0, 0.21),
    "reduce/chain": (0, 0.23),
    "gather/flat": (0, 0.13),
    "reduce/flat": (0, 0.13),
    "all_reduce/in_switch_tree": (-0.02, 0.05),
    "all_reduce/collnet_chain": (-0.02, 0.02),
    "all_reduce/collnet_direct": (-0.02, 0.02),
    "all_reduce/in_switch_collnet": (-0.02, 0.02),
}
LINKS = {kind: {"efficiency": 0.8, "latency": "2 us"} for kind in ("nvlink", "pcie", "host", "nic", "leaf", "spine", "loopback")}
ALL = [name for name in algorithms if not name.startswith(("send", "all_to_allv"))]
SIZES = (1e3, 1e8)


def compare(name: str, tolerance: tuple[float, float], cases: list[tuple[Grid, Cluster]], prices: Prices) -> None:
    for grid, cluster in cases:
        for size in SIZES:
            try:
                fluid, reference = both(*name.split("/"), size, "dp", grid, cluster, prices)
            except NotApplicable:
                continue
            assert tolerance[0] - 1e-5 <= fluid / reference - 1 <= tolerance[1] + 1e-5, (size, grid, cluster.nodes)


@pytest.mark.parametrize("name", ALL)
def test_fluid_equals_stepped_behind_a_switch(name, toy_cluster, toy_prices) -> None:
    prices = toy_prices(links=LINKS, collective_launch="5 us")
    latency = {"nvlink": "1 us", "pcie": "1 us", "nic": "3 us"}
    cases = [(Grid.of(dp=n), toy_cluster(n, latency=latency, multicast=True)) for n in (2, 3, 5, 8, 16)]
    compare(name, BEHIND_A_SWITCH.get(name, (0, 0)), cases, prices)


@pytest.mark.parametrize("name", ALL)
def test_fluid_equals_stepped_between_nodes_of_one_member(name, toy_cluster, toy_prices) -> None:
    """Eight sibling groups at a time, each with a NIC of its own: as exact as behind a switch."""
    prices = toy_prices(links=LINKS | {"nic": {"efficiency": 0.9, "latency": "10 us"}})
    cases = [(Grid.of(tp=8, dp=nodes), toy_cluster(8, nodes, nvlink="8 GB/s", sharp=3)) for nodes in (2, 4, 5)]
    compare(name, BEHIND_A_SWITCH.get(name, (0, 0)), cases, prices)


@pytest.mark.parametrize("name", ALL)
def test_fluid_and_stepped_across_nodes(name, toy_cluster, toy_prices) -> None:
    prices = toy_prices(links=LINKS | {"nic": {"efficiency": 0.9, "latency": "10 us"}})
    sizes = [(1, 2), (4, 4), (1, 3), (1, 8)]
    cases = [
        (Grid.of(tp=tp, dp=8 * nodes // tp), toy_cluster(8, nodes, nvlink="8 GB/s", multicast=True, sharp=3))
        for tp, nodes in sizes
    ]
    compare(name, ACROSS_NODES.get(name, (0, 0)), cases, prices)


@pytest.mark.parametrize("name", ALL)
def test_one_of_each_class_stands_for_all(name, toy_cluster, toy_prices) -> None:
    """Playing every transfer by itself gives the same time, of symmetric clusters and others."""
    profile = toy_prices(links=LINKS | {"nic": {"efficiency": 0.9, "latency": "10 us"}}).profile
    for gpus, nodes, tp in ((5, 1, 1), (8, 1, 1), (4, 2, 1), (4, 3, 2)):
        topology, grid = toy_cluster(gpus, nodes, multicast=True, sharp=3).topology(), Grid.of(tp=tp, dp=gpus * nodes // tp)
        traffic = Traffic(name, ("dp",), ())
        if applicable(topology, grid, traffic):
            plan = replace(schedule(topology, grid, traffic), pieces=min(4, schedule(topology, grid, traffic).pieces))
            ends = endpoints(topology, grid, traffic)
            folded, unfolded = (stepped(plan, ends, 1e6, topology, profile, fold=fold) for fold in (True, False))
            assert folded == pytest.approx(unfolded, rel=1e-9), (gpus, nodes, tp)


def test_a_forced_algorithm_that_does_not_work_is_one_line(toy_cluster, toy_prices) -> None:
    for name, reason in (
        ("halving_doubling", "n=6 is not a power of two"),
        ("in_switch", "no switch beside all members"),
        ("hierarchical", "needs several nodes"),
    ):
        with pytest.raises(UserError, match=f"all_reduce/{name}: {reason}"):
            both("all_reduce", name, 1.0, "dp", Grid.of(dp=6), toy_cluster(6), toy_prices())


def test_the_switch_saves_a_third_of_an_all_reduce(toy_cluster, toy_prices) -> None:
    """8 GB over 1 GB/s: 14 s around the ring; 9 s each way through the switch, where the first of 64 pieces takes four rounds."""
    cluster = toy_cluster(8, multicast=True)
    assert both("all_reduce", "ring", 8e9, "dp", Grid.of(dp=8), cluster, toy_prices())[0] == pytest.approx(14.0)
    assert both("all_reduce", "auto", 8e9, "dp", Grid.of(dp=8), cluster, toy_prices())[0] == pytest.approx((9 * 63 + 18) / 64)


def test_all_to_allv_takes_as_long_as_its_fullest_port(toy_cluster, toy_prices) -> None:
    """Member 0 has 6 for others of 8 in all, S = 8 GB: 6 s at 1 GB/s."""
    counts = ((2, 3, 1, 2), (1, 0, 1, 1), (0, 0, 1, 1), (4, 1, 0, 0))
    work = Collective("all_to_allv", 8e9, "dp", "experts", "direct", counts=counts)
    program = Program(Grid.of(dp=4), [Cohort({}, [Op("s", work)])], 1, 1, "bf16", 1, 1)
    price = OpCosts(program, toy_cluster(4).topology(), toy_prices()).collective(work, 0)
    assert price.alone == pytest.approx(6.0)
    assert price.sent == pytest.approx(6e9)


def test_broadcast_is_logarithmic_by_a_tree_linear_one_by_one_and_flat_in_a_chain(toy_cluster, toy_prices) -> None:
    """Seconds for 1 GB at 1 GB/s to n members: what a classroom computes."""
    table = {
        name: [both("broadcast", name, 1e9, "dp", Grid.of(dp=n), toy_cluster(n), toy_prices())[0] for n in (2, 4, 8, 16, 32)]
        for name in ("flat", "binomial", "chain")
    }
    assert table["flat"] == pytest.approx([1, 3, 7, 15, 31])
    assert table["binomial"] == pytest.approx([1, 2, 3, 4, 5])
    assert table["chain"] == pytest.approx([1 + (n - 2) / 64 for n in (2, 4, 8, 16, 32)])


def played(algorithm: str, grid: Grid, cluster: Cluster, prices: Prices) -> float:
    """Seconds of a step that consists of a broadcast of 1 GB."""
    work = Collective("broadcast", 1e9, "dp", "test", algorithm)
    return run(Program(grid, [Cohort({}, [Op("s", work)])], 1, 1, "bf16", 1, 1), cluster.topology(), prices).step


def test_a_collective_of_many_short_rounds_is_played(toy_cluster, toy_prices) -> None:
    """None of 31 rounds is longer than a sixteenth of them all."""
    assert played("flat", Grid.of(dp=32), toy_cluster(32), toy_prices()) == pytest.approx(31)


def test_a_chain_of_thousands_is_priced_as_its_hops(toy_cluster, toy_prices, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of 64 pieces takes n − 2 hops more; hops inside nodes and between them stand for all others of their sort."""
    assert played("chain", Grid.of(dp=1600), toy_cluster(1, nodes=1600), toy_prices()) == pytest.approx(1 + 1598 / 64)
    grid, topology = Grid.of(dp=120), toy_cluster(8, nodes=15, nic="2 GB/s").topology()
    traffic = Traffic("broadcast/chain", ("dp",), ())
    few = wiring.stretches.__wrapped__(topology, grid, traffic)
    monkeypatch.setattr(wiring, "MANY", 1000)
    every = wiring.stretches.__wrapped__(topology, grid, traffic)
    assert len(few) < 12 < len(every) == 120
    for total in (
        share_of,
        lambda stretches: sum(stretch.wire for stretch in stretches),
        lambda stretches: sum(stretch.steps for stretch in stretches).tolist(),
    ):
        assert total(few) == pytest.approx(total(every))


def share_of(stretches: tuple[wiring.Stretch, ...]) -> float:
    """Bytes on all links, as a part of the buffer."""
    return sum(stretch.share * float(stretch.flows.sum()) for stretch in stretches)


def test_ring_time_is_flat_in_n_for_large_messages_and_linear_for_small_ones(toy_cluster, toy_prices) -> None:
    prices = toy_prices(links=LINKS)
    large, small = (
        [both("all_reduce", "ring", size, "dp", Grid.of(dp=n), toy_cluster(n), prices)[0] for n in (4, 8, 16)]
        for size in (1e10, 1.0)
    )
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
