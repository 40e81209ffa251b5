"""Fabrics against their textbook formulas: sizes, diameters, bisections; and laws of every route."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow, shortest_path

from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster
from topologies.fabric import End, fabrics
from topologies.links.topology import Topology
from topologies.reading import UserError, build

TPU = {"name": "x", "sms": 1, "peak": {"bf16": "1 TFLOP/s"}, "memory": "1 GB", "memory_bandwidth": "1 GB/s"}


def chips(count: int, fabric: dict[str, Any], per_node: int = 1) -> Cluster:
    """Accelerators without NICs, linked by the fabric itself."""
    node = {"gpu": TPU, "gpus": per_node, "wiring": "bare"}
    return build(Cluster, {"name": "chips", "node": node, "nodes": count // per_node, "fabric": fabric}, "chips")


def hosts(count: int, fabric: dict[str, Any]) -> Cluster:
    """Nodes of one GPU with one NIC of 1 GB/s."""
    node = {"gpu": TPU, "gpus": 1, "wiring": "bare", "pcie": "1 GB/s", "nics": 1, "nic": "1 GB/s"}
    return build(Cluster, {"name": "hosts", "node": node, "nodes": count, "fabric": fabric}, "hosts")


def all_pairs(topology: Topology) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a, b = (grid.ravel() for grid in np.meshgrid(np.arange(topology.gpus), np.arange(topology.gpus), indexing="ij"))
    return a, b, topology.routes(a, b)


def edges(topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of every direct link, from its name "gpu 3 to 4"."""
    names = [topology.name(link).split() for link in range(topology.links)]
    return np.array([int(name[1]) for name in names]), np.array([int(name[3]) for name in names])


def torus(*dims: int) -> Topology:
    return chips(int(np.prod(dims)), {"kind": "torus", "dims": list(dims), "link": "1 GB/s"}).topology()


def cut(topology: Topology, half: set[int]) -> int:
    """Links from `half` to the other GPUs."""
    source, destination = edges(topology)
    return sum(a in half and b not in half for a, b in zip(source.tolist(), destination.tolist(), strict=True))


