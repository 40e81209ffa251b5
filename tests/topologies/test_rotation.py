"""GPUs of all nodes turned by one: routes are mapped on routes, links on links that are alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from topologies.cluster_files import load_cluster
from topologies.links.cluster_topology import ClusterTopology

PODS = {"fabric": {"kind": "fat_tree", "leaf_nodes": 2, "pod_nodes": 4}}
RAILS = {"fabric": {"kind": "rail", "leaf_nodes": 2}}
WIRED: list[tuple[str, dict[str, Any]]] = [("dgx-h100", RAILS), ("hgx-h200", PODS), ("aws-p5", {}), ("mi300x", PODS)]


def built(name: str, changes: dict[str, Any]) -> ClusterTopology:
    topology = load_cluster(name, 8, changes).topology()
    assert isinstance(topology, ClusterTopology)
    return topology


@pytest.mark.parametrize(("name", "changes"), WIRED, ids=[name for name, _ in WIRED])
def test_turned_routes_are_routes(name: str, changes: dict[str, Any]) -> None:
    """Of all pairs of 64 GPUs: the links of turned ends are in the same orbits, hop by hop."""
    topology = built(name, changes)
    rotation, each = topology.rotation, topology.gpus_per_node
    assert rotation is not None
    source, destination = (ends.ravel() for ends in np.meshgrid(np.arange(64), np.arange(64)))
    turned = [ends - ends % each + (ends + 1) % each for ends in (source, destination)]
    before, after = topology.routes(source, destination), topology.routes(*turned)
    assert ((before < 0) == (after < 0)).all()
    real = before >= 0
    pairs = np.unique(np.stack([before[real], after[real]]), axis=1)
    assert len(np.unique(pairs[0])) == pairs.shape[1] == len(np.unique(pairs[1]))  # links are mapped one to one
    for what in ("kind", "capacity", "latency"):
        assert (getattr(topology, what)(pairs[0]) == getattr(topology, what)(pairs[1])).all()
    stands = [rotation.folded(np.array([link]), np.ones(1))[0][0] for link in pairs[:, ::37].T.ravel().tolist()]
    assert stands[::2] == stands[1::2]


def test_loads_of_orbits() -> None:
    """One route between nodes of 8 GPUs on two leaves: 8 such routes load every port of these nodes, and each rail's leaf, once;
    a pod's link, of which there is one for all, 8 times.
    """
    topology = built("dgx-h100", RAILS)
    assert topology.rotation is not None
    route = topology.routes(np.array([3]), np.array([27]))[0]
    links, load = topology.rotation.folded(route, np.ones(len(route)))
    assert load.tolist() == [1.0] * len(route)
    every, each = topology.rotation.expanded(links, load)
    assert (len(every), each.tolist()) == (8 * len(route), [1.0] * 8 * len(route))
    assert set(topology.routes(np.arange(8), np.arange(24, 32)).ravel().tolist()) == set(every.tolist())
    assert topology.rotation.is_invariant(every, each)
    assert not topology.rotation.is_invariant(every[1:], each[1:])
    assert not topology.rotation.is_invariant(every, np.arange(len(every)) * 1.0)
    pods = built("hgx-h200", PODS)
    assert pods.rotation is not None
    route = pods.routes(np.array([3]), np.array([35]))[0]
    links, load = pods.rotation.folded(route, np.ones(len(route)))
    spine = np.array(pods.kinds)[pods.kind(links)] == "spine"
    assert (load[spine].tolist(), set(load[~spine].tolist())) == ([8.0] * 4, {1.0})


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-1v", "rtx-4090"])
def test_nodes_without_the_symmetry(name: str) -> None:
    """Two GPUs of an A100 node share a PCIe switch, a cube mesh has links of two rates: no rotation."""
    assert built(name, {"fabric": {"kind": "fat_tree", "leaf_nodes": 2}}).rotation is None
