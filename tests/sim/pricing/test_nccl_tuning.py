"""NCCL's own estimate decides between rings and trees."""

from __future__ import annotations

import pytest

from sim.analysis.collective_sweep import lone, sweep
from sim.grid import Grid
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.pricing.transfers.nccl_tuning import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    VOLTA,
    Communicator,
    Limits,
    by_estimate,
    chunks,
    communicator,
    limits_of,
    prefers_rings,
)
from sim.pricing.transfers.traffic import Traffic
from strategies.predict import predict
from strategies.read_job import read_job
from topologies.cluster_files import load_cluster, load_gpu


def test_rings_are_for_large_messages_and_few_nodes() -> None:
    """Latency of rings grows with the ranks, of trees with log₂ of the nodes; bytes of rings count 2(n−1)/n, of trees 2.

    Two nodes of eight A100 by hand, in Simple above 256 MiB, where no table corrects the tree: 125.6 us and 2/188.8 ns per byte,
    8 channels of 23.6 GB/s, against 167 us and 1.875/192: rings are first from 50 MB on, but for LL128 and the table.
    """
    two = Communicator(16, 2, 240e9, 192e9, 8, AMPERE)
    assert prefers_rings(two, 300e6)
    assert not prefers_rings(two, 1e6)
    first = []
    for nodes in (4, 16, 64):
        many = Communicator(8 * nodes, nodes, 240e9, 192e9, 8, AMPERE)
        turns = [prefers_rings(many, 2.0**power) for power in range(10, 40)]
        assert turns == sorted(turns)
        first.append(turns.index(True))
    assert first == sorted(set(first))  # the more nodes, the later


@pytest.mark.parametrize(
    ("inside", "nic", "limits", "rings"),
    [
        (240e9, 24e9, AMPERE, True),  # 4 · 23.6 / 2 GB/s of a tree, 4 · 24 · 16/30 of a ring
        (240e9, 12e9, AMPERE, False),  # p4de: trees twice as fast inside as the NICs, 78 GB/s measured where rings have 50
        (360e9, 24e9, HOPPER, False),  # Alps: 123 GB/s measured where rings have 100
    ],
)
def test_a_channel_of_a_tree_counts_for_so_much_at_most(inside: float, nic: float, limits: Limits, rings: bool) -> None:
    """Two nodes with four NICs each, 1 GiB."""
    assert prefers_rings(Communicator(16, 2, inside, 4 * nic, 4, limits), 2.0**30) == rings


@pytest.mark.parametrize(("ranks", "mib"), [(2, 16), (4, 16), (5, 10), (8, 16), (72, 36)])
def test_peers_share_the_channels_of_point_to_point_messages(ranks: int, mib: int) -> None:
    """16, 8, 4, 4 of 32 channels for each peer, and one where there are more peers than channels: a chunk of 512 KiB in each."""
    assert 1 / chunks(ranks) == mib * 2**20


def test_only_grouped_messages_within_a_node_have_chunks() -> None:
    cluster = load_cluster("dgx-h100", nodes=2)
    prices = Prices(load_profile("h100"), cluster.node.gpu)

    def parts(operation: str, ranks: int) -> set[float]:
        pricing, (work,) = lone(cluster.topology(), prices, operation, ranks, [1.0])
        return {shape.chunks for shape in pricing.shapes(work, 0).values()}

    assert parts("all_to_all", 8) == {chunks(8)}
    assert parts("all_to_all", 16) == parts("all_gather", 8) == {0.0}


def test_what_the_links_give_a_communicator() -> None:
    topology, grid = load_cluster("dgx-a100", nodes=4).topology(), Grid.of(tp=4, dp=8)
    dp, tp = Traffic("", ("dp",), ()), Traffic("", ("tp",), ())
    assert communicator(topology, grid, dp, AMPERE) == Communicator(8, 4, 240e9, 48e9, 2, AMPERE)  # two of eight NICs
    assert communicator(topology, grid, tp, AMPERE) == Communicator(4, 1, 240e9, 0.0, 12, AMPERE)  # inside a node
    assert communicator(load_cluster("mi300x").topology(), Grid.of(dp=8), dp, HOPPER) is None  # without a switch
    assert communicator(load_cluster("pcie-l40s", nodes=2).topology(), Grid.of(dp=16), dp, AMPERE) is None


