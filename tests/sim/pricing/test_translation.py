"""Traffics that are copies of each other are laid over links once: the same links, loads and classes as laid one by one."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
import pytest

from sim.grid import Grid
from sim.pricing.transfers import sibling_groups, translation, wiring
from sim.pricing.transfers.link_merging import Wiring, wire
from sim.pricing.transfers.sibling_groups import first_alike, kinds, placements
from sim.pricing.transfers.traffic import Traffic
from sim.pricing.transfers.translation import copies, original
from sim.pricing.transfers.wiring import sent, stretches
from topologies.cluster_files import load_cluster
from topologies.links.cluster_topology import ClusterTopology
from topologies.links.sums import summed

PODS = {"fabric": {"kind": "fat_tree", "leaf_nodes": 4, "pod_nodes": 8, "oversubscription": 2}}
SHARP = {"fabric": {"kind": "rail", "leaf_nodes": 2, "sharp": 3}}
CLUSTERS: list[tuple[str, dict[str, Any]]] = [
    ("dgx-h100", {"fabric": {"kind": "rail", "leaf_nodes": 4}}),
    ("hgx-h200", PODS),
    ("dgx-h100", SHARP),
    ("aws-p5", {}),
    ("dgx-1v", {"fabric": {"kind": "fat_tree", "leaf_nodes": 2}}),
    ("aws-g5-48xl", {}),
    ("dgx-h100", {}),  # one block of leaves for all, whose uplinks join the rails
]
NAMES = ("all_reduce/ring", "all_reduce/tree", "all_gather/ring", "all_gather/pat", "all_to_all/direct", "broadcast/chain")
IN_SWITCH = ("all_reduce/in_switch", "all_reduce/in_switch_tree", "all_reduce/collnet_direct", "copy/gpu/cpu")


def answers(topology: ClusterTopology, grid: Grid, traffics: tuple[Traffic, ...]) -> dict[str, Any]:
    """All that prices need to know of traffics, alone and together."""
    for module in (wiring, translation, sibling_groups):
        for cached in vars(module).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
    able = tuple(each for each in traffics if wiring.applicable(topology, grid, each) and (topology.cpu or "copy" not in each[0]))
    result: dict[str, Any] = {f"alone {each}": parts(wire.__wrapped__(topology, grid, (each,))) for each in able}
    result |= {f"kinds {each}": (kinds(topology, grid, each), placements(topology, grid, each)) for each in able}
    result |= {f"sent {each}": sent(topology, grid, each, each.at) for each in able}
    return result | {"able": able, "together": parts(wire.__wrapped__(topology, grid, able))}


def parts(of: Wiring) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def traffics_of(draw: Random, grid: Grid) -> tuple[Traffic, ...]:
    """Collectives of each stage and of all, and sends from each stage to the next."""
    axes = [("tp",), ("dp",), ("tp", "dp")]
    chosen = [(draw.choice((*NAMES, *IN_SWITCH[:3])), draw.choice(axes)) for _ in range(3)]
    chosen += [(draw.choice(("all_reduce/ring", "all_reduce/tree", "all_reduce/in_switch_tree")), ("tp", "dp"))]
    stages = grid.degree("pp")
    every = [Traffic(name, along, (("pp", stage),)) for stage in range(stages) for name, along in chosen]
    every += [Traffic("send/direct", (), (("pp", stage),), (("pp", stage + 1),)) for stage in range(stages - 1)]
    every += [Traffic(IN_SWITCH[3], (), (("pp", stage),)) for stage in range(stages)]
    return (*every, Traffic(draw.choice(NAMES[:2]), ("tp", "dp", "pp"), ()), Traffic("all_gather/ring", ("pp",), ()))


@pytest.mark.parametrize("seed", range(18))
def test_copies_are_laid_as_each_of_them_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random grids on clusters with and without leaves and pods, some of which stages fill: to the bit."""
    draw = Random(seed)
    name, changes = CLUSTERS[seed % len(CLUSTERS)]
    nodes = draw.choice((6, 8, 12, 16))
    topology = load_cluster(name, nodes, changes).topology()
    each = topology.gpus // nodes
    pp = draw.choice([degree for degree in (2, 3, 4, 8) if nodes % degree == 0])
    tp = draw.choice([degree for degree in (1, 2, each, 2 * each) if topology.gpus // pp % degree == 0])
    grid = Grid.of(
        draw.choice((("tp", "dp", "pp"), ("tp", "dp", "pp"), ("dp", "tp", "pp"))), tp=tp, pp=pp, dp=topology.gpus // pp // tp
    )
    traffics = traffics_of(draw, grid)
    folded = answers(topology, grid, traffics)
    monkeypatch.setattr(translation, "is_periodic", lambda topology: False)

    one_by_one = answers(topology, grid, traffics)
    for key, value in one_by_one.items():
        assert folded[key] == value, key


def test_what_is_laid_does_not_grow_with_stages_and_groups() -> None:
    """16 stages of 8 leaves with 32 nodes of 8 GPUs: the first stage is laid for all; of its
    exchanges one rail, of its sends one rail of the first leaf's pairs."""
    topology, grid = load_cluster("dgx-h100", 16 * 256).topology(), Grid.of(tp=8, dp=256, pp=16)
    exchange = Traffic("all_reduce/ring", ("dp",), (("pp", 5),))
    assert original(topology, grid, exchange) == (exchange._replace(at=(("pp", 0),)), 5 * 256 * 8)
    send = Traffic("send/direct", (), (("pp", 5),), (("pp", 6),))
    first = copies(topology, grid, send)
    assert (first.first.groups, first.times, first.shift, first.turned) == (tuple(range(0, 32 * 8, 8)), 8, 32 * 8, True)
    across = copies(topology, grid, exchange)
    assert (across.first.groups, across.times, across.turned) == ((0,), 1, True)
    inside = copies(topology, grid, Traffic("all_gather/ring", ("tp",), (("pp", 0),)))
    assert (inside.first.groups, inside.times, inside.shift) == ((0,), 256, 8)
    before = stretches.cache_info().misses
    wire(topology, grid, tuple(exchange._replace(at=(("pp", stage),)) for stage in range(16)))
    assert stretches.cache_info().misses == before + 1


def test_stages_that_do_not_fill_leaves_are_no_copies() -> None:
    """Stages of 3 nodes on leaves of 2: the third is the first, shifted by 6 nodes; the second is its own."""
    topology = load_cluster("dgx-h100", 12, {"fabric": {"kind": "rail", "leaf_nodes": 2}}).topology()
    grid = Grid.of(tp=8, dp=3, pp=4)
    firsts = [original(topology, grid, Traffic("all_reduce/ring", ("dp",), (("pp", stage),))) for stage in range(4)]
    assert [(dict(first.at)["pp"], shift) for first, shift in firsts] == [(0, 0), (1, 0), (0, 48), (1, 48)]
    assert first_alike(topology, grid, Traffic("", ("tp",), (("pp", 3),))).at == (("pp", 0),)  # inside nodes all are alike


def test_links_of_frames() -> None:
    """4 nodes on leaves of 2 with 2 rails: 4 links of leaves for each 2 nodes, after all links of nodes."""
    changes = {"node": {"gpus": 2, "nics": 2}, "fabric": {"kind": "rail", "leaf_nodes": 2}}
    topology = load_cluster("dgx-h100", 4, changes).topology()
    frames = topology.frames(2)
    links = np.arange(topology.links)
    frame, place = frames.split(links)
    assert frames.size * 2 == topology.links
    assert (frames.link(frame, place) == links).all()
    for link in links.tolist():
        other = int(frames.link(np.array(0), place[link]))
        same = [getattr(topology, what)(np.array([link, other])) for what in ("kind", "capacity", "latency")]
        assert all(values[0] == values[1] for values in same)
    assert [topology.name(int(link)) for link in frames.link(np.array([0, 1]), place[[-4, -4]])] == ["leaf 0 up", "leaf 2 up"]


def test_sums_over_links() -> None:
    """Neighbours and links far away, with values and without; a sum of 0 is none."""
    links, values = np.array([9_000_001, 3, 9_000_001, 4095, 4096, 7]), np.array([1.0, 2.0, 3.0, 4.0, 5.0, 0.0])
    where, sums = summed(links, values)
    assert (where.tolist(), sums.tolist()) == ([3, 4095, 4096, 9_000_001], [2.0, 4.0, 5.0, 4.0])
    assert [each.tolist() for each in summed(links[:3])] == [[3, 9_000_001], [1.0, 2.0]]
    assert [each.tolist() for each in summed(links[:0])] == [[], []]
