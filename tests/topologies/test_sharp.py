"""Ways through the fabric's switches that add, and how many groups these serve at once."""

from __future__ import annotations

import numpy as np
import pytest

from sim.analysis.collective_sweep import lone
from sim.grid import Grid
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.pricing.transfers.sibling_groups import placements
from sim.pricing.transfers.traffic import Traffic
from sim.pricing.transfers.wiring import applicable, endpoints, schedule, stretches
from topologies.cluster_files import inline_cluster, load_cluster
from topologies.links.cluster_topology import ClusterTopology
from topologies.links.topology import aggregation
from topologies.reading import UserError


def superpod(nodes: int, sharp: int = 3, **fabric: object) -> ClusterTopology:
    changes = {f"fabric.{field}": value for field, value in fabric.items()}
    return load_cluster("dgx-h100", nodes=nodes, overrides={"fabric.sharp": sharp, **changes}).topology()


@pytest.mark.parametrize(
    ("fabric", "tiers"),
    [
        ({"kind": "single", "leaf_nodes": None}, 1),
        ({"leaf_nodes": 64}, 2),
        ({"leaf_nodes": 4}, 2),
        ({"leaf_nodes": 2, "pod_nodes": 4}, 3),
    ],
)
def test_ways_up_and_down_are_the_halves_of_ways_between_nodes(fabric: dict[str, object], tiers: int) -> None:
    """From a GPU to the first switch that it shares with another, and down, over the links between them, whatever the fabric."""
    topology = superpod(16, **fabric)
    a, b = np.divmod(np.arange(128 * 128), 128)
    far = topology.node_of(a) != topology.node_of(b)
    a, b = a[far][::7], b[far][::7]  # 7 divides neither the GPUs of a node nor the nodes of a leaf
    up, down = topology.aggregators(a), topology.aggregators(b)
    assert up.shape[1] == tiers
    for source, target, above, below, route in zip(a, b, up, down, topology.routes(a, b), strict=True):
        meet = int(np.flatnonzero(above == below)[0])
        climb = [*zip([source, *above[:meet]], above[: meet + 1], strict=True)]
        fall = [*zip(below[: meet + 1], [target, *below[:meet]], strict=True)][::-1]
        links = [topology.routes(np.array([x]), np.array([y]))[0] for x, y in climb + fall]
        assert np.concatenate(links).tolist() == [link for link in route if link >= 0]


def test_without_sharp_there_is_nothing() -> None:
    assert aggregation(load_cluster("dgx-h100", nodes=4).topology()) is None
    grid = Grid.of(dp=32)
    assert not applicable(superpod(4, sharp=3), grid, Traffic("all_reduce/collnet_direct", ("tp",), ()))
    assert not applicable(load_cluster("dgx-h100", nodes=4).topology(), grid, Traffic("all_reduce/collnet_direct", ("dp",), ()))


@pytest.mark.parametrize(
    ("degrees", "sharp", "kind", "works"),
    [
        ({"dp": 64}, 3, "rail", True),
        ({"dp": 64}, 2, "rail", True),  # a leaf for each of a node's NICs: one tree at a time per leaf
        ({"dp": 64}, 3, "fat_tree", True),
        ({"dp": 64}, 2, "fat_tree", False),  # a leaf for eight NICs, so eight trees
        ({"tp": 4, "dp": 16}, 3, "rail", True),  # each NIC in one group
        ({"tp": 4, "dp": 16}, 2, "rail", True),
        ({"tp": 8, "dp": 8}, 2, "rail", True),
        ({"dp": 64}, 3, "single", True),
        ({"tp": 8, "dp": 8}, 2, "single", False),
    ],
)
def test_groups_at_once(degrees: dict[str, int], sharp: int, kind: str, works: bool) -> None:
    """A switch of SHARPv2 has one streaming tree at a time, later ones one per port (docs.nvidia.com SHARP 3.13)."""
    fabric = {"kind": kind} | ({"leaf_nodes": None} if kind == "single" else {})
    assert (
        applicable(superpod(8, sharp, **fabric), Grid.of(**degrees), Traffic("all_reduce/collnet_direct", ("dp",), ())) is works
    )


def test_groups_that_lie_otherwise_below_leaves_are_of_another_kind() -> None:
    """Stages of three nodes on leaves of two: the first takes a whole leaf and a half, the second a half and a whole."""
    topology, grid = superpod(6, leaf_nodes=2), Grid.of(tp=8, dp=3, pp=2)
    every = Traffic("", ("dp",), ())
    assert len(placements(topology, grid, every)) == 2
    assert len(placements(load_cluster("dgx-h100", nodes=6).topology(), grid, every)) == 1
    for groups in placements(topology, grid, every):
        traffic = every._replace(algorithm="all_reduce/collnet_direct", groups=groups)
        ends = endpoints(topology, grid, traffic)
        for phase in schedule(topology, grid, traffic).phases:
            topology.routes(ends[:, phase.source].ravel(), ends[:, phase.destination].ravel())  # all ways exist


def test_a_leaf_sends_one_sum_up_for_all_nodes_below() -> None:
    topology, grid = superpod(32, leaf_nodes=16), Grid.of(dp=256)
    load: dict[str, float] = {}
    for stretch in stretches(topology, grid, Traffic("all_reduce/collnet_direct", ("dp",), ())):
        for link, flows in zip(stretch.links.tolist(), stretch.flows.tolist(), strict=True):
            load[topology.name(link)] = load.get(topology.name(link), 0.0) + flows * stretch.share
    nics = {name: part for name, part in load.items() if "nic" in name}
    leaves = {name: part for name, part in load.items() if "leaf" in name}
    assert len(nics) == 2 * 256
    assert list(nics.values()) == pytest.approx([1 / 8] * len(nics))
    assert len(leaves) == 2 * 16
    assert list(leaves.values()) == pytest.approx([1 / 8] * len(leaves))


def test_auto_takes_it_where_jobs_use_it() -> None:
    """Over 64 nodes an all-reduce of 1 MiB is three times as fast as by trees, whose latency grows with the nodes."""
    seconds = {}
    for sharp in (0, 3):
        pricing, (work,) = lone(
            superpod(64, sharp), Prices(load_profile("h100"), load_cluster("dgx-h100").node.gpu), "all_reduce", 512, [2**20]
        )
        cost = pricing.collective(work, 0)
        seconds[sharp] = cost.alone
        assert ("collnet" in cost.traffic.algorithm) is bool(sharp)
        assert any("SHARP" in note for note in pricing.notes) is bool(sharp)
    assert seconds[0] > 3 * seconds[3]


def test_what_it_is_not_for() -> None:
    with pytest.raises(UserError, match="fabric.sharp=1"):
        load_cluster("dgx-h100", overrides={"fabric.sharp": 1})
    with pytest.raises(UserError, match="fabric.sharp=3 contradicts transport='efa-v2'"):
        load_cluster("aws-p5", overrides={"fabric.sharp": 3})
    with pytest.raises(UserError, match="contradicts sharp"):
        load_cluster("perlmutter", overrides={"fabric.sharp": 3})
    mixed = {"nodes": [{"node": {"based_on": name}, "count": 1} for name in ("dgx-h100", "dgx-a100")]}
    with pytest.raises(UserError, match="fabric.sharp=3: needs nodes that are alike"):
        inline_cluster(mixed | {"fabric": {"kind": "single", "sharp": 3}}, "mixed")
