"""A cluster: nodes of one kind on a fabric, from the catalogue or from the user's own file.

`ls topologies/clusters topologies/gpus` is the catalogue. A file may say `based_on: dgx-h100` and give only what differs; nested
fields are merged one by one (`peak` is replaced as a whole), `null` takes a field away.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from topologies.cluster_topology import ClusterTopology
from topologies.fabric import Fabric, fabrics, read_fabric
from topologies.hardware import Dtype, Gpu, Latency
from topologies.node import Node
from topologies.readers import read_dump
from topologies.reading import Config, UserError, build, is_there, load_text, load_yaml, nearest, parse_yaml, shown

__all__ = [
    "Cluster",
    "Dtype",
    "Fabric",
    "Gpu",
    "Latency",
    "Node",
    "cluster_names",
    "gpu_names",
    "inline_cluster",
    "load_cluster",
    "load_gpu",
]

MAX_GPUS = 2**20  # GPUs
MAX_LINKS = 2**24
BASES = 8  # descriptions on which one is based, and how deep
ETHERNET = 12.5e9  # bytes per second: slower NICs than 100 Gb/s are taken for plain Ethernet (assumed)
_HERE = Path(__file__).parent


class Cluster(Config):
    """`nodes` equal nodes on a fabric. Hashable: equal clusters are one key of a cache."""

    name: str
    node: Node
    nodes: int = Field(default=1, ge=1)
    fabric: Annotated[SerializeAsAny[Fabric], BeforeValidator(read_fabric)] = Field(default_factory=lambda: fabrics["single"]())
    source: str = ""
    notes: tuple[str, ...] = ()  # what was ignored or assumed where a machine's own output was read

    @property
    def gpus(self) -> int:
        """Number of GPUs in all."""
        return self.nodes * self.node.gpus

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        if self.nodes * self.node.gpus > MAX_GPUS:
            raise ValueError(f"nodes·gpus = {self.nodes}·{self.node.gpus}: more than {MAX_GPUS:,} GPUs are not simulated")
        if self.nodes > 1 and not self.node.nics and not self.fabric.direct:
            raise ValueError(f"nodes={self.nodes} contradicts node.nics=0: nodes reach each other through NICs")
        board = self.node.board()
        if self.node.gpus > 1 and not board.joined and (self.node.nics or not self.fabric.direct):
            raise ValueError(f"node.wiring='{self.node.wiring}' gives gpus={self.node.gpus} no way to each other")
        ranges = self.fabric.backbone(self.node, self.nodes).ranges  # raises when the fabric does not fit
        links = self.nodes * len(board.links) + sum(each.count for each in ranges)
        if links > MAX_LINKS:
            raise ValueError(f"nodes={self.nodes} and the fabric have {links:,} links: more than {MAX_LINKS:,} are not simulated")
        return self

    @property
    def remarks(self) -> tuple[str, ...]:
        """Caveats of the description: rates that cannot be reached, networks that were not measured."""
        node, remarks = self.node, []
        if node.nics and node.pcie:
            into, out = node.nic * node.nics / node.rails, node.pcie * node.gpus / node.rails
            if into > out:
                remarks.append(f"node.nic: {into / 1e9:.3g} GB/s of NICs are more than {out / 1e9:.3g} GB/s of PCIe lets through")
        if self.nodes > 1 and node.nics and node.gpu.sms and node.nic < ETHERNET:
            remarks.append(
                f"node.nic={node.nic / 1e9:.3g} GB/s: nodes are priced as joined by InfiniBand or RoCE; TCP over Ethernet was "
                "not measured: it starts later (give node.latency.nic) and may reach less"
            )
        return tuple(remarks)

    def topology(self) -> ClusterTopology:
        """Links and routes (a `Topology`); built once per cluster."""
        return _topology(self)


@functools.lru_cache(maxsize=64)
def _topology(cluster: Cluster) -> ClusterTopology:
    return ClusterTopology(cluster.node, cluster.fabric, cluster.nodes)


def cluster_names() -> list[str]:
    """Names in the catalogue of clusters, sorted."""
    return _names("clusters")


def gpu_names() -> list[str]:
    """Names in the catalogue of GPUs, sorted."""
    return _names("gpus")


def load_gpu(name: str) -> Gpu:
    """A GPU of the catalogue. Raises UserError with the nearest name when there is none of that name."""
    return build(Gpu, _gpu(name), f"gpu '{name}'")


def load_cluster(name_or_path: str, nodes: int | None = None, overrides: Mapping[str, Any] | None = None) -> Cluster:
    """A cluster of the catalogue, or the one that a file describes: YAML, JSON, or what a machine printed (`topologies.readers`).

    Several names joined by "+" are merged, the later ones on top: "dgx-h100+slurm/topology.conf".
    nodes: replaces the number of nodes. overrides: fields that replace fields of the description, nested or with dots in their
    names (`{"node.nic": "200 Gb/s"}`). Raises UserError for unknown names, unreadable files and impossible descriptions.
    """
    data = _stack([name_or_path] if is_there(Path(name_or_path), folder=False) else name_or_path.split("+"), {}, ())
    for key, value in (overrides or {}).items():
        for part in reversed(str(key).split(".")):
            value = {part: value}
        data = _complete(_merge(data, value))
    if nodes is not None:
        data["nodes"] = nodes
    return build(Cluster, data, name_or_path)


def inline_cluster(data: Mapping[str, Any], where: str) -> Cluster:
    """The cluster whose fields are given, with the name of a GPU in place of its description where wanted. Raises UserError."""
    return build(Cluster, _complete({"name": "cluster"} | dict(data)), where)


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (_HERE / folder).glob("*.yaml"))


def _cluster(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """The complete raw mapping behind a name or a path, with `based_on` and GPU names resolved."""
    if name in seen:
        raise UserError(f"{name}: based_on={name!r} refers to itself")
    is_path = "/" in name or "." in name or (name not in cluster_names() and is_there(Path(name), folder=False))
    if not is_path and name not in cluster_names():
        raise UserError(f"unknown cluster '{name}'{nearest(name, cluster_names())}")
    path = Path(name) if is_path else _HERE / "clusters" / f"{name}.yaml"
    data = {"name": path.stem} | (_file(path) if is_path else load_yaml(path))
    bases = data.pop("based_on", None) or []
    bases = bases if isinstance(bases, list) else [bases]
    if len(bases) > BASES or len(seen) >= BASES:
        raise UserError(f"{name}: based_on: more than {BASES} descriptions, or one on the other")
    return _stack([_beside(path, str(base)) for base in bases], data, (*seen, name))


def _file(path: Path) -> dict[str, Any]:
    """A description, or what a machine printed about itself."""
    text = load_text(path)
    dump = read_dump(text, str(path))
    return parse_yaml(text, path) if dump is None else {**dump.data, "notes": [f"{path.name}: {note}" for note in dump.notes]}


def _beside(path: Path, base: str) -> str:
    """A file named in a file lies beside it."""
    return str(path.parent / base) if "." in base else base


def _stack(bases: Sequence[str], data: dict[str, Any], seen: tuple[str, ...]) -> dict[str, Any]:
    """Descriptions one on top of the other, each giving what differs; `data` is the uppermost."""
    layers = [*(_cluster(base, seen) for base in bases), data]
    lists = [notes for layer in layers if (notes := layer.get("notes")) is not None]
    if not all(isinstance(notes, list) for notes in lists):
        raise UserError(f"{seen[-1] if seen else 'cluster'}: notes={shown(lists[-1])}: must be a list of texts")
    notes = [note for part in lists for note in part]
    result: dict[str, Any] = {}
    for layer in layers:
        result = _merge(result, layer)
    return _complete(result | ({"notes": notes} if notes else {}))


def _complete(data: dict[str, Any]) -> dict[str, Any]:
    """Replace the name of a GPU by its description."""
    node = data.get("node")
    if isinstance(node, Mapping) and "gpu" in node:
        data = data | {"node": dict(node) | {"gpu": _gpu(node["gpu"])}}
    return data


def _gpu(description: object) -> Any:
    if isinstance(description, Mapping) and "based_on" in description:
        rest = {key: value for key, value in description.items() if key != "based_on"}
        return _merge(_gpu(str(description["based_on"])), rest)
    if not isinstance(description, str):
        return description
    if description not in gpu_names():
        raise UserError(f"unknown GPU '{description}'{nearest(description, gpu_names())}")
    return {"name": description} | load_yaml(_HERE / "gpus" / f"{description}.yaml")


def _merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the fields of `change`; nested mappings merge, except `peak`; None removes."""
    result = dict(base)
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping) and key != "peak" and "based_on" not in value:
            result[key] = _merge(result[key], value)
        else:
            result[key] = value
    return result
