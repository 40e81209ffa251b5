"""What machines print about themselves: the same answers as their published descriptions, and one line for every broken file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster
from topologies.links.topology import Topology
from topologies.readers.slurm import hostlist
from topologies.reading import UserError

DATA = Path(__file__).parents[1] / "data" / "topologies"


def read(name: str, gpu: str | None = None, **overrides: object) -> Cluster:
    return load_cluster(str(DATA / name), overrides=({"node.gpu": gpu} if gpu else {}) | overrides)


def shares(topology: Topology, gpus: int) -> list[tuple[float, ...]]:
    """Rates along the way between each two GPUs."""
    a, b = (grid.ravel() for grid in np.meshgrid(np.arange(gpus), np.arange(gpus)))
    routes = topology.routes(a, b)
    return [tuple(topology.capacity(row[row >= 0])) for row in routes]


# -- nvidia-smi topo -m ------------------------------------------------------------------------------------------------------


def test_matrix_of_a_dgx_1v_is_the_catalogues_dgx_1v() -> None:
    machine, known = read("dgx1v.topo.txt", "v100-sxm2-32gb").topology(), load_cluster("dgx-1v").topology()
    assert shares(machine, 8) == shares(known, 8)
    a, b = np.arange(8), np.arange(8)[::-1]
    assert machine.latency(machine.routes(a, b)).tolist() == known.latency(known.routes(a, b)).tolist()


def test_pasted_matrix_of_an_h100() -> None:
    cluster = read("h100.topo.txt", "h100-sxm", **{"node.nic": "400 Gb/s", "nodes": 2})
    assert shares(cluster.topology(), 8) == shares(load_cluster("dgx-h100").topology(), 8)
    assert (cluster.node.gpus, cluster.node.nics, cluster.node.nic) == (8, 10, 50e9)
    assert cluster.node.board().bundles == [(0,), (1,), (3,), (4,), (5,), (6,), (8,), (9,)]  # not those for storage
    assert cluster.topology().multicast
    names = [cluster.topology().name(int(link)) for link in cluster.topology().routes(np.array([2]), np.array([10]))[0]]
    assert [name for name in names if "bridge 2" in name or "nic" in name] == names
    assert len(cluster.notes) == 4
    assert all(note.startswith("h100.topo.txt: ") for note in cluster.notes)


def test_matrix_without_nics_or_nvlink(tmp_path: Path) -> None:
    path = tmp_path / "box.txt"
    path.write_text(
        "log line\n\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tPHB\t0-63\t0\t\tN/A\n"
        "GPU1\tPHB\t X \t0-63\t0\t\tN/A\n\nLegend:\n\n \tGPU0\tGPU1\n GPU0\tX\tGNS\n"
    )
    cluster = load_cluster(str(path), overrides={"node.gpu": "l40s"})
    assert shares(cluster.topology(), 2)[1] == (31e9, 31e9)
    assert cluster.node.nics == 0


BOMB = '<!DOCTYPE x [<!ENTITY a "b">]><system>&a;</system>'
LOPSIDED = "SwitchName=s0 Nodes=n0\nSwitchName=a Nodes=m0\nSwitchName=b Switches=a\nSwitchName=c Switches=b,s0\n"
BROKEN = [
    ("GPU0 GPU1\nGPU0 X NV1\nGPU1 NV2 X", "not symmetric: 'GPU0' to 'GPU1' is NV1, but 'GPU1' to 'GPU0' is NV2"),
    ("GPU0 GPU1\nGPU0 X NV1", "row 'GPU1' is missing"),
    ("GPU0 GPU1\nGPU0 X\nGPU1 NV1 X", "row 'GPU0' has 1 cells, but there are 2 columns"),
    ("GPU0 GPU1\nGPU0 X FOO\nGPU1 FOO X", "row 'GPU0', column 'GPU1': 'FOO' is not expected there"),
    ("GPU0 GPU1\nGPU0 PIX NV1\nGPU1 NV1 X", "row 'GPU0', column 'GPU0': 'PIX' is not expected there"),
    ("GPU0 GPU1\nGPU0 X NV0\nGPU1 NV0 X", "row 'GPU0', column 'GPU1': 'NV0' is not expected there"),
    ("GPU0 GPU1\nGPU0 X X\nGPU1 X X", "row 'GPU0', column 'GPU1': 'X' is not expected there"),
    ("<system><cpu></system>", "not valid XML: mismatched tag: line 1, column 15"),
    ("<system version='1'></system>", "there is no 'gpu' element"),
    ("<a><system/></a>", "the outermost element is 'a', not 'system'"),
    (BOMB, "declares a document type or entities; NCCL's files have none, and they are not read"),
    ("SwitchName=s0 Nodes=n[0-3\n", "'n[0-3' is not a list of names such as n[0-15]"),
    ("SwitchName=s0 Nodes=n[3-0]\n", "'[3-0]' is not a list of numbers such as [0-15,20]"),
    ("SwitchName=s0 Nodes=n[0-999999999]\n", "'[0-999999999]' is more than 1,048,576 numbers"),
    ("SwitchName=s0 Nodes=n[0-999]m[0-999]k[0-9]\n", "'n[0-999]m[0-999]k[0-9]' is more than 1,048,576 names"),
    ("SwitchName=s0 Nodes=n0\nSwitchName=s1 Nodes=n0\n", "node 'n0' hangs on two switches"),
    ("SwitchName=s0 Nodes=n0\nSwitchName=s0 Nodes=n1\n", "a switch is described twice"),
    ("SwitchName=s0 Nodes=n0\nSwitchName=s1 Switches=s[0-1]\n", "switches in a circle"),
    ("SwitchName=s0 Switches=s1\n", "no switch has nodes"),
    ("SwitchName=s0 Nodes=n0 Switches=s1\nSwitchName=s1 Nodes=n\n", "switch 's0' has nodes and switches; leaves have nodes only"),
    ("SwitchName=s0 Nodes=n0\nSwitchName=s1 Switches=s[0,7]\n", "switch 's1' is joined to 's7', which is not described"),
    (LOPSIDED, "nodes hang on switches of different tiers"),
    ("SwitchName=s0 Nodes\n", "line 1: 'Nodes' is not KEY=VALUE"),
    ("- topology: x\n  flat: true\n", "no topology with a tree of switches or with blocks"),
]


@pytest.mark.parametrize(("text", "line"), BROKEN, ids=[line[:50] for _, line in BROKEN])
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "dump.txt"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_cluster(str(path), overrides={"node.gpu": "h100-sxm"})
    assert str(error.value) == f"{path}: {line}"


def test_what_no_reader_knows_is_taken_for_a_description(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_text("hello")
    with pytest.raises(UserError, match="dump.txt: expected a mapping of fields, found a text"):
        load_cluster(str(path))


def test_the_gpu_has_to_be_named() -> None:
    with pytest.raises(UserError, match="field 'node.gpu' is required"):
        read("h100.topo.txt")


# -- NCCL's XML --------------------------------------------------------------------------------------------------------------


def test_xml_of_an_a100() -> None:
    cluster = read("a100.nccl.xml", "a100-sxm-40gb", nodes=2)
    assert shares(cluster.topology(), 8) == shares(load_cluster("dgx-a100-40gb").topology(), 8)
    assert (cluster.node.nics, cluster.node.nic) == (8, 25e9)
    assert cluster.node.board().rail == list(range(8))  # two GPUs and two NICs under a switch: one each
    assert not cluster.topology().multicast  # the switch is there, the generation is too early
    links = cluster.topology().routes(np.array([3]), np.array([11]))[0]
    assert cluster.topology().capacity(links[links >= 0]) / 1e9 == pytest.approx(
        [31.508, 31.508, 25, 25, 31.508, 31.508], rel=1e-4
    )
    assert [note.removeprefix("a100.nccl.xml: ") for note in cluster.notes] == [
        "ignored: slower NICs eth0",
        "not in the file: node.gpu (SM 80)",
    ]


def test_xml_of_a_virtual_machine_that_hides_its_pcie() -> None:
    cluster = read("v100-vm.nccl.xml", "v100-sxm2-32gb")
    assert shares(cluster.topology(), 4) == shares(load_cluster("dgx-1v").topology(), 4)
    assert {edge.rate for edge in cluster.node.edges if edge.kind == "pcie"} == {0.0}  # gpu.pcie, 16 GB/s
    assert any("16 lanes as node.gpu has assumed" in note for note in cluster.notes)
    assert any("nvlink of 'gpu 0' to 0000:00:1f.0" in note for note in cluster.notes)  # a GPU that this machine does not see


def test_uneven_nvlinks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v100.xml"
    path.write_text((DATA / "v100-vm.nccl.xml").read_text().replace('count="2"', 'count="1"', 1))
    with pytest.raises(UserError, match="not symmetric: 'gpu 0' has 1 NVLinks to 'gpu 3', which has 2 back"):
        load_cluster(str(path), overrides={"node.gpu": "v100-sxm2-32gb"})


# -- Slurm -------------------------------------------------------------------------------------------------------------------


def test_slurm_gives_nodes_and_tiers() -> None:
    cluster = load_cluster(f"dgx-a100+{DATA / 'slurm-tree.conf'}")
    assert (cluster.nodes, cluster.fabric.kind, cluster.node.nic) == (64, "fat_tree", 25e9)
    assert cluster.fabric.model_dump() | {"leaf_nodes": 8, "pod_nodes": 32} == cluster.fabric.model_dump()
    cluster = load_cluster(f"dgx-a100+{DATA / 'slurm-topology.yaml'}")
    assert cluster.nodes == 22
    assert cluster.fabric.model_dump() | {"leaf_nodes": 8, "pod_nodes": 0} == cluster.fabric.model_dump()
    assert any("leaves of 6 to 8 nodes taken as leaves of 8" in note for note in cluster.notes)


def test_slurm_in_a_description_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(
        "BlockName=b[0-1] Nodes=n[0-17]\n".replace("b[0-1]", "b0") + "BlockName=b1 Nodes=m[0-17]\nBlockSizes=18\n"
    )
    (tmp_path / "mine.yaml").write_text("based_on: [dgx-h100, topology.conf]\nfabric: {oversubscription: 2}\n")
    cluster = load_cluster(str(tmp_path / "mine.yaml"))
    assert (cluster.name, cluster.nodes) == ("mine", 36)
    assert cluster.fabric.model_dump() | {"leaf_nodes": 18, "oversubscription": 2} == cluster.fabric.model_dump()
    assert [note.split(": ", 1)[1] for note in cluster.notes][:2] == [
        "ignored: blocksizes",
        "not in the file: what joins b0, b1; a spine assumed",
    ]


def test_one_switch(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text("SwitchName=s0 Nodes=n[0-15]\n")
    cluster = load_cluster(f"dgx-h100+{tmp_path / 'topology.conf'}")
    assert (cluster.nodes, cluster.fabric.kind) == (16, "single")


def test_hostlist() -> None:
    assert hostlist("n[0-2,7],m1") == ["n0", "n1", "n2", "n7", "m1"]
    assert hostlist("rack[1-2]n[08-10]") == ["rack1n08", "rack1n09", "rack1n10", "rack2n08", "rack2n09", "rack2n10"]
    assert hostlist("") == []


def test_one_switch_replaces_any_tree(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text("SwitchName=s0 Nodes=n[0-15]\n")
    assert load_cluster(f"meta-24k+{tmp_path / 'topology.conf'}").fabric.kind == "single"


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.iterdir()))
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    text, random = (DATA / name).read_text(), np.random.default_rng(0)
    path, lines = tmp_path / "dump.txt", []
    for _ in range(30):
        start, length = random.integers(0, len(text)), random.integers(1, 60)
        path.write_text(text[:start] + str(random.choice(["", "X", "NV9", "<", "[", "\n", "-1"])) + text[start + length :])
        try:
            load_cluster(f"dgx-h100+{path}" if "slurm" in name else str(path), overrides={"node.gpu": "h100-sxm"}).topology()
        except UserError as error:
            lines.append(str(error))
    assert lines
    assert not any("\n" in line for line in lines)