def test_few_fast_channels_become_twice_as_many() -> None:
    """A channel on each NIC of 400 Gb/s, 48 GB/s: up to four are doubled on Hopper, eight are not."""
    topology, traffic = load_cluster("dgx-h100", nodes=4).topology(), Traffic("", ("dp",), ())
    assert communicator(topology, Grid.of(tp=8, dp=4), traffic, HOPPER) == Communicator(4, 4, 48e9, 48e9, 2, HOPPER)
    assert communicator(topology, Grid.of(dp=32), traffic, HOPPER) == Communicator(32, 4, 360e9, 384e9, 8, HOPPER)


def test_nics_count_for_what_pcie_lets_through() -> None:
    """16 lanes of PCIe 5 are 48 GB/s to NCCL, as a NIC of 400 Gb/s is; faster ones are known as faster behind PCIe 6 only."""
    grid, traffic = Grid.of(dp=16), Traffic("", ("dp",), ())
    usual, fast, both = (
        communicator(load_cluster("dgx-h100", 2, node).topology(), grid, traffic, HOPPER)
        for node in ({}, {"node.nic": "800 Gb/s"}, {"node.nic": "800 Gb/s", "node.pcie": "118 GB/s"})
    )
    assert usual == fast == Communicator(16, 2, 360e9, 384e9, 8, HOPPER)
    assert both is not None
    assert both.across == 8 * 96e9


def test_faster_nics_make_no_step_longer() -> None:
    """Counted for their own rate, they had NCCL run what takes longer where PCIe holds them up: 7 % of this step."""
    job = {"model": "gpt3-175b", "cluster": "dgx-h100", "nodes": 2, "plan": {"tp": 2, "sequence": 2048, "accumulation": 2}}
    usual, fast = (
        predict(read_job(job, {"model.layers": 8, "cluster.node.nic": nic})).ideal_seconds for nic in ("400 Gb/s", "800 Gb/s")
    )
    assert 0.9 * usual < fast <= usual


@pytest.mark.parametrize(("name", "limits"), [("v100", VOLTA), ("a100", AMPERE), ("h100", HOPPER), ("b200", BLACKWELL)])
def test_limits_are_of_a_generation(name: str, limits: Limits) -> None:
    assert limits_of(load_gpu(load_profile(name).gpu)) == limits


def test_two_nodes_of_a100_run_rings_though_trees_would_be_faster() -> None:
    """Measured on two nodes of ND A100 v4 (Azure, InfiniBand): 187 GB/s from 512 MB on; rings fill eight NICs of 25 GB/s, and
    trees would reach the 240 of NVLink.
    """
    cluster = load_cluster("dgx-a100", nodes=2)
    prices = Prices(load_profile("a100"), cluster.node.gpu)
    pricing, (work,) = lone(cluster.topology(), prices, "all_reduce", 16, [2.0**31])
    cost = pricing.collective(work, 0)
    assert cost.traffic.algorithm == "all_reduce/ring"
    assert 2 * 15 / 16 * work.bytes / cost.alone == pytest.approx(187e9, rel=0.08)
    ((first, second, *_),) = sweep(cluster.topology(), prices, "all_reduce", 16, [2.0**31])
    assert (first.algorithm, second.algorithm) == ("ring", "tree")
    assert first.seconds > second.seconds
    _, (tree,) = lone(cluster.topology(), prices, "all_reduce", 16, [2.0**31], "tree")
    assert lone(cluster.topology(), prices, "all_reduce", 16, [2.0**31], "tree")[0].collective(tree, 0).alone < cost.alone


