"""Reductions in the switch go by loops, of eight as of a rack's 72."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest

from sim.analysis.collective_sweep import lone
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile, profile_for
from sim.pricing.transfers.switch_loops import Loops, count, seconds
from topologies.cluster_files import load_cluster

KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
# github.com/coreweave/nccl-tests README.md at 0120901a, NCCL 2.26.2: seconds of an all-reduce, the mean of out of and in place
RACK_OF_72 = {GIB / 2: 1821e-6, GIB: 3017e-6, 2 * GIB: 5532e-6, 4 * GIB: 10118e-6, 8 * GIB: 20153e-6}
TWO_RACKS = {GIB / 2: 2125e-6, GIB: 3570e-6, 2 * GIB: 6261e-6, 4 * GIB: 11452e-6, 8 * GIB: 21509e-6, 16 * GIB: 41812e-6}


@pytest.mark.parametrize(("racks", "published", "average", "worst"), [(1, RACK_OF_72, 0.065, 0.16), (2, TWO_RACKS, 0.11, 0.17)])
def test_racks_reduce_as_they_were_measured(racks: int, published: dict[float, float], average: float, worst: float) -> None:
    """Nothing was fitted to these: as in a node of eight they would take 18 to 42 % less."""
    cluster = load_cluster("gb200-nvl72", nodes=racks)
    prices = Prices(profile_for(cluster.node.gpu.name), cluster.node.gpu)
    pricing, works = lone(cluster.topology(), prices, "all_reduce", 72 * racks, list(published))
    errors = [pricing.collective(work, 0).alone / published[work.bytes] - 1 for work in works]
    assert mean(map(abs, errors)) < average
    assert max(map(abs, errors)) < worst


def test_a_loop_moves_a_chunk_for_each_channel_and_member() -> None:
    """NCCL's src/enqueue.cc: chunks of 128 KiB from 64 loops on, 64 KiB, 32 below 8 loops, 16 below 2, each of those with the
    chunk before.
    """
    node, whole = Loops(8, 24), 24 * 8 * 128 * KIB
    assert count(node, 64 * whole) == 64
    assert count(node, 64 * whole - 1) == pytest.approx(2 * 64)
    assert count(node, 8 * whole / 2 - 1) == pytest.approx(2 * 8)
    assert count(node, 2 * whole / 4 - 1) == pytest.approx(2 * 2)
    assert count(node, KIB) == 1
    tree = Loops(8, 32, 2)
    assert [count(tree, loops * 256 * 128 * KIB) for loops in (4, 2, 0.25)] == [4, 4, 1]
    assert count(Loops(8, 32, 4), 4 * 256 * 128 * KIB) == 8


def test_a_loop_takes_its_bytes_and_a_handover_for_each_member() -> None:
    """Sixteen loops of 8 MiB, and two more at the ends, each with the handovers of eight members."""
    size, transfer, handover = 128 * MIB, 16 * 30e-6, 0.5e-6
    node, each = Loops(8, 16), 30e-6 + 8 * handover
    assert transfer + seconds(node, size, transfer, transfer, 0.0, handover) == pytest.approx(18 * each)
    sizes = np.array([size, 2 * size])
    both = [seconds(node, one, transfer, transfer, 0.0, handover) for one in sizes.tolist()]
    assert seconds(node, sizes, np.full(2, transfer), np.full(2, transfer), 0.0, handover) == pytest.approx(both)


def test_the_first_loop_goes_from_node_to_node() -> None:
    """Eight loops of 16 MiB with twice the handovers; two hops, of which each takes the loop's part of 8 x 40 us."""
    tree, inside, size = Loops(8, 16, 2), 8 * 60e-6, 128 * MIB
    assert inside + seconds(tree, size, inside, inside, 2 * 8 * 40e-6, 1e-6) == pytest.approx(10 * (60e-6 + 16e-6) + 2 * 40e-6)


def test_handovers_take_no_time_of_their_own_beside_slower_links_between_nodes() -> None:
    assert seconds(Loops(8, 16, 2), 128 * MIB, 8 * 80e-6, 8 * 60e-6, 0.0, 1e-6) == pytest.approx(2 * (60e-6 + 16e-6))


@pytest.mark.parametrize(
    ("name", "cluster", "measured"),
    [
        ("h100", "dgx-h100", {2: 38.2, 8: 78.9, 32: 199.8, 128: 578.7, 512: 2111.1, 1024: 4022.9, 16384: 62642.0}),
        ("b200", "hgx-b200", {4: 53.4, 16: 99.1, 128: 398.4, 512: 1334.6, 8192: 17915.5, 16384: 35551.4}),
    ],
)
def test_loops_tell_the_steps_of_measured_times(name: str, cluster: str, measured: dict[int, float]) -> None:
    """MiB -> us of all-reduces of eight (aiconfigurator, published nccl-tests): 1 GiB of H100 takes less than twice 512 MiB."""
    prices = Prices(load_profile(name), load_cluster(cluster).node.gpu)
    pricing, works = lone(load_cluster(cluster).topology(), prices, "all_reduce", 8, [size * MIB for size in measured])
    for work, micro in zip(works, measured.values(), strict=True):
        cost = pricing.collective(work, 0)
        assert cost.protocol == "in_switch"
        assert cost.alone == pytest.approx(micro * 1e-6, rel=0.06)
