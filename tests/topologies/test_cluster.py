"""Reading clusters: catalogue, the user's own files, and one clear line for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from topologies.cluster_files import cluster_names, gpu_names, inline_cluster, load_cluster, load_gpu
from topologies.reading import UserError

HOME = Path(__file__).parents[2] / "topologies"


def test_catalogue_is_complete_and_sourced() -> None:
    expected = {
        "dgx-1v",
        "dgx-2",
        "dgx-a100",
        "dgx-a100-40gb",
        "dgx-h100",
        "hgx-h200",
        "hgx-b200",
        "gb200-nvl72",
        "pcie-l40s",
        "cpu-gloo",
    }
    assert expected <= set(cluster_names())
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.name == name
        assert cluster.node.gpu.name in gpu_names()
    for path in [*HOME.glob("gpus/*.yaml"), *HOME.glob("clusters/*.yaml")]:
        data = yaml.safe_load(path.read_text())
        assert "source" in data or "based_on" in data, path


# dense rates, github.com/stas00/ml-engineering compute/accelerator/README.md; memory as nvidia-smi or PyTorch prints it
@pytest.mark.parametrize(
    ("name", "bf16", "mebibytes"),
    [
        ("a100-sxm-80gb", 312e12, 79.25 * 1024),
        ("h100-sxm", 989e12, 79.11 * 1024),
        ("h200-sxm", 989e12, 143771),
        ("l40s", 362e12, 46068),
    ],
)
def test_gpus_against_published_figures(name: str, bf16: float, mebibytes: float) -> None:
    gpu = load_gpu(name)
    assert gpu.peak["bf16"] == bf16
    assert gpu.memory == pytest.approx(mebibytes * 2**20)


def test_volta_has_no_bf16() -> None:
    assert set(load_gpu("v100-sxm2-32gb").peak) == {"fp32", "fp16"}


def test_units_arrive_as_bytes_per_second() -> None:
    node = load_cluster("dgx-h100").node
    assert (node.nic, node.nvlink) == (50e9, 450e9)


def test_equal_clusters_are_one_key() -> None:
    first, second = load_cluster("dgx-h100", nodes=4), load_cluster("dgx-h100", nodes=4)
    assert first == second
    assert len({first, second}) == 1
    assert first.topology() is second.topology()
    assert load_cluster("dgx-h100", nodes=5) != first


def test_own_file_builds_on_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text("based_on: dgx-h100\nnodes: 3\nnode: {nics: 4, gpu: {memory: 96 GiB}}\nfabric: {oversubscription: 2}\n")
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.gpus, cluster.node.nics, cluster.node.nic) == ("lab", 24, 4, 50e9)
    assert (cluster.node.gpu.memory, cluster.node.gpu.sms) == (96 * 2**30, 132)
    assert (cluster.fabric.kind, cluster.fabric.oversubscription) == ("rail", 2)
    (tmp_path / "wider.yaml").write_text("based_on: lab.yaml\nnodes: 9\n")
    assert load_cluster(str(tmp_path / "wider.yaml")).nodes == 9


def test_own_gpu_inline(tmp_path: Path) -> None:
    gpu = {"name": "x1", "sms": 10, "peak": {"fp16": "1 TFLOP/s"}, "memory": "1 GB", "memory_bandwidth": "10 GB/s"}
    path = tmp_path / "box.json"
    path.write_text(yaml.safe_dump({"node": {"gpu": gpu, "gpus": 2, "wiring": "pcie", "pcie": "12 GB/s"}}))
    assert load_cluster(str(path)).node.gpu.peak == {"fp16": 1e12}


def test_a_name_of_a_gpu_replaces_all_of_it() -> None:
    assert "fp8" not in load_cluster("dgx-h100", overrides={"node.gpu": "a100-sxm-80gb"}).node.gpu.peak
    assert load_cluster("dgx-h100", overrides={"node.gpu": {"peak": {"bf16": "1 PFLOP/s"}}}).node.gpu.peak == {"bf16": 1e15}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"node.nvlink": "0 GB/s"}, "dgx-h100: node.nvlink=0.0: input should be greater than 0"),
    ({"node.nvlink": None}, "dgx-h100: node.nvlink is required by wiring='switch'"),
    ({"node.nic": "400"}, "dgx-h100: node.nic='400': needs a unit, such as '400 Gb/s'"),
    ({"node.nic": 400}, "dgx-h100: node.nic=400: needs a unit, such as '400 Gb/s'"),
    ({"node.nic": "400 wug"}, "dgx-h100: node.nic='400 wug': is not a quantity with a unit, such as '400 Gb/s'"),
    ({"node.latency.nic": "-1 us"}, "dgx-h100: node.latency.nic='-1 us': must be finite and not negative"),
    ({"fabric.hop_latency": "-1 us"}, "dgx-h100: fabric.hop_latency='-1 us': must be finite and not negative"),
    ({"node.gpus": 0}, "dgx-h100: node.gpus=0: input should be greater than or equal to 1"),
    ({"nodes": 0}, "dgx-h100: nodes=0: input should be greater than or equal to 1"),
    ({"node.nics": 3}, "dgx-h100: node.nics=3 does not divide gpus=8, nor the other way round"),
    ({"node.nics": 0}, "dgx-h100: node.nics=0 contradicts nic=5e+10 B/s: give both or neither"),
    (
        {"node": {"nics": None, "nic": None}, "nodes": 2},
        "dgx-h100: nodes=2 contradicts node.nics=0: nodes reach each other through NICs",
    ),
    ({"fabric.oversubscription": 0.5}, "dgx-h100: fabric.oversubscription=0.5: input should be greater than or equal to 1"),
    ({"fabric.leaf_nodes": None}, "dgx-h100: fabric.leaf_nodes is required by kind='rail'"),
    (
        {"fabric.kind": "single"},
        "dgx-h100: fabric.kind='single' contradicts leaf_nodes: its fields are hop_latency, transport, sharp",
    ),
    ({"node.wiring": "swich"}, "dgx-h100: node.wiring='swich': unknown wiring 'swich'; did you mean 'switch'?"),
    ({"node.wiring": "pcie"}, "dgx-h100: node.nvlink=4.5e+11 B/s contradicts wiring='pcie': there is no nvlink link here"),
    ({"node": {"wiring": "cube_mesh", "gpus": 4, "nics": 4}}, "dgx-h100: node.gpus=4: wiring='cube_mesh' has 8"),
    ({"node.gpu": "h10-sxm"}, "unknown GPU 'h10-sxm'; did you mean 'h100-sxm'?"),
    ({"node.gpu": "H10-SXM"}, "unknown GPU 'H10-SXM'; did you mean 'h100-sxm'?"),
    ({"node.gpu.memory": "0 GB"}, "dgx-h100: node.gpu.memory=0.0: input should be greater than 0"),
    (
        {"node.gpu.peak": {"bf16": "0 FLOP/s"}},
        "dgx-h100: gpu.peak.bf16=0: must be greater than 0; leave out a dtype that is not supported",
    ),
    ({"node.nvlnk": "1 GB/s"}, "dgx-h100: unknown field 'node.nvlnk'; did you mean 'nvlink'?"),
]


@pytest.mark.parametrize(("overrides", "line"), MISTAKES, ids=[line[:60] for _, line in MISTAKES])
def test_a_mistake_is_one_line(overrides: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        load_cluster("dgx-h100", overrides=overrides)
    assert str(error.value) == line


def test_an_uneven_pcie_tree_is_refused() -> None:
    with pytest.raises(UserError, match="node.gpus=8 do not spread evenly over sockets=2 and gpus_per_switch=3"):
        load_cluster("pcie-l40s", overrides={"node.gpus_per_switch": 3})


def test_slots_of_a_pcie_tree_are_the_gpus_own_unless_given() -> None:
    plain = {"node": {"gpu": "l40s", "gpus": 4, "wiring": "pcie"}}
    assert inline_cluster(plain, "c").node.pcie == load_gpu("l40s").pcie == 31e9
    assert inline_cluster({"node": plain["node"] | {"pcie": "16 GB/s"}}, "c").node.pcie == 16e9


def test_rates_that_cannot_be_reached_and_networks_that_were_not_measured_are_told() -> None:
    assert load_cluster("dgx-h100", 2).remarks == ()
    fast = load_cluster("dgx-h100", 2, {"node.nic": "800 Gb/s"}).remarks
    assert fast == ("node.nic: 100 GB/s of NICs are more than 63 GB/s of PCIe lets through",)
    slow = load_cluster("dgx-h100", 2, {"node.nic": "25 Gb/s"}).remarks
    assert "TCP over Ethernet was not measured" in slow[0]
    assert load_cluster("dgx-h100", 1, {"node.nic": "25 Gb/s"}).remarks == ()


def test_nobody_sells_nics_that_pcie_slows_down() -> None:
    """A ConnectX-8 of 800 Gb/s hangs on 16 lanes of PCIe 6: 64 GT/s each, and 236 of a flit's 256 bytes are of transactions."""
    told = {name: load_cluster(name, 2).remarks for name in cluster_names() if load_cluster(name).node.nics}
    assert [name for name, remarks in told.items() if any("PCIe lets through" in remark for remark in remarks)] == []
    assert load_cluster("dgx-b300").node.pcie == pytest.approx(16 * 64e9 / 8 * 236 / 256, rel=0.001)


