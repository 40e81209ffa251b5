"""The inside of a node against published diagrams and routes followed by hand."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest

from topologies.cluster import load_cluster
from topologies.topology import Topology
from topologies.wirings.cube_mesh import PAIRS


def route(topology: Topology, source: int, destination: int) -> list[str]:
    links = topology.routes(np.array([source]), np.array([destination]))[0]
    return [topology.name(int(link)) for link in links if link >= 0]


def rates(topology: Topology, source: int, destination: int) -> list[float]:
    links = topology.routes(np.array([source]), np.array([destination]))[0]
    return [rate / 1e9 for rate in topology.capacity(links[links >= 0])]


def test_cube_mesh_has_the_links_of_nvidias_own_dump() -> None:
    # nvlink elements of the DGX-1V file in github.com/NVIDIA/nccl issue 671: GPU 0 and, as far as shown, GPU 1
    def links(gpu: int) -> dict[int, int]:
        return {a + b - gpu: count for (a, b), count in PAIRS.items() if gpu in (a, b)}

    assert links(0) == {1: 1, 2: 1, 3: 2, 4: 2}
    assert links(1) == {0: 1, 2: 2, 3: 1, 5: 2}
    assert all(sum(links(gpu).values()) == 6 for gpu in range(8))  # six NVLinks on every V100
    assert sum(PAIRS.values()) == 24
    assert len(PAIRS) == 12 + 4  # a cube's edges and the diagonals of two faces


def test_cube_mesh_is_three_interwoven_rings() -> None:
    # "three interwoven rings of single NVLink connections" (iitr.ac.in/dgx): 24 links = 3 Hamiltonian cycles of 8, none left over
    def edges(cycle: tuple[int, ...]) -> Counter[tuple[int, int]]:
        return Counter((min(a, b), max(a, b)) for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True))

    rings = [edges((0, *rest)) for rest in permutations(range(1, 8)) if rest[0] < rest[-1]]
    rings = [ring for ring in rings if set(ring) <= set(PAIRS)]
    whole = Counter(PAIRS)
    found = any(
        whole - first - second in rings
        for first, second in combinations(rings, 2)
        if all(whole[pair] >= n for pair, n in (first + second).items())
    )
    assert found


def test_cube_mesh_rates_and_ways() -> None:
    topology = load_cluster("dgx-1v").topology()
    assert rates(topology, 0, 3) == [50]
    assert rates(topology, 0, 1) == [25]
    assert route(topology, 0, 7) == ["node 0 gpu 0 to 4 nvlink", "node 0 gpu 4 to 7 nvlink"]  # both double: the widest way
    assert rates(topology, 0, 7) == [50, 50]
    assert min(rates(topology, 0, 5)) == 25
    links = np.arange(topology.links)
    nvlink = links[topology.kind(links) == topology.kinds.index("nvlink")]
    assert len(nvlink) == 32
    assert topology.capacity(nvlink).sum() == 8 * 150e9
    assert (
        sum(sum(rates(topology, a, a + 4)) for a in range(4)) == 150
    )  # bisection between the two halves: 2 + 2 + 1 + 1 links of 25 GB/s


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("dgx-2", 16 * 300e9),
        ("dgx-a100", 8 * 600e9),
        ("dgx-h100", 8 * 900e9),
        ("hgx-b200", 8 * 1800e9),
        ("gb200-nvl72", 129.6e12),
    ],
)
def test_switch_has_the_published_sum_of_both_directions(name: str, total: float) -> None:
    topology = load_cluster(name).topology()
    links = np.arange(topology.links)
    nvlink = topology.kind(links) == topology.kinds.index("nvlink")
    assert topology.capacity(links[nvlink]).sum() == pytest.approx(total)


def test_pcie_tree_routes_by_hand() -> None:
    topology = load_cluster("pcie-l40s", nodes=2).topology()
    assert route(topology, 0, 1) == ["node 0 gpu 0 pcie out", "node 0 gpu 1 pcie in"]
    assert route(topology, 0, 2) == [
        "node 0 gpu 0 pcie out",
        "node 0 switch 0 pcie out",
        "node 0 switch 1 pcie in",
        "node 0 gpu 2 pcie in",
    ]
    assert route(topology, 1, 7) == [
        "node 0 gpu 1 pcie out",
        "node 0 switch 0 pcie out",
        "node 0 socket 0 to 1",
        "node 0 switch 3 pcie in",
        "node 0 gpu 7 pcie in",
    ]
    # four GPUs under two switches share a NIC, which therefore hangs on the host bridge
    assert route(topology, 6, 9) == [
        "node 0 gpu 6 pcie out",
        "node 0 switch 3 pcie out",
        "node 0 nic 1 out",
        "node 1 nic 0 in",
        "node 1 switch 0 pcie in",
        "node 1 gpu 1 pcie in",
    ]


def test_pcie_without_switches_and_with_a_remote_nic() -> None:
    overrides = {"node": {"gpus_per_switch": None, "nics": 1}}
    topology = load_cluster("pcie-l40s", nodes=2, overrides=overrides).topology()
    assert route(topology, 0, 3) == ["node 0 gpu 0 pcie out", "node 0 gpu 3 pcie in"]
    assert route(topology, 0, 12) == [  # shorter here than there: the padding is at the end, not inside
        "node 0 gpu 0 pcie out",
        "node 0 nic 0 out",
        "node 1 nic 0 in",
        "node 1 socket 0 to 1",
        "node 1 gpu 4 pcie in",
    ]
    links = topology.routes(np.array([0, 12]), np.array([8, 3]))
    assert (links[0] >= 0).tolist() == [True] * 4 + [False] * (links.shape[1] - 4)


def test_processes_of_one_machine() -> None:
    topology = load_cluster("cpu-gloo", overrides={"node.gpus": 4}).topology()
    assert topology.links == 8
    assert route(topology, 2, 0) == ["node 0 process 2 loopback out", "node 0 process 0 loopback in"]
    assert topology.latency(topology.routes(np.array([2]), np.array([0]))[0]).sum() == pytest.approx(200e-6)


def test_two_machines_without_gpus() -> None:
    topology = load_cluster("cpu-gloo", nodes=2, overrides={"node": {"nics": 1, "nic": "1 Gb/s"}}).topology()
    assert route(topology, 1, 2) == ["node 0 nic 0 out", "node 1 nic 0 in"]
    assert rates(topology, 1, 2) == [0.125, 0.125]
