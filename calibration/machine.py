"""The machine at hand, as people and profiles name it."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from math import gcd
from pathlib import Path
from typing import Any

from calibration.devices import Kind
from calibration.devices import device as compute_device
from calibration.devices.cpu import processor
from sim.pricing.prices import Profile
from topologies.cluster import Cluster
from topologies.cluster_files import cluster_names, gpu_names, inline_cluster, load_cluster, load_gpu
from topologies.reading import UserError

MEASURED_HERE = "measured by `shardyard calibrate`"  # the source of prices that are this project's own
GPUS = {  # what the driver calls a GPU, without its maker -> its name in the catalogue
    r"GB300": "gb300",
    r"GB200": "gb200",
    r"B300( SXM6 AC)?": "b300-sxm",
    r"B200": "b200-sxm",
    r"GH200 480GB": "gh200-96gb",
    r"H200": "h200-sxm",
    r"H100 NVL": "h100-nvl",
    r"H100 PCIe": "h100-pcie",
    r"H100( SXM5)?( 80GB)?( HBM3)?": "h100-sxm",
    r"H800": "h800-sxm",
    r"H20": "h20",
    r"A100[ -](PCIe|PCIE|80GB)[ -](PCIe|80GB)": "a100-pcie-80gb",
    r"A100-SXM4?-40GB": "a100-sxm-40gb",
    r"A100-SXM4?-80GB": "a100-sxm-80gb",
    r"A10G": "a10g",
    r"A10": "a10",
    r"L40S": "l40s",
    r"L4": "l4",
    r"T4": "t4",
    r"GeForce RTX 4090": "rtx-4090",
    r"V100-SXM3-32GB": "v100-sxm3-32gb",
    r"V100-SXM2-32GB": "v100-sxm2-32gb",
    r"V100-SXM2-16GB": "v100-sxm2-16gb",
    r"Instinct MI300X": "mi300x",
    r"Instinct MI325X": "mi325x",
}
MAKERS = r"(NVIDIA |Tesla |AMD )*"
ALIKE = 0.1  # of its memory by which a GPU may differ from the one in the catalogue: what ECC and the driver keep
LESS_MEMORY = {"v100-sxm2-16gb": "v100-sxm2-32gb"}  # a GPU -> another that is wired in the same nodes
REFERENCE = ("dgx-", "hgx-")  # the maker's own nodes: of clusters with one GPU these come before those of clouds


def describe(device: Kind, ranks: int) -> dict[str, Any]:
    """What a journal begins with: machine, versions and ranks. Samples of unlike ones are never mixed."""
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "torch"
    here = compute_device(device)
    name, backend = f"{os.cpu_count()} × {processor()}", here.versions()
    head: dict[str, Any] = {}
    if here.ordered:
        facts = here.facts()
        name = f"{facts['name']}, {name}"
        head["facts"] = {key: facts[key] for key in ("memory", "multiprocessors", "capability")}
    versions = f"{torch}, {backend}, Python {platform.python_version()}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, ranks)
    return {"device": device, "ranks": ranks, "machine": name, "versions": versions, "memory": memory} | head


def elsewhere(profile: Profile, machine: Mapping[str, Any]) -> str | None:
    """What to say when a profile that `shardyard calibrate` measured is used on another machine or with other versions."""
    gemm = profile.provenance.get("gemm")
    if gemm is None or gemm.source != MEASURED_HERE:
        return None
    apart = [
        f"{there}, not {machine[what]}"
        for what, there in (("machine", gemm.machine), ("versions", gemm.versions))
        if there != machine[what]
    ]
    if not apart:
        return None
    return f"profile {profile.name} was measured on {'; '.join(apart)}: measure this machine by `shardyard calibrate`"


def known_gpu(name: str, memory: float = 0.0) -> str | None:
    """The catalogue's name of a GPU that its driver names; None of one that it does not have. memory: bytes, 0: not known."""
    found = next((gpu for pattern, gpu in GPUS.items() if re.fullmatch(MAKERS + pattern, name.strip())), None)
    if found is None or not memory:
        return found
    return found if abs(memory / load_gpu(found).memory - 1) <= ALIKE else None


def catalogue_gpu(name: str, memory: float = 0.0) -> str:
    """The same. Raises UserError."""
    if gpu := known_gpu(name, memory):
        return gpu
    size = f" of {memory / 1e9:.0f} GB" if memory else ""
    raise UserError(
        f"GPU '{name}'{size} is not in the catalogue ({', '.join(gpu_names())}): describe it in a cluster file, --cluster FILE"
    )


