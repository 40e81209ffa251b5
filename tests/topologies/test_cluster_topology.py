"""Routes of whole clusters: by hand, against published fabrics, and laws that hold for every cluster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topologies.cluster import Cluster
from topologies.cluster_files import cluster_names, load_cluster
from topologies.links.impaired import ImpairedTopology, LinkChange
from topologies.links.topology import Topology, is_hosted, is_multicast, is_unequal


def route(topology: Topology, source: int, destination: int) -> list[str]:
    links = topology.routes(np.array([source]), np.array([destination]))[0]
    return [topology.name(int(link)) for link in links if link >= 0]


def leaves(topology: Topology) -> int:
    links = np.arange(topology.links)
    return int((topology.kind(links) == topology.kinds.index("spine")).sum()) // 2


def test_rail_routes_by_hand() -> None:
    topology = load_cluster("dgx-h100", nodes=64).topology()
    assert route(topology, 9, 14) == ["node 1 gpu 1 nvlink out", "node 1 gpu 6 nvlink in"]
    same_rail = ["node 0 gpu 3 pcie out", "node 0 nic 3 out", "node 1 nic 3 in", "node 1 gpu 3 pcie in"]
    assert route(topology, 3, 11) == same_rail
    other_rail = [
        "node 0 gpu 3 pcie out",
        "node 0 nic 3 out",
        "leaf 3 up",
        "leaf 4 down",
        "node 1 nic 4 in",
        "node 1 gpu 4 pcie in",
    ]
    assert route(topology, 3, 12) == other_rail
    other_unit = [
        "node 0 gpu 3 pcie out",
        "node 0 nic 3 out",
        "leaf 3 up",
        "leaf 11 down",
        "node 32 nic 3 in",
        "node 32 gpu 3 pcie in",
    ]
    assert route(topology, 3, 32 * 8 + 3) == other_unit
    assert route(topology, 5, 5) == []


def test_latency_of_a_route_is_the_sum_of_its_parts() -> None:
    topology = load_cluster("dgx-h100", nodes=64, overrides={"fabric.hop_latency": "100 ns"}).topology()

    def seconds(destination: int) -> float:
        links = topology.routes(np.array([0]), np.array([destination]))[0]
        return float(topology.latency(links[links >= 0]).sum())

    assert seconds(1) == pytest.approx(0.6e-6)
    assert seconds(8) == pytest.approx(1.0e-6 + 2.7e-6 + 100e-9)  # PCIe, network, one switch
    assert seconds(9) == pytest.approx(1.0e-6 + 2.7e-6 + 300e-9)  # leaf, spine, leaf


def test_two_gpus_share_a_nic() -> None:
    topology = load_cluster("dgx-1v", nodes=2).topology()
    assert route(topology, 4, 8)[1:3] == ["node 0 nic 2 out", "node 1 nic 0 in"]
    assert route(topology, 5, 9)[1:3] == ["node 0 nic 2 out", "node 1 nic 0 in"]


def test_four_nics_of_one_gpu_are_one_way_out() -> None:
    topology = load_cluster("aws-p5", nodes=2).topology()
    links = topology.routes(np.array([7]), np.array([15]))[0]
    assert topology.capacity(links).tolist() == [63e9, 50e9, 50e9, 63e9]


# leaf switches in NVIDIA's SuperPOD reference architectures (H100: table 4; B200: architecture table)
@pytest.mark.parametrize(
    ("name", "nodes", "expected"),
    [
        ("dgx-h100", 31, 8),
        ("dgx-h100", 63, 16),
        ("dgx-h100", 95, 24),
        ("dgx-h100", 127, 32),
        ("hgx-b200", 64, 16),
        ("hgx-b200", 128, 32),
        ("hgx-b200", 512, 128),
        ("hgx-b200", 2048, 512),
    ],
)
def test_number_of_leaf_switches_is_the_published_one(name: str, nodes: int, expected: int) -> None:
    assert leaves(load_cluster(name, nodes=nodes).topology()) == expected


def test_llama_3_pods() -> None:
    # arXiv 2407.21783: pods of 3,072 GPUs with full bisection inside and 1:7 between; 24,576 GPUs are 8 pods
    topology = load_cluster("meta-24k", nodes=3072).topology()
    assert (topology.gpus, leaves(topology)) == (24576, 8)
    inside, between = topology.routes(np.array([0, 0]), np.array([3071, 3072]))
    assert (inside >= 0).sum() == 4
    assert topology.capacity(between)[2:4] == pytest.approx([3072 * 50e9 / 7] * 2)


def test_one_switch_has_no_spine() -> None:
    topology = load_cluster("aws-p4d", nodes=100).topology()
    assert leaves(topology) == 0
    assert len(route(topology, 0, 799)) == 4


def test_links_are_counted_and_named_once() -> None:
    topology = load_cluster("dgx-h100", nodes=33).topology()
    assert (
        topology.links == 33 * (8 * 2 + 8 * 2 + 8 * 2 + 3) + 2 * 16
    )  # NVLink, PCIe and NIC ports, memory and disks; two units of 8 leaves
    assert len({topology.name(link) for link in range(topology.links)}) == topology.links


def test_unknown_gpus_are_refused() -> None:
    with pytest.raises(IndexError, match="0 to 15"):
        load_cluster("dgx-h100", nodes=2).topology().routes(
            np.array([0]), np.array([22])
        )  # 16 to 21 are switches, memories, disks


def test_shifting_by_a_node_loads_every_nic_once_each_way() -> None:
    topology = load_cluster("dgx-h100", nodes=40).topology()
    gpus = np.arange(topology.gpus)
    links = topology.routes(gpus, (gpus + 8) % topology.gpus)
    load = np.bincount(links[links >= 0], minlength=topology.links)
    kind = topology.kind(np.arange(topology.links))
    assert set(load[kind == topology.kinds.index("nic")]) == {1}
    assert set(load[kind == topology.kinds.index("nvlink")]) == {0}


@pytest.mark.parametrize("kind", ["rail", "fat_tree"])
def test_what_goes_up_comes_down(kind: str) -> None:
    cluster = load_cluster("dgx-a100", nodes=6, overrides={"fabric": {"kind": kind, "leaf_nodes": 2, "oversubscription": 2}})
    topology = cluster.topology()
    a, b = (grid.ravel() for grid in np.meshgrid(np.arange(48), np.arange(48)))
    links = topology.routes(a, b)
    load = np.bincount(links[links >= 0], minlength=topology.links)
    names = [topology.name(link) for link in range(topology.links)]
    up = [load[i] for i, name in enumerate(names) if name.startswith("leaf") and name.endswith("up")]
    down = [load[i] for i, name in enumerate(names) if name.startswith("leaf") and name.endswith("down")]
    assert up == down
    # fat tree: 16 GPUs of a leaf to 32 outside; rail: 2 GPUs of a leaf to all outside their node, less the one on the leaf
    assert set(up) == ({16 * 32} if kind == "fat_tree" else {2 * (48 - 8 - 1)})
    rate = {name: topology.capacity(np.array([i]))[0] for i, name in enumerate(names)}["leaf 0 up"]
    assert rate == (16 if kind == "fat_tree" else 2) * 25e9 / 2


@given(name=st.sampled_from(cluster_names()), nodes=st.integers(1, 80), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_laws_of_every_cluster(name: str, nodes: int, seed: int) -> None:
    topology = small(name, nodes).topology()
    a, b = np.random.default_rng(seed).integers(0, topology.gpus, (2, 40))
    links = topology.routes(a, b)
    real = links >= 0
    assert links.max(initial=-1) < topology.links
    assert (real[:, :-1] >= real[:, 1:]).all()  # padding only at the end
    assert (real.any(axis=1) == (a != b)).all()
    assert (topology.capacity(links[real]) > 0).all()
    assert (topology.latency(links[real]) >= 0).all()
    for i in range(0, 40, 8):  # one at a time gives the same as all at once
        alone = topology.routes(a[i : i + 1], b[i : i + 1])[0]
        assert alone[alone >= 0].tolist() == links[i][real[i]].tolist()
    back = topology.routes(b, a)
    for row, mirrored in zip(links, back, strict=True):  # the way back has the same rates
        way, home = row[row >= 0], mirrored[mirrored >= 0]
        assert sorted(topology.capacity(way)) == sorted(topology.capacity(home))


def small(name: str, nodes: int) -> Cluster:
    return load_cluster(name, nodes=1 if name == "cpu-gloo" else nodes)


def test_routes_of_sixteen_thousand_gpus() -> None:
    topology = load_cluster("dgx-h100", nodes=2048).topology()
    a, b = np.random.default_rng(0).integers(0, topology.gpus, (2, 100_000))
    links = topology.routes(a, b)
    assert links.shape == (100_000, 6)


def test_a_topology_that_stands_for_another_can_do_what_that_can() -> None:
    """An impaired link takes neither the CPUs nor the switches of its cluster away."""
    cluster = load_cluster("dgx-h100", nodes=2)
    for topology in (cluster.topology(), ImpairedTopology(cluster.topology(), [LinkChange(0, capacity=0.5)], {})):
        assert is_hosted(topology)
        assert is_multicast(topology)
        assert not is_unequal(topology)