@pytest.mark.parametrize(
    ("inside", "channels", "limits", "first"),
    [
        (240e9, 12, AMPERE, 2**20),  # A100: 19.4 us, then 40.8
        (360e9, 12, HOPPER, 2**21),  # H100: 14.7 us, then 27.9; H200: 14.3, then 26.8
        (720e9, 8, BLACKWELL, 2**22),  # B200: 18.9 us, then 36.8; GB200: 19.3, then 38.3
    ],
)
def test_two_gpus_leave_ll_where_their_time_doubles(inside: float, channels: int, limits: Limits, first: int) -> None:
    """All-reduces of two GPUs behind a switch, measured by powers of two (github.com/ai-dynamo/aiconfigurator, nccl_perf)."""
    group = Communicator(2, 1, inside, 0.0, channels, limits)
    ways = [("all_reduce/ring", protocol) for protocol in ("ll", "ll128", "simple")] + [("all_reduce/tree", "ll")]
    for power in range(9, 30):
        protocol = "ll" if 2**power < first else "simple"
        assert by_estimate(group, ways, 2.0**power, 0.0) == [("all_reduce/ring", protocol)]


def test_eight_gpus_run_what_their_times_show() -> None:
    """All-gathers leave LL128 where the measured time nearly doubles: A100 73.5 us of 8 MiB and 135 of 16, H100 68.9 of 16 and
    125.5 of 32, B200 (from LL) 44.2 of 8 and 103.9 of 16. All-reduces of H100 and B200 are reduced in the switch from 2 and 4 MiB
    on: 25.4 and 38.2 us, 32.1 and 53.4.
    """
    groups = {name: Communicator(8, 1, *rest) for name, rest in _NODES.items()}
    gathers = [("all_gather/ring", protocol) for protocol in ("ll", "ll128", "simple")]
    for name, size, before in (("a100", 2**24, "ll128"), ("h100", 2**25, "ll128"), ("b200", 2**24, "ll")):
        assert by_estimate(groups[name], gathers, size / 2, 0.0) == [("all_gather/ring", before)]
        assert by_estimate(groups[name], gathers, size, 0.0) == [("all_gather/ring", "simple")]
    sums = [("all_reduce/ring", "ll"), ("all_reduce/ring", "simple"), ("all_reduce/in_switch", "in_switch")]
    for name, size in (("h100", 2**21), ("b200", 2**22)):
        assert by_estimate(groups[name], sums, size / 2, 0.0) == sums[:1]
        assert by_estimate(groups[name], sums, size, 0.0) == sums[2:]


_NODES = {"a100": (240e9, 0.0, 12, AMPERE), "h100": (360e9, 0.0, 12, HOPPER), "b200": (720e9, 0.0, 8, BLACKWELL)}


def test_sends_of_an_all_to_all_are_in_ll_up_to_a_size() -> None:
    group, ways = Communicator(8, 1, *_NODES["h100"]), [("all_to_all/direct", "p2p_ll"), ("all_to_all/direct", "p2p")]
    assert by_estimate(group, ways, 8 * 16384.0, 16384.0) == ways[:1]
    assert by_estimate(group, ways, 8 * 16384.0 + 8, 16384.0) == ways[1:]
    assert by_estimate(group, ways[1:], 1.0, 16384.0) == ways[1:]  # where LL has no price


def test_an_algorithm_that_nccl_does_not_have_is_left_alone() -> None:
    group, ways = Communicator(8, 1, *_NODES["h100"]), [("all_reduce/direct", "ll"), ("all_reduce/direct", "simple")]
    assert by_estimate(group, ways, 1e6, 0.0) == ways
    assert by_estimate(None, ways, 1e6, 0.0) == ways


def test_a_job_runs_what_nccl_runs_though_another_protocol_would_be_faster() -> None:
    cluster = load_cluster("dgx-a100")
    prices = Prices(load_profile("a100"), cluster.node.gpu)
    ((first, second, *_),) = sweep(cluster.topology(), prices, "all_reduce", 2, [2.0**20])
    assert (first.name, second.name) == ("ring/simple", "ring/ll")
    assert first.seconds == pytest.approx(40.8e-6, rel=0.1)
    ((asked, *_),) = sweep(cluster.topology(), prices, "all_reduce", 2, [2.0**20], "ring/ll")
    assert (asked.name, asked.seconds) == (second.name, second.seconds)