# -- torus, ring -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(5,), (8,), (2, 3), (4, 4), (3, 4, 5), (4, 4, 4), (2, 2, 2)])
def test_torus_routes_are_shortest_paths_along_real_links(dims: tuple[int, ...]) -> None:
    topology = torus(*dims)
    source, destination = edges(topology)
    size = topology.gpus
    graph = csr_array((np.ones(len(source)), (source, destination)), shape=(size, size))
    assert graph.max() == 1  # one link per neighbour and direction
    assert set(np.diff(graph.indptr)) == {sum(2 if k > 2 else 1 for k in dims)}  # degree
    distance = shortest_path(graph, unweighted=True)
    a, b, routes = all_pairs(topology)
    assert ((routes >= 0).sum(axis=1) == distance[a, b]).all()
    assert distance.max() == sum(k // 2 for k in dims)  # diameter
    for start, end, row in zip(a, b, routes, strict=True):
        at = start
        for link in row[row >= 0]:
            assert source[link] == at
            at = destination[link]
        assert at == end


@pytest.mark.parametrize(("dims", "expected"), [((8,), 2), ((4, 4), 8), ((4, 2), 4), ((2, 2, 2), 4)])
def test_bisection_of_a_torus_by_brute_force(dims: tuple[int, ...], expected: int) -> None:
    topology = torus(*dims)
    size = topology.gpus
    if size <= 8:
        assert min(cut(topology, set(half)) for half in combinations(range(size), size // 2)) == expected
    assert cut(topology, set(range(size // 2)) if max(dims) == dims[-1] else {p for p in range(size) if p % 4 < 2}) == expected


def test_torus_in_three_dimensions_as_published() -> None:
    topology = torus(4, 4, 4)  # a cube of TPU v4: 64 chips, six links each, 32 links across the middle each way
    assert topology.links == 64 * 6
    assert cut(topology, set(range(32))) == 32


def test_dimension_order_and_the_way_round() -> None:
    topology = torus(4, 4)
    assert route(topology, 0, 15) == ["gpu 0 to 3", "gpu 3 to 15"]  # both dimensions by the wrap-around
    assert route(topology, 0, 6) == ["gpu 0 to 1", "gpu 1 to 2", "gpu 2 to 6"]
    assert route(topology, 2, 0) == ["gpu 2 to 3", "gpu 3 to 0"]
    assert route(topology, 1, 3) == ["gpu 1 to 0", "gpu 0 to 3"]  # half-way round, from an odd place


def test_all_to_all_loads_every_link_of_a_torus_evenly() -> None:
    for dims in ((4, 4), (5, 5), (8,)):
        topology = torus(*dims)
        _, _, routes = all_pairs(topology)
        assert len(set(np.bincount(routes[routes >= 0], minlength=topology.links))) == 1


def test_chips_of_one_host_use_the_torus() -> None:
    topology = chips(16, {"kind": "torus", "dims": [4, 4], "link": "1 GB/s"}, per_node=4).topology()
    assert route(topology, 0, 1) == ["gpu 0 to 1"]
    assert topology.node_of(np.array([3, 4])).tolist() == [0, 1]


def test_torus_of_nodes_with_nics() -> None:
    topology = hosts(8, {"kind": "torus", "dims": [8], "link": "1 GB/s", "hop_latency": "100 ns"}).topology()
    assert route(topology, 0, 7) == [
        "node 0 gpu 0 pcie out",
        "node 0 nic 0 out",
        "node 0 to 7",
        "node 7 nic 0 in",
        "node 7 gpu 0 pcie in",
    ]


# -- fully connected ---------------------------------------------------------------------------------------------------------


def test_fully_connected() -> None:
    topology = chips(8, {"kind": "full", "link": "64 GB/s"}).topology()
    assert topology.links == 2 * 28
    assert cut(topology, {0, 2, 4, 6}) == 16
    source, destination = edges(topology)
    a, b, routes = all_pairs(topology)
    assert routes.shape[1] == 1
    real = routes[:, 0] >= 0
    assert (source[routes[real, 0]] == a[real]).all()
    assert (destination[routes[real, 0]] == b[real]).all()


# -- trees -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [4, 6, 8])
def test_k_ary_fat_tree(k: int) -> None:
    """Al-Fares et al. 2008: k pods, k²/2 edge switches, k³/4 hosts, full bisection."""
    size = k**3 // 4
    topology = hosts(size, {"kind": "fat_tree", "leaf_nodes": k // 2, "pod_nodes": k * k // 4}).topology()
    names = [topology.name(link) for link in range(topology.links)]
    assert sum(name.startswith("leaf") and name.endswith("up") for name in names) == k * k // 2
    assert sum(name.startswith("pod") and name.endswith("up") for name in names) == k
    half = np.arange(size // 2)
    routes = topology.routes(half, half + size // 2)
    assert rate_of_slowest(topology, routes) == 1e9  # every host of one half sends to the other at its full rate
    assert (routes >= 0).sum(axis=1).tolist() == [8] * (size // 2)  # PCIe, NIC, leaf, pod, and down again


def test_oversubscription_divides_what_crosses() -> None:
    tiers = {"kind": "fat_tree", "leaf_nodes": 2, "pod_nodes": 4, "oversubscription": 2, "pod_oversubscription": 3}
    topology = hosts(16, tiers).topology()
    half = np.arange(8)
    assert rate_of_slowest(topology, topology.routes(half, half + 8)) == pytest.approx(1e9 / 6)
    pairs = np.array([0, 1, 4, 5, 8, 9, 12, 13])
    assert rate_of_slowest(topology, topology.routes(pairs, pairs + 2)) == pytest.approx(1e9 / 2)


def test_max_flow_of_a_small_tree_is_the_formula() -> None:
    """What crosses between two halves, by maximum flow over the links as a graph: 8 GB/s over 2 · 3."""
    tiers = {"kind": "fat_tree", "leaf_nodes": 2, "pod_nodes": 4, "oversubscription": 2, "pod_oversubscription": 3}
    topology = hosts(16, tiers).topology()
    a, b, routes = all_pairs(topology)
    crossing = (a < 8) & (b >= 8)
    # every directed link is an edge between two points of its own; consecutive links of a route are joined
    links, source, sink = topology.links, 2 * topology.links, 2 * topology.links + 1
    joined = {(2 * x + 1, 2 * y) for row in routes[crossing] for x, y in pairwise(row) if y >= 0}
    joined |= {(source, 2 * row[0]) for row in routes[crossing]} | {(2 * row[row >= 0][-1] + 1, sink) for row in routes[crossing]}
    rates = np.rint(topology.capacity(np.arange(links)) / 1e6).astype(int)
    entries = [(2 * x, 2 * x + 1, rates[x]) for x in range(links)] + [(x, y, 10**8) for x, y in joined]
    row, column, value = (np.array(part, dtype=np.int32) for part in zip(*entries, strict=True))
    flow = maximum_flow(csr_array((value, (row, column)), shape=(sink + 1, sink + 1)), source, sink).flow_value
    assert flow == pytest.approx(8000 / 6, rel=1e-3)


def test_rails_with_pods() -> None:
    """NVIDIA's B200 SuperPOD from 512 nodes on: three tiers; within a rail of 32 nodes one leaf."""
    topology = load_cluster("hgx-b200", nodes=512, overrides={"fabric.pod_nodes": 128}).topology()
    assert len(route(topology, 0, 8)) == 4
    assert [name for name in route(topology, 0, 8 * 32) if "leaf" in name] == ["leaf 0 up", "leaf 8 down"]
    assert [name for name in route(topology, 0, 8 * 128) if "node" not in name] == [
        "leaf 0 up",
        "pod 0 up",
        "pod 1 down",
        "leaf 32 down",
    ]


# -- dragonfly ---------------------------------------------------------------------------------------------------------------


def dragonfly(h: int, groups: int | None = None, **fields: Any) -> Cluster:
    """Balanced: a = 2p = 2h."""
    size = 2 * h * h * (2 * h * h + 1 if groups is None else groups)
    links = {"link": "1 GB/s", "global_link": "1 GB/s"}
    return hosts(size, {"kind": "dragonfly", "router_nodes": h, "routers": 2 * h, "global_links": h, **links, **fields})


@pytest.mark.parametrize("h", [1, 2, 3])
def test_balanced_dragonfly(h: int) -> None:
    """Kim et al. 2008: g = a·h + 1 groups, N = a·p·g terminals, one global link between every two groups, at most 3 hops."""
    a, g = 2 * h, 2 * h * h + 1
    topology = dragonfly(h).topology()
    assert topology.gpus == a * h * g
    names = [topology.name(link) for link in range(topology.links)]
    cables = [(int(name.split()[1]), int(name.split()[-1])) for name in names if "global" in name]
    assert sorted(cables) == [(x, y) for x in range(g) for y in range(g) if x != y]
    assert sum(name.startswith("group") and "global" not in name for name in names) == g * a * (a - 1)
    starts, ends, routes = all_pairs(topology)
    hops = (routes >= 0).sum(axis=1) - 4
    assert hops.max() == 3
    assert (hops[(starts // (a * h) == ends // (a * h)) & (starts // h != ends // h)] == 1).all()


def crossed(topology: Topology, start: int, end: int, p: int, a: int) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """The global link of a route, and the routers (group, number) at its two ends by the local links before and after it."""
    words = [name.split() for name in route(topology, start, end) if name.startswith("group")]
    at = next(index for index, word in enumerate(words) if "global" in word)
    before = (int(words[0][1]), int(words[0][-1])) if at else divmod(start // p, a)
    after = (int(words[-1][1]), int(words[-1][3])) if at < len(words) - 1 else divmod(end // p, a)
    assert all((int(word[1]), int(word[3])) == divmod(start // p, a) for word in words[:at])
    assert all((int(word[1]), int(word[-1])) == divmod(end // p, a) for word in words[at + 1 :])
    assert before == (int(words[at][1]), int(words[at][3]))
    assert after[0] == int(words[at][-1])
    return " ".join(words[at]), before, after


@pytest.mark.parametrize("groups", [9, 5, 3, 2])
def test_dragonfly_routes_are_walks_over_cables_with_two_ends(groups: int) -> None:
    topology, p, a = dragonfly(2, groups).topology(), 2, 4
    ends: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    for start in range(topology.gpus):
        for end in range(topology.gpus):
            if start // (p * a) != end // (p * a):
                name, *routers = crossed(topology, start, end, p, a)
                assert ends.setdefault(name, tuple(routers)) == tuple(routers)  # a cable always ends at the same router
                _, there, here = crossed(topology, end, start, p, a)
                assert [here, there] == routers  # the way back is over the same cable
    per_pair = 8 // (groups - 1)  # a·h = 8 global links of a group for all others
    assert len(ends) == groups * (groups - 1) * per_pair


def test_adaptive_routing_has_all_links_of_a_router_or_a_group() -> None:
    """p = h = 2, a = 4: three local links of 1 GB/s out of a router, eight global ones out of a group; half of their latency each
    where a router's link is between two, and a global one is a hop out and a hop in.
    """
    topology = dragonfly(2, 3, adaptive=True).topology()
    ways = {end: [name for name in route(topology, 0, end) if name.startswith("group")] for end in (1, 2, 8)}
    assert ways[1] == []
    assert ways[2] == ["group 0 router 0 out", "group 0 router 1 in"]
    assert ways[8] == ["group 0 router 0 out", "group 0 global out", "group 1 global in", "group 1 router 0 in"]
    rates = {topology.name(link): float(topology.capacity(np.array([link]))[0]) for link in range(topology.links)}
    assert (rates["group 0 router 0 out"], rates["group 1 global in"]) == (3e9, 8e9)
    assert len(rates) == topology.links
    minimal = dragonfly(2, 3).topology()
    to = np.arange(8, 16)  # every node of a group to one of the next: four cables between them carry two each
    assert rate_of_slowest(topology, topology.routes(to - 8, to)) > rate_of_slowest(minimal, minimal.routes(to - 8, to))


def test_too_many_groups_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"hosts: fabric.global_links=2 on routers=4 reach 8 other groups, but nodes=80 .* 10 groups"
    ):
        dragonfly(2, groups=10)


# -- every fabric ------------------------------------------------------------------------------------------------------------

SAMPLES: dict[str, dict[str, Any]] = {
    "single": {},
    "rail": {"leaf_nodes": 4, "pod_nodes": 12, "oversubscription": 1.5},
    "fat_tree": {"leaf_nodes": 4, "pod_nodes": 12, "oversubscription": 1.5},
    "torus": {"dims": [4, 3, 4], "link": "100 GB/s"},
    "full": {"link": "100 GB/s"},
    "dragonfly": {"router_nodes": 2, "routers": 4, "global_links": 2, "link": "200 Gb/s", "global_link": "200 Gb/s"},
}


def test_every_fabric_has_a_sample() -> None:
    assert set(fabrics) == set(SAMPLES)


@pytest.mark.parametrize("kind", sorted(SAMPLES))
@pytest.mark.parametrize("name", ["dgx-h100", "dgx-1v", "pcie-l40s"])
def test_laws_of_every_fabric(kind: str, name: str) -> None:
    cluster = load_cluster(name, nodes=48, overrides={"fabric": {"leaf_nodes": None, "kind": kind} | SAMPLES[kind]})
    topology = cluster.topology()
    a, b = np.random.default_rng(0).integers(0, topology.gpus, (2, 500))
    routes, back = topology.routes(a, b), topology.routes(b, a)
    real = routes >= 0
    assert (real[:, :-1] >= real[:, 1:]).all()
    assert (real.any(axis=1) == (a != b)).all()
    assert routes.max() < topology.links
    assert (topology.capacity(routes[real]) > 0).all()
    assert (real.sum(axis=1) == (back >= 0).sum(axis=1)).all()  # as far there as back
    for i in range(0, 500, 50):  # one at a time gives the same as all at once
        alone = topology.routes(a[i : i + 1], b[i : i + 1])[0]
        assert alone[alone >= 0].tolist() == routes[i][real[i]].tolist()
        assert len({topology.name(int(link)) for link in alone[alone >= 0]}) == (alone >= 0).sum()
    assert len({topology.name(link) for link in range(topology.links)}) == topology.links


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_backbone_of_nothing_is_nothing(kind: str) -> None:
    node = load_cluster("dgx-h100").node
    none = np.empty(0, dtype=np.int64)
    fabric = load_cluster("dgx-h100", 48, {"fabric": {"leaf_nodes": None, "kind": kind} | SAMPLES[kind]}).fabric
    assert fabric.backbone(node, 48).routes(End(none, none, none, none), End(none, none, none, none)).shape[0] == 0


TORUS = {"kind": "torus", "dims": [4], "link": "1 GB/s"}
FULL = {"kind": "full", "link": "1 GB/s"}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "tors"}, "fabric.kind='tors': unknown fabric 'tors'; did you mean 'torus'?"),
    ({"kind": 3}, "fabric.kind=3: unknown fabric '3'; known: dragonfly, fat_tree, full, rail, single, torus"),
    ({"kind": "torus", "link": "1 GB/s"}, "fabric.dims is required by kind='torus'"),
    ({"kind": "torus", "dims": [4, 4]}, "fabric.link is required by kind='torus'"),
    (TORUS | {"dims": [4, 1]}, "fabric.dims.1=1: input should be greater than or equal to 2"),
    (TORUS | {"dims": [0]}, "fabric.dims.0=0: input should be greater than or equal to 2"),
    (TORUS | {"dims": []}, "fabric.dims=[]: tuple should have at least 1 item after validation, not 0"),
    (TORUS | {"link": "0 GB/s"}, "fabric.link=0.0: input should be greater than 0"),
    (TORUS | {"link": "1 GB/x"}, "fabric.link='1 GB/x': is not a quantity with a unit, such as '400 Gb/s'"),
    (TORUS | {"dims": [4, 3]}, "fabric.dims=[4, 3] hold 12 points, but there are 4 gpus"),
    (FULL | {"dims": [4]}, "fabric.kind='full' contradicts dims: its fields are hop_latency, transport, link"),
    (FULL | {"lnk": 1}, "unknown field 'fabric.lnk'; did you mean 'link'?"),
    (FULL | {"hop_latency": "-1 ns"}, "fabric.hop_latency='-1 ns': must be finite and not negative"),
    (
        {"kind": "dragonfly", "router_nodes": 1, "routers": 1, "global_links": 1, "link": "1 GB/s", "global_link": "1 GB/s"},
        "fabric.routers=1: input should be greater than or equal to 2",
    ),
    ({"kind": "single"}, "nodes=4 contradicts node.nics=0: nodes reach each other through NICs"),
    ({"kind": "fat_tree", "leaf_nodes": 2, "pod_nodes": 3}, "fabric.pod_nodes=3 is not a multiple of leaf_nodes=2"),
    ({"kind": "fat_tree", "leaf_nodes": 2, "pod_oversubscription": 3}, "fabric.pod_oversubscription=3 needs pod_nodes"),
]


@pytest.mark.parametrize(("fabric", "line"), MISTAKES, ids=[line[:60] for _, line in MISTAKES])
def test_a_mistake_is_one_line(fabric: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        chips(4, fabric)
    assert str(error.value) == f"chips: {line}"


def test_gpus_without_any_way_are_refused() -> None:
    with pytest.raises(UserError, match="chips: node.wiring='bare' gives gpus=4 no way to each other"):
        chips(4, {"kind": "single"}, per_node=4)


def rate_of_slowest(topology: Topology, routes: np.ndarray) -> float:
    """Bytes per second of the slowest flow when each link is shared evenly."""
    load = np.bincount(routes[routes >= 0], minlength=topology.links)
    used = np.flatnonzero(load)
    return float((topology.capacity(used) / load[used]).min())


def route(topology: Topology, source: int, destination: int) -> list[str]:
    links = topology.routes(np.array([source]), np.array([destination]))[0]
    return [topology.name(int(link)) for link in links if link >= 0]