def catalogue_cluster(gpu: str, per_node: int) -> Cluster:
    """A cluster of the catalogue with this GPU and at least so many in a node, its maker's own node before those of clouds; one
    bare GPU needs no links. Raises UserError.
    """
    if cluster := _wired(gpu, per_node):
        return cluster
    if per_node == 1:
        return inline_cluster({"name": gpu, "node": {"gpu": gpu, "gpus": 1, "wiring": "bare"}}, gpu)
    if (alike := LESS_MEMORY.get(gpu)) and (cluster := _wired(alike, per_node)):
        return load_cluster(cluster.name, overrides={"node.gpu": gpu})
    raise UserError(f"no cluster of the catalogue has {per_node} × {gpu} in a node: describe how it is wired, --cluster FILE")


def _wired(gpu: str, per_node: int) -> Cluster | None:
    for name in sorted(cluster_names(), key=lambda name: not name.startswith(REFERENCE)):
        cluster = load_cluster(name)
        if len(cluster.gpu_kinds) == 1 and cluster.node.gpu.name == gpu and cluster.node.gpus >= per_node:
            return cluster
    return None


def part_of(gpu: str, count: int) -> dict[str, Any]:
    """`count` of these GPUs in one node, as a cluster file. Raises UserError."""
    if count == 1:
        return {"name": f"one-{gpu}", "node": {"gpu": gpu, "gpus": 1, "wiring": "bare"}}
    part = _part(catalogue_cluster(gpu, count), count)
    return {"name": f"{count}-{gpu}"} | part | {"node": part["node"] | {"gpu": gpu}}


def own_part(path: str, count: int, device: Kind) -> dict[str, Any]:
    """`count` GPUs of one node of a cluster that the user describes, as a cluster file. Raises UserError."""
    cluster = load_cluster(path)
    if another := another_gpu(cluster, device):
        raise UserError(f"--cluster {path}: {another}")
    if cluster.node.gpus < count:
        raise UserError(f"--cluster {path}: has {cluster.node.gpus} GPUs in a node, and {count} are to be measured (--devices)")
    based = path if path in cluster_names() else str(Path(path).resolve())
    return _part(cluster, count) | {"name": f"{count}-{cluster.node.gpu.name}", "based_on": based}


def _part(cluster: Cluster, count: int) -> dict[str, Any]:
    """A node of the cluster with so many of its GPUs, which no message leaves. Raises UserError."""
    node, own = cluster.node, {"gpus": count}
    if node.nics:
        own["nics"] = count
    over_pcie = node.gpus_per_switch > 0
    if (node.wiring == "cube_mesh" and count != node.gpus) or (
        over_pcie and count % node.sockets
    ):  # it depends on which they are
        raise UserError(f"{count} of the {node.gpus} GPUs of {cluster.name}: describe how they are wired, --cluster FILE")
    if over_pcie:
        own["gpus_per_switch"] = gcd(count // node.sockets, node.gpus_per_switch)
    return {"based_on": cluster.name, "nodes": 1, "node": own}


def another_gpu(cluster: Cluster, device: Kind) -> str | None:
    """What to say when the GPUs of `cluster` are not the one at hand, both of the catalogue; None where they are, or where one is
    a description of the user's own.
    """
    facts = compute_device(device).facts()
    here, asked = known_gpu(str(facts["name"]), float(facts["memory"])), cluster.node.gpu.model
    if here is None or asked not in gpu_names() or here == asked:
        return None
    return f"cluster {cluster.name} has GPUs of another kind ({asked}) than this machine ({facts['name']}: {here})"


def own_cluster(name: str, processes: int, peak: float, bandwidth: float, memory: float, loopback: float) -> dict[str, Any]:
    """A cluster file of a machine without GPUs: peaks are the best that was measured."""
    from sim.pricing.profile_file import quantity

    gpu = {
        "name": f"{name}-core",
        "sms": 0,
        "peak": {"fp32": quantity(peak, "FLOP/s")},
        "memory": quantity(float(int(memory)), "B"),
        "memory_bandwidth": quantity(bandwidth, "B/s"),
    }
    node = {"gpu": gpu, "gpus": processes, "wiring": "loopback" if processes > 1 else "bare"}
    if processes > 1:
        node["loopback"] = quantity(loopback, "B/s")
    return {"name": name, "node": node, "source": "measured by `shardyard calibrate`: rates are the best that were reached"}
