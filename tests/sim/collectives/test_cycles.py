"""Rings along direct links: those of NCCL on a DGX-1V, and no more than the links can hold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sim.analysis.collective_sweep import bus_factor, sweep
from sim.collectives import Place
from sim.collectives.cycles import ring_cycles
from sim.pricing.prices import Prices
from sim.pricing.shipped import profile_for
from topologies.cluster_files import inline_cluster, load_cluster


def used(rings: tuple[tuple[int, ...], ...], size: int) -> np.ndarray:
    links = np.zeros((size, size), int)
    for ring in rings:
        assert sorted(ring) == list(range(size))
        np.add.at(links, (list(ring), [*ring[1:], ring[0]]), 1)
    return links


def test_a_dgx_1v_has_three_rings_in_both_directions() -> None:
    """24 NVLinks of 25 GB/s in each direction: published as three rings of eight (iitr.ac.in/dgx), with no link left."""
    topology = load_cluster("dgx-1v").topology()
    units = np.zeros((8, 8), np.int64)
    for a in range(8):
        for b in range(8):
            links = topology.routes(np.array([a]), np.array([b]))[0]
            links = links[links >= 0]
            if len(links) == 1:
                units[a, b] = round(float(topology.capacity(links)[0]) / 25e9)
    rings = ring_cycles(units)
    assert len(rings) == 6
    assert (used(rings, 8) == units).all()


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7])
def test_complete_graphs_split_into_hamiltonian_cycles(size: int) -> None:
    """Walecki 1892: n odd, (n − 1)/2 cycles use every edge; n even, (n − 2)/2 cycles leave a perfect matching."""
    rings = ring_cycles(np.ones((size, size), np.int64) - np.eye(size, dtype=np.int64))
    assert len(rings) == 2 * ((size - 1) // 2)
    assert used(rings, size).max() == 1


def most_rings(units: np.ndarray) -> int:
    """By trying every choice of undirected cycles through all members, the most first."""
    size = len(units)
    orders = [(0, *order) for order in itertools.permutations(range(1, size)) if order[0] < order[-1]]
    links = [used((order,), size) + used((order[::-1],), size) for order in orders]
    for count in range(int(units.sum()) // (2 * size), 0, -1):
        if any((sum(chosen) <= units).all() for chosen in itertools.combinations_with_replacement(links, count)):
            return count
    return 0


@pytest.mark.parametrize("seed", range(30))
def test_no_choice_of_rings_is_larger(seed: int) -> None:
    """Four or five GPUs, up to three links between each two."""
    draw = np.random.default_rng(seed)
    size = 4 + seed % 2
    units = np.triu(draw.integers(0, 3 + (size == 4), (size, size)), 1)
    units += units.T
    rings = ring_cycles(units)
    assert len(rings) == 2 * most_rings(units)
    assert (used(rings, size) <= units).all()


def test_no_ring_without_a_cycle() -> None:
    path = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    assert ring_cycles(path) == ()
    assert ring_cycles(np.ones((9, 9), np.int64) - np.eye(9, dtype=np.int64)) == ()


def busbw(cluster: str, nodes: int, ranks: int) -> float:
    place = load_cluster(cluster, nodes)
    prices = Prices(profile_for(place.node.gpu.name), place.node.gpu)
    options = sweep(place.topology(), prices, "all_reduce", ranks, [2.0**30], "ring/simple")[0]
    return 2.0**30 / options[0].seconds * bus_factor("all_reduce", ranks)


@pytest.mark.parametrize("members", range(2, 17))
def test_crossings_of_a_mesh_use_its_links_alike(members: int) -> None:
    """Every link once where the number is even, as RCCL's eight paths through eight MI300X do (`rome_model_81` in
    github.com/ROCm/rccl src/graph/rome_models.cc); of an odd number none more than twice.
    """
    order = Place((0,) * members, meshed=True).crossing(members)
    paths = (order + np.arange(members)[:, None]) % members
    links = np.zeros((members, members), int)
    np.add.at(links, (paths[:, :-1], paths[:, 1:]), 1)
    assert (np.sort(paths, axis=1) == np.arange(members)).all()
    assert (np.diag(links) == 0).all()
    assert links.max() == (1 if members % 2 == 0 else 2)
    assert links.sum() == members * (members - 1)


@pytest.mark.parametrize(("cluster", "nics"), [("mi300x", 8 * 50e9), ("mi355x", 8 * 50e9), ("gaudi3", 8 * 75e9)])
@pytest.mark.parametrize("nodes", [2, 4])
def test_rings_between_meshes_use_all_nics(cluster: str, nics: float, nodes: int) -> None:
    """A pair's link (64 GB/s, 76.5 GB/s, 75 GB/s) holds the ring of one NIC. With all rings over the same seven links they had
    the bandwidth of one NIC of eight.
    """
    assert 0.6 * nics < busbw(cluster, nodes, 8 * nodes) < nics


def test_rings_between_unequal_meshes_use_the_nics_of_the_smaller() -> None:
    """14 MI300X as 8 + 6 have six rings."""
    assert busbw("mi300x", 2, 14) > 4 * 50e9


def test_uneven_nodes_use_all_nics_that_they_can() -> None:
    """12 A100 as 8 + 4: four rings through four NICs of 25 GB/s, not one."""
    assert 75e9 < busbw("dgx-a100", 2, 12) < 100e9


def test_a_dgx_1v_reaches_most_of_its_links() -> None:
    """Six rings of 25 GB/s hold 150 GB/s at most; one ring in rank order would reach a sixth."""
    assert 100e9 < busbw("dgx-1v", 1, 8) < 150e9


def test_two_links_between_each_two_of_four_make_six_rings() -> None:
    """NCCL's rings fill all links of Jean Zay's nodes of four V100: its all-reduce of 4 GB has a busbw of 989 to 1004 Gb/s
    (github.com/bigscience-workshop/bigscience experiments/bandwidth/single_node_*_all_reduce_bench.txt).
    """
    wired = {"gpu": "v100-sxm2-32gb", "gpus": 4, "wiring": "mesh", "nvlink": "150 GB/s"}
    place = inline_cluster({"nodes": 1, "node": wired}, "machine")
    prices = Prices(profile_for(place.node.gpu.name), place.node.gpu)
    cheapest = sweep(place.topology(), prices, "all_reduce", 4, [4e9], "ring/simple")[0][0]
    assert 4e9 / cheapest.seconds * bus_factor("all_reduce", 4) == pytest.approx(996e9 / 8, rel=0.05)
