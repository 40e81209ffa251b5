"""Clusters whose nodes are not alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from topologies.cluster import Cluster, UnequalCluster
from topologies.cluster_files import inline_cluster, load_cluster
from topologies.links.unequal_topology import UnequalTopology
from topologies.node_group import NodeGroup
from topologies.reading import UserError

MIXED: dict[str, Any] = {
    "name": "mixed",
    "nodes": [{"count": 2, "node": "dgx-a100"}, {"count": 2, "node": "dgx-h100"}],
    "fabric": {"kind": "fat_tree", "leaf_nodes": 2},
}


def way(cluster: Cluster, source: int, destination: int) -> list[str]:
    topology = cluster.topology()
    (route,) = topology.routes(np.array([source]), np.array([destination]))
    return [topology.name(int(link)) for link in route if link >= 0]


def rates(cluster: Cluster, source: int, destination: int) -> list[float]:
    topology = cluster.topology()
    (route,) = topology.routes(np.array([source]), np.array([destination]))
    return (topology.capacity(route[route >= 0]) / 1e9).tolist()


def test_links_are_those_of_each_node_and_leaves_have_the_rate_of_their_own_nodes() -> None:
    mixed = inline_cluster(MIXED, "mixed")
    assert (mixed.gpus, mixed.nodes) == (32, 4)
    assert way(mixed, 0, 16) == [
        "node 0 gpu 0 pcie out",
        "node 0 nic 0 out",
        "leaf 0 up",
        "leaf 1 down",
        "node 2 nic 0 in",
        "node 2 gpu 0 pcie in",
    ]
    assert rates(mixed, 0, 16) == [31, 25, 16 * 25, 16 * 50, 50, 63]  # 2 nodes of 8 NICs below a leaf
    assert rates(mixed, 31, 30) == [450, 450]
    kinds = mixed.topology().kinds
    assert kinds.index("nic a100-sxm-80gb") < kinds.index("nic h100-sxm") < kinds.index("spine")


def test_a_missing_gpu_leaves_the_others_and_a_missing_nic_is_gone_around() -> None:
    cluster = load_cluster("dgx-h100", nodes=[{"count": 7}, {"count": 1, "missing": ["gpu 3", "nic 5"]}])
    assert cluster.gpus == 63
    assert way(cluster, 59, 0)[:2] == ["node 7 gpu 4 pcie out", "node 7 nic 4 out"]  # local number 3 is the node's GPU 4
    assert way(cluster, 60, 0)[:4] == [
        "node 7 gpu 5 nvlink out",
        "node 7 gpu 6 nvlink in",
        "node 7 gpu 6 pcie out",
        "node 7 nic 6 out",
    ]
    assert way(cluster, 0, 60)[-3:] == ["node 7 gpu 6 pcie in", "node 7 gpu 6 nvlink out", "node 7 gpu 5 nvlink in"]
    assert cluster.topology().kinds == load_cluster("dgx-h100").topology().kinds  # one kind of GPU
    assert cluster.topology().node_of(np.array([55, 56, 62])).tolist() == [6, 7, 7]


def test_equal_nodes_in_a_list_are_the_usual_cluster() -> None:
    assert load_cluster("dgx-h100", nodes=[{"count": 3}, {"count": 1, "node": "dgx-h100"}]) == load_cluster("dgx-h100", 4)


def test_a_copy_with_more_nodes_has_them_in_its_groups() -> None:
    cluster = load_cluster("dgx-h100", 4)
    assert [group.count for group in cluster.groups] == [4]
    larger = cluster.model_copy(update={"nodes": 6})
    assert [group.count for group in larger.groups] == [6]


@pytest.mark.parametrize("fabric", [{}, {"kind": "fat_tree", "leaf_nodes": 3, "pod_nodes": 6, "oversubscription": 2}])
def test_the_tables_of_equal_nodes_are_those_of_the_usual_topology(fabric: dict[str, Any]) -> None:
    usual = load_cluster("dgx-h100", 10, {"fabric": fabric})
    topology = usual.topology()
    split = UnequalTopology([NodeGroup(count=4, node=usual.node), NodeGroup(count=6, node=usual.node)], usual.fabric)
    ends = np.random.default_rng(0).integers(0, 80, (2, 2000))
    assert (topology.routes(*ends) == split.routes(*ends)).all()
    links = np.arange(topology.links)
    assert split.links == topology.links
    for column in ("kind", "capacity", "latency"):
        assert (getattr(topology, column)(links) == getattr(split, column)(links)).all()
    assert [topology.name(link) for link in range(topology.links)] == [split.name(link) for link in range(topology.links)]
    switches = split.switch_of(np.arange(80))
    assert (switches == topology.switch_of(np.arange(80))).all()
    assert (split.routes(np.arange(80), switches) == topology.routes(np.arange(80), switches)).all()


def test_only_nodes_with_a_switch_that_adds_have_one() -> None:
    assert inline_cluster(MIXED, "mixed").topology().switch_of(np.array([0, 15, 16, 31])).tolist() == [-1, -1, 34, 35]


def test_what_is_for_equal_nodes_is_refused() -> None:
    mixed = inline_cluster(MIXED, "mixed")
    assert isinstance(mixed, UnequalCluster)
    line = "cluster mixed (2 × 8 a100-sxm-80gb, 2 × 8 h100-sxm): its nodes are not alike, which simulate"
    for ask in (lambda: mixed.node, lambda: mixed.model_copy(update={"nodes": 9})):
        with pytest.raises(UserError) as error:
            ask()
        assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([{"count": 1, "node": "dgx-h1"}], "unknown cluster 'dgx-h1'; did you mean 'dgx-h100'?"),
        ([{"count": 1, "missing": ["gpu 9"]}], "nodes.0: nodes.missing='gpu 9': the gpus of these nodes are numbered 0 to 7"),
        ([{"count": 1, "missing": ["fan 1"]}], "nodes.0: nodes.missing='fan 1': must be 'gpu 3' or 'nic 2'"),
        ([{"count": 1, "missing": [f"gpu {gpu}" for gpu in range(8)]}], "no GPU is left"),
        ([{"count": 1, "missing": [f"nic {nic}" for nic in range(8)]}], "gpu 0 has no way to other nodes left"),
        ([{"count": 0}], "nodes.0: count=0: input should be greater than or equal to 1"),
        ([{"count": 1, "clock": 2}], "nodes.0: clock=2: input should be less than or equal to 1"),
        ([{"number": 4}], "nodes.0: "),
        ([4], "nodes.0=4: must be fields such as {count: 8, node: dgx-a100}"),
        ([], "nodes: a list of 0 groups; must be 1 to 1,000"),
        (
            [{"count": 1}, {"count": 1, "node": {"nics": 4}}],
            "fabric.kind='rail': all nodes need NICs on as many rails; some have 4 and 8",
        ),
        (
            [{"count": 1}, {"count": 1, "node": {"nics": None, "nic": None}}],
            "nodes.1: nodes that are not alike must all have NICs",
        ),
        (
            [{"count": 1}, {"count": 1, "node": {"gpu": {"memory": "96 GiB"}}}],
            "GPUs that differ need names that differ: h100-sxm, h100-sxm",
        ),
    ],
)
def test_mistakes_are_one_line(nodes: list[Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_cluster("dgx-h100", nodes=nodes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
