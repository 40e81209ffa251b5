"""The inside of a node against published diagrams and routes followed by hand."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest

from topologies.cluster_files import load_cluster
from topologies.links.topology import Topology
from topologies.reading import UserError
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
    decomposes = any(
        whole - first - second in rings
        for first, second in combinations(rings, 2)
        if all(whole[pair] >= n for pair, n in (first + second).items())
    )
    assert decomposes


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
    topology = load_cluster("cpu-gloo", overrides={"node.gpus": 4, "node.latency.loopback": "200 us"}).topology()
    assert topology.links == 8
    assert route(topology, 2, 0) == ["node 0 process 2 loopback out", "node 0 process 0 loopback in"]
    assert topology.latency(topology.routes(np.array([2]), np.array([0]))[0]).sum() == pytest.approx(200e-6)


def test_two_machines_without_gpus() -> None:
    topology = load_cluster("cpu-gloo", nodes=2, overrides={"node": {"nics": 1, "nic": "1 Gb/s"}}).topology()
    assert route(topology, 1, 2) == ["node 0 nic 0 out", "node 1 nic 0 in"]
    assert rates(topology, 1, 2) == [0.125, 0.125]


# -- ring, fully connected, graph --------------------------------------------------------------------------------------------


def joint(a: str, b: str, kind: str, **fields: str) -> dict[str, object]:
    return {"ends": [a, b], "kind": kind, **fields}


def node(wiring: str, gpus: int, **fields: object) -> Topology:
    parts = {"nvlink": None, "nics": None, "nic": None, "pcie": None, "gpus": gpus, "wiring": wiring}
    return load_cluster("dgx-a100", nodes=1, overrides={"node": parts | fields}).topology()


@pytest.mark.parametrize("size", [3, 4, 7, 8])
def test_ring(size: int) -> None:
    topology = node("ring", size, nvlink="300 GB/s")
    assert topology.links == 2 * size
    a, b = (grid.ravel() for grid in np.meshgrid(np.arange(size), np.arange(size)))
    hops = (topology.routes(a, b) >= 0).sum(axis=1)
    assert (hops == np.minimum((b - a) % size, (a - b) % size)).all()
    assert hops.max() == size // 2
    assert rates(topology, 0, 1) == [150]
    assert route(topology, 0, size - 1) == [f"node 0 gpu 0 to {size - 1} nvlink"]


def test_fully_connected_is_a_perlmutter_node() -> None:
    topology = load_cluster("perlmutter").topology()
    assert topology.links == 12 + 2 * 4 + 2 * 4  # pairs, PCIe slots, NICs
    assert rates(topology, 1, 3) == [100]  # four NVLinks of 25 GB/s
    links = topology.routes(np.repeat([0, 1], 2), np.array([2, 3, 2, 3]))
    assert topology.capacity(links).sum() == 400e9  # n²/4 links across the middle


SQUARE = [
    {"ends": ["gpu 0", "gpu 1"], "kind": "nvlink", "count": 4},
    {"ends": ["gpu 1", "gpu 2"], "kind": "nvlink", "rate": "50 GB/s"},
    {"ends": ["gpu 2", "gpu 3"], "kind": "nvlink", "rate": "50 GB/s"},
]
TREE = [{"ends": [f"gpu {i}", "root"], "kind": "pcie"} for i in range(4)]


def test_graph_prefers_nvlink_with_one_gpu_between() -> None:
    topology = node("graph", 4, edges=SQUARE + TREE)
    assert rates(topology, 0, 1) == [100]
    assert route(topology, 0, 2) == ["node 0 gpu 0 to gpu 1 nvlink", "node 0 gpu 1 to gpu 2 nvlink"]
    assert route(topology, 0, 3) == ["node 0 gpu 0 to root pcie", "node 0 root to gpu 3 pcie"]
    assert len(route(node("graph", 4, edges=SQUARE), 0, 3)) == 3  # no other way
    assert topology.latency(topology.routes(np.array([0, 0]), np.array([2, 3]))).sum(axis=1) == pytest.approx([1.2e-6, 1e-6])


def test_graph_shares_out_nics() -> None:
    def rails(nics: int, *edges: tuple[str, str]) -> tuple[list[int], list[tuple[int, ...]]]:
        listed = SQUARE + TREE + [{"ends": list(ends), "kind": "pcie"} for ends in edges]
        overrides = {"nvlink": None, "pcie": None, "gpus": 4, "wiring": "graph", "edges": listed, "nics": nics}
        board = load_cluster("dgx-a100", nodes=2, overrides={"node": overrides}).node.board()
        return board.rail, board.bundles

    assert rails(2, ("nic 0", "root"), ("nic 1", "root")) == ([0, 0, 1, 1], [(0,), (1,)])
    assert rails(1, ("nic 0", "root")) == ([0, 0, 0, 0], [(0,)])
    assert rails(8, *[(f"nic {i}", "root") for i in range(8)]) == ([0, 1, 2, 3], [(0, 1), (2, 3), (4, 5), (6, 7)])
    assert rails(2, ("nic 0", "gpu 0"), ("nic 1", "gpu 1"), ("nic 1", "root")) == ([0, 1, 1, 1], [(0,), (1,)])
    beside = [("nic 0", "root"), ("nic 1", "root"), ("nic 1", "gpu 3")]
    assert rails(2, *beside) == ([0, 0, 1, 1], [(0,), (1,)])
    assert rails(2, ("nic 0", "far"), ("far", "root"), ("nic 1", "root")) == ([0, 0, 0, 0], [(1,)])


CONTRADICTIONS: list[tuple[dict[str, object], str]] = [
    ({}, "node.edges is required by wiring='graph'"),
    ({"edges": SQUARE[:2] + TREE[:3]}, "node.edges: 'gpu 0' cannot reach 'gpu 3'"),
    ({"edges": [*SQUARE, joint("gpu 4", "gpu 0", "nvlink")]}, "node.edges: 'gpu 4' contradicts gpus=4, nics=0"),
    ({"edges": [*SQUARE, SQUARE[0]]}, "node.edges: 'gpu 0' and 'gpu 1' are joined twice by nvlink; add their rates"),
    ({"edges": [*SQUARE, joint("a", "b", "host")]}, "node.edges: 'a' to 'b' needs a rate: gpu.host is not given either"),
    ({"edges": [*SQUARE, joint("a", "a", "host")]}, "node.edges: ends=['a', 'a'] are one and the same"),
    ({"edges": [joint("a", "b", "host", rate="0 GB/s")]}, "node.edges.0.rate=0.0: input should be greater than 0"),
    ({"edges": SQUARE, "nvlink": "1 GB/s"}, "node.nvlink=1e+09 B/s contradicts wiring='graph': its rates stand in node.edges"),
    ({"edges": SQUARE, "nics": 1, "nic": "1 Gb/s"}, "node.edges: 'gpu 0' cannot reach a NIC"),
    ({"edges": SQUARE, "wiring": "mesh"}, "node.edges contradicts wiring='mesh': they belong to wiring='graph'"),
    ({"wiring": "ring", "gpus": 2, "nvlink": "1 GB/s"}, "node.gpus=2: wiring='ring' needs at least 3"),
    ({"wiring": "mesh", "gpus": 1, "nvlink": "1 GB/s"}, "node.gpus=1: wiring='mesh' needs at least 2"),
    ({"wiring": "bare"}, "node.wiring='bare' gives gpus=4 no way to each other"),
]


@pytest.mark.parametrize(("fields", "line"), CONTRADICTIONS, ids=[line[:50] for _, line in CONTRADICTIONS])
def test_a_node_that_contradicts_itself_is_refused(fields: dict[str, object], line: str) -> None:
    with pytest.raises(UserError) as error:
        node(**{"wiring": "graph", "gpus": 4} | fields)
    assert str(error.value).removeprefix("dgx-a100: ") == line


# -- the switch as an end of routes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "multicast"),
    [
        ("dgx-h100", True),
        ("hgx-h200", True),
        ("hgx-b200", True),
        ("gb200-nvl72", True),
        ("aws-p5", True),
        ("meta-24k", True),
        ("dgx-a100", False),
        ("dgx-2", False),
        ("dgx-1v", False),
        ("pcie-l40s", False),
        ("cpu-gloo", False),
    ],
)
def test_switches_that_add_are_those_of_hopper_and_later(name: str, multicast: bool) -> None:
    assert load_cluster(name).topology().multicast is multicast


def test_up_to_the_switch_and_down_is_the_route_through_it() -> None:
    topology = load_cluster("dgx-h100", nodes=3).topology()
    a, b = np.array([1, 9, 23]), np.array([6, 8, 16])
    switch = topology.switch_of(a)
    assert switch.tolist() == [24, 25, 26]
    up, down = (ways[ways >= 0] for ways in (topology.routes(a, switch), topology.routes(switch, b)))
    assert np.stack((up, down), axis=1).tolist() == topology.routes(a, b).tolist()
    mixed = topology.routes(np.array([0, 24, 3]), np.array([1, 7, 24]))
    assert (mixed >= 0).sum(axis=1).tolist() == [2, 1, 1]
    with pytest.raises(IndexError, match="from its own GPUs only"):
        topology.routes(np.array([0]), np.array([25]))
    with pytest.raises(IndexError, match="numbered 0 to 23"):
        topology.routes(np.array([0]), np.array([33]))  # 27 to 32 are memories and disks


def test_a_switch_that_does_not_add_is_not_offered() -> None:
    for name in ("dgx-a100", "dgx-1v"):
        assert load_cluster(name).topology().switch_of(np.array([0, 3])).tolist() == [-1, -1]
