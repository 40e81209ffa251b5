"""The machine at hand, as people and profiles name it."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from calibration.launch.place import Device
from sim.pricing.prices import Profile
from topologies.cluster import Cluster
from topologies.cluster_files import cluster_names, gpu_names, inline_cluster, load_cluster
from topologies.reading import UserError

MEASURED_HERE = "measured by `shardyard calibrate`"  # the source of prices that are this project's own
GPUS = {  # what torch calls a GPU -> its name in the catalogue; the first that fits
    r"GB300": "gb300",
    r"GB200": "gb200",
    r"B200": "b200-sxm",
    r"H200": "h200-sxm",
    r"H100.*PCIe": "h100-pcie",
    r"H100": "h100-sxm",
    r"A100.*PCI": "a100-pcie-80gb",
    r"A100.*40GB": "a100-sxm-40gb",
    r"A100": "a100-sxm-80gb",
    r"L40S": "l40s",
    r"V100.*SXM3": "v100-sxm3-32gb",
    r"V100": "v100-sxm2-32gb",
}


def describe(device: Device, ranks: int) -> dict[str, Any]:
    """What a journal begins with: machine, versions and ranks. Samples of unlike ones are never mixed."""
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "torch"
    backend = "gloo"
    name = f"{os.cpu_count()} × {_processor()}"
    if device == "cuda":
        import torch as library

        name = f"{library.cuda.get_device_name()}, {name}"
        nccl = library.cuda.nccl.version()  # type: ignore[no-untyped-call]
        backend = f"NCCL {'.'.join(map(str, nccl))}, CUDA {library.version.cuda}"
    versions = f"{torch}, {backend}, Python {platform.python_version()}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, ranks)
    return {"device": device, "ranks": ranks, "machine": name, "versions": versions, "memory": memory}


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


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {
        key: match[1].strip()
        for key in ("model name", "cpu family", "model")
        if (match := re.search(rf"^{key}\s*:(.*)$", text, re.M))
    }
    family = f" (family {fields['cpu family']} model {fields['model']})" if {"cpu family", "model"} <= set(fields) else ""
    return fields.get("model name", platform.machine()) + family


def known_gpu(name: str) -> str | None:
    """The same, or None."""
    return next((gpu for pattern, gpu in GPUS.items() if re.search(pattern, name)), None)


def catalogue_gpu(name: str) -> str:
    """The catalogue's name of a GPU that torch names. Raises UserError."""
    if gpu := known_gpu(name):
        return gpu
    raise UserError(
        f"GPU '{name}' is not in the catalogue ({', '.join(gpu_names())}): describe it in a cluster file, --cluster FILE"
    )


def catalogue_cluster(gpu: str, per_node: int) -> Cluster:
    """A cluster of the catalogue with this GPU and at least so many in a node; one bare GPU needs no links. Raises UserError."""
    for name in cluster_names():
        cluster = load_cluster(name)
        if cluster.node.gpu.name == gpu and cluster.node.gpus >= per_node:
            return cluster
    if per_node == 1:
        return inline_cluster({"name": gpu, "node": {"gpu": gpu, "gpus": 1, "wiring": "bare"}}, gpu)
    raise UserError(f"no cluster of the catalogue has {per_node} × {gpu} in a node: describe how it is wired, --cluster FILE")


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
