"""The summary and the drawing of a cluster."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import shardyard
from reports.figures.cluster_layout import arrange
from reports.figures.topology import topology
from reports.tables.topology import affinity
from topologies.cluster_files import load_cluster
from topologies.overview import shape
from topologies.reading import UserError

DATA = Path(__file__).parents[1] / "data" / "topologies"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(shardyard.main, ["topology", *arguments])


def test_summary_of_a_catalogue_cluster() -> None:
    result = run("dgx-h100", "--nodes", "4")
    assert result.exit_code == 0
    assert "dgx-h100: 4 × 8 = 32 GPUs h100-sxm, wiring switch, fabric rail" in result.output
    assert "across the middle: 800 GB/s each way, 50.0 GB/s per GPU" in result.output
    assert "the switch of a node adds and copies" in result.output
    assert "GPU 0 → NIC 0" in result.output
    rows = {line.split()[0]: line.split()[1:3] for line in result.output.splitlines() if line.startswith((" nvlink", " spine"))}
    assert rows == {"nvlink": ["64", "450"], "spine": ["16", "1,600"]}


def test_summary_of_a_dump_says_what_was_ignored(tmp_path: Path) -> None:
    result = run(str(DATA / "a100.nccl.xml"), "--gpu", "a100-sxm-40gb", "--draw", str(tmp_path / "out.svg"))
    assert result.exit_code == 0
    assert "a100.nccl.xml: ignored: slower NICs eth0" in result.output
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    assert run("dgx-h10").exit_code == 2
    result = run("dgx-h100", "--draw", "out.gif")
    assert (result.exit_code, result.stderr) == (2, "error: --draw out.gif: must end in .png or .svg\n")
    result = run("dgx-h100", "--nodes", "9", "--draw", str(tmp_path / "out.png"))
    assert result.exit_code == 2
    assert "dgx-h100: 72 GPUs are too many to draw; at most 64, with --nodes for example" in result.stderr
    assert not result.stdout
    assert not (tmp_path / "out.png").exists()


def test_affinity() -> None:
    assert affinity(load_cluster("aws-p4d").node) == "GPU 0–1 → NIC 0, GPU 2–3 → NIC 1, GPU 4–5 → NIC 2, GPU 6–7 → NIC 3"
    assert affinity(load_cluster("aws-p5").node).startswith("GPU 0 → NIC 0–3, GPU 1 → NIC 4–7")
    assert affinity(load_cluster("gb200-nvl72").node).endswith("GPU 3 → NIC 3, …, GPU 71 → NIC 71")
    machine = load_cluster(str(DATA / "h100.topo.txt"), overrides={"node.gpu": "h100-sxm"})
    assert "GPU 2 → NIC 3, GPU 3 → NIC 4" in affinity(machine.node)


@pytest.mark.parametrize(
    ("name", "nodes"), [("dgx-h100", 8), ("pcie-l40s", 2), ("perlmutter", 10), ("dgx-1v", 1), ("cpu-gloo", 1)]
)
def test_nothing_is_drawn_over_something_else(name: str, nodes: int) -> None:
    net = load_cluster(name, nodes).topology()
    layout = arrange(net, shape(net), ())
    places = sorted(layout.places)
    assert all(abs(a[0] - b[0]) > 0.4 or abs(a[1] - b[1]) > 0.4 for a, b in pairwise(places))
    assert len(layout.labels) == len(places)


def test_labels_say_what_a_part_is() -> None:
    net = load_cluster("dgx-a100", 4, {"fabric.leaf_nodes": 2}).topology()
    labels = arrange(net, shape(net), ()).labels
    assert labels.count("NVSwitch") == 4
    assert labels.count("spine") == 1
    assert {label for label in labels if label.startswith("leaf")} == {f"leaf {i}" for i in range(16)}
    assert labels[:32] == [str(i) for i in range(8)] * 4


def test_a_node_alone_is_drawn_with_its_nics() -> None:
    texts = {text.get_text() for text in topology.draw(load_cluster("dgx-1v")).axes[0].texts}
    assert {"GPU", "NIC", "switch"} <= texts


def test_a_torus_is_drawn_as_a_grid_with_stubs_around() -> None:
    axes = topology.draw(load_cluster(str(DATA.parents[2] / "examples" / "clusters" / "tpu-v4.yaml"))).axes[0]
    assert len(axes.lines) == 3 * 16 * 2  # two stubs for each of the 16 links around in each of three dimensions
    assert len(axes.patches) == 3 * 48


def test_the_same_cluster_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (topology(load_cluster("dgx-1v", 2), tmp_path / f"{n}.svg").read_bytes() for n in range(2))
    assert first == second


def test_too_many_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="gb200-nvl72: 72 GPUs are too many"):
        topology.draw(load_cluster("gb200-nvl72"))
