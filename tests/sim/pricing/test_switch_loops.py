"""Reductions in the switch of a rack: more members than a node of eight has."""

from __future__ import annotations

from statistics import mean

import pytest

from sim.analysis.collective_sweep import lone
from sim.pricing.prices import Prices
from sim.pricing.shipped import profile_for
from sim.pricing.transfers.protocols import RACK, priced_as
from sim.pricing.transfers.switch_loops import filling, loop
from topologies.cluster_files import load_cluster

KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
# github.com/coreweave/nccl-tests README.md at 0120901a, NCCL 2.26.2: seconds of an all-reduce, the mean of out of and in place
RACK_OF_72 = {GIB / 2: 1821e-6, GIB: 3017e-6, 2 * GIB: 5532e-6, 4 * GIB: 10118e-6, 8 * GIB: 20153e-6}
TWO_RACKS = {GIB / 2: 2125e-6, GIB: 3570e-6, 2 * GIB: 6261e-6, 4 * GIB: 11452e-6, 8 * GIB: 21509e-6, 16 * GIB: 41812e-6}


@pytest.mark.parametrize(("racks", "published", "average", "worst"), [(1, RACK_OF_72, 0.065, 0.16), (2, TWO_RACKS, 0.09, 0.23)])
def test_racks_reduce_as_they_were_measured(racks: int, published: dict[float, float], average: float, worst: float) -> None:
    """Nothing was fitted to these: as in a node of eight they would take 18 to 42 % less."""
    cluster = load_cluster("gb200-nvl72", nodes=racks)
    prices = Prices(profile_for(cluster.node.gpu.name), cluster.node.gpu)
    pricing, works = lone(cluster.topology(), prices, "all_reduce", 72 * racks, list(published))
    errors = [pricing.collective(work, 0).alone / published[work.bytes] - 1 for work in works]
    assert mean(map(abs, errors)) < average
    assert max(map(abs, errors)) < worst


def test_a_loop_moves_a_chunk_for_each_channel_and_member() -> None:
    """NCCL's src/enqueue.cc: 24 channels; chunks of 128 KiB from 64 loops on, 64 KiB, 32 below 8 loops, 16 below 2, each of those
    with the chunk before.
    """
    whole = 24 * 8 * 128 * KIB
    assert loop(8, 64 * whole) == whole
    assert loop(8, 64 * whole - 1) == whole / 2
    assert loop(8, 8 * whole / 2 - 1) == whole / 4
    assert loop(8, 2 * whole / 4 - 1) == whole / 8
    assert loop(8, MIB) == MIB  # no more than there is
    assert filling(8, GIB) == 0.0
    assert filling(72, 8 * GIB) == 2 * (72 * 24 * 64 * KIB - 8 * 24 * 128 * KIB)


def test_only_racks_that_are_priced_have_prices_of_their_own() -> None:
    priced = {"in_switch": 1, RACK: 2}
    assert [priced_as("all_reduce/in_switch", "in_switch", priced, members) for members in (8, 9, 72)] == [
        "in_switch",
        RACK,
        RACK,
    ]
    assert priced_as("all_reduce/in_switch", "in_switch", {"in_switch": 1}, 72) == "in_switch"