def test_ports_of_the_accelerators_themselves_are_behind_no_pcie() -> None:
    """Three ports of 100 GbE leave each Gaudi 2: 37.5 GB/s, where its PCIe 4 has 31."""
    topology = load_cluster("gaudi2", 2).topology()
    (way,) = topology.routes(np.array([0]), np.array([8]))
    links = way[way >= 0]
    assert [topology.kinds[kind] for kind in topology.kind(links)] == ["nic", "nic"]
    assert topology.capacity(links).tolist() == [37.5e9, 37.5e9]
    with pytest.raises(UserError, match="integrated_nics=true contradicts wiring='pcie', where NICs are behind PCIe"):
        load_cluster("pcie-l40s", 2, {"node.integrated_nics": True})
    with pytest.raises(UserError, match="integrated_nics=true contradicts nics=0"):
        load_cluster("cpu-gloo", 1, {"node.integrated_nics": True})


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown cluster 'dgx-h10'; did you mean 'dgx-h100'"):
        load_cluster("dgx-h10")
    with pytest.raises(UserError, match="cannot be read"):
        load_cluster(str(tmp_path / "none.yaml"))
    with pytest.raises(UserError, match="unknown GPU 'h100-sx'; did you mean 'h100-sxm'"):
        load_gpu("h100-sx")
    loop = tmp_path / "loop.yaml"
    loop.write_text("based_on: loop.yaml\n")
    with pytest.raises(UserError, match="refers to itself"):
        load_cluster(str(loop))


@pytest.mark.parametrize("path", sorted((HOME.parent / "examples" / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_describe_clusters(path: Path) -> None:
    cluster = load_cluster(str(path))
    assert cluster.name == path.stem
    assert cluster.topology().links > 0
    assert not cluster.notes
