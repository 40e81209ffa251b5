"""What is said about a topology from its routes, against formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster
from topologies.overview import across, link_sorts, shape

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"


def torus(*dims: int) -> Cluster:
    size = 1
    for k in dims:
        size *= k
    overrides = {"fabric": {"dims": list(dims), "link": "1 GB/s"}, "node.gpus": 1}
    return load_cluster(str(EXAMPLES / "tpu-v4.yaml"), nodes=size, overrides=overrides)


@pytest.mark.parametrize(("dims", "links"), [((8,), 2), ((5, 5), 0), ((4, 8), 8), ((4, 4, 4), 32), ((8, 8, 8), 128)])
def test_across_a_torus_is_its_bisection(dims: tuple[int, ...], links: int) -> None:
    """2·N/k links of 1 GB/s between the halves of the last dimension, when it is the longest and even."""
    rate = across(torus(*dims).topology())
    assert rate == pytest.approx(links * 1e9) if links else rate > 0


@pytest.mark.parametrize(
    ("name", "nodes", "expected"),
    [
        ("dgx-h100", 1, 4 * 450e9),  # NVSwitch: every GPU at its full rate
        ("dgx-h100", 2, 8 * 50e9),  # NICs, one rail each; 1:1 above
        ("dgx-h100", 64, 32 * 8 * 50e9),
        ("dgx-1v", 2, 4 * 12.5e9),
        ("meta-24k", 768, 3072 * 50e9 / 7),  # two pods of 384 nodes at 1:7
    ],
)
def test_across_known_clusters(name: str, nodes: int, expected: float) -> None:
    assert across(load_cluster(name, nodes).topology()) == pytest.approx(expected)


def test_across_a_fully_connected_node() -> None:
    assert across(load_cluster(str(EXAMPLES / "mi300x.yaml")).topology()) == pytest.approx(16 * 64e9)  # n²/4 links


def test_one_gpu_has_no_middle() -> None:
    assert across(load_cluster("cpu-gloo", overrides={"node.gpus": 1}).topology()) == 0.0


def test_links_are_counted_once() -> None:
    topology = load_cluster("dgx-h100", nodes=4).topology()
    sorts = link_sorts(topology)
    assert sum(sort.number for sort in sorts) == topology.links
    assert [(sort.kind, sort.number, sort.capacity) for sort in sorts] == [
        ("nvlink", 64, 450e9),
        ("pcie", 64, 63e9),
        ("nic", 32, 50e9),
        ("nic", 32, 50e9),
        ("spine", 16, 1600e9),
        ("memory", 4, 245.6e9),
        ("disk", 4, 50e9),
        ("disk", 4, 25e9),
    ]
    assert sorts[0].example == "node 0 gpu 0 nvlink out"


@pytest.mark.parametrize(
    ("name", "nodes", "joints"),
    [
        ("dgx-h100", 2, 16 + 2 + 16 + 8 + 1),  # GPUs, NVSwitches, NICs, leaves, spine
        ("dgx-1v", 2, 16 + 8 + 1),  # GPUs, NICs, one switch
        ("pcie-l40s", 1, 8 + 4 + 2),  # GPUs, PCIe switches, sockets
        ("aws-p4d", 2, 16 + 2 + 8 + 1),
        ("cpu-gloo", 1, 2 + 1),
    ],
)
def test_shape_has_the_parts_of_the_machine(name: str, nodes: int, joints: int) -> None:
    topology = load_cluster(name, nodes).topology()
    form = shape(topology)
    assert len(form.joints) == joints
    assert [joint.gpu for joint in form.joints[: topology.gpus]] == list(range(topology.gpus))
    assert {(a, b) for _, a, b in form.links} == {(b, a) for _, a, b in form.links}  # every way has a way back


def test_shape_of_a_torus_is_the_torus() -> None:
    form = shape(torus(4, 4).topology())
    assert len(form.joints) == 16
    assert len(form.links) == 64
    assert {(a, b) for _, a, b in form.links if a == 0} == {(0, 1), (0, 3), (0, 4), (0, 12)}
