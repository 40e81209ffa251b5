"""A cluster: nodes on a fabric, from the catalogue or from the user's own file.

`ls topologies/clusters topologies/gpus` is the catalogue. A file may say `based_on: dgx-h100` and give only what differs; nested
fields are merged one by one (`peak` is replaced as a whole), `null` takes a field away. `nodes` is how many, or where they are
not alike a list of groups in the order of their ranks: `[{count: 8, node: dgx-a100}, {count: 1, missing: [gpu 3]}]`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from topologies.cluster_topology import ClusterTopology
from topologies.fabric import Fabric, fabrics, read_fabric
from topologies.hardware import Dtype, Gpu, Latency
from topologies.node import Node
from topologies.node_group import NodeGroup
from topologies.readers import read_dump
from topologies.reading import Config, UserError, build, is_there, load_text, load_yaml, nearest, parse_yaml, shown
from topologies.storage import Storage, load_storage
from topologies.unequal_topology import UnequalTopology

__all__ = [
    "Cluster",
    "Dtype",
    "Fabric",
    "Gpu",
    "Latency",
    "Node",
    "NodeGroup",
    "UnequalCluster",
    "cluster_names",
    "gpu_names",
    "inline_cluster",
    "load_cluster",
    "load_gpu",
]

MAX_GPUS = 2**20  # GPUs
GROUPS = 1000  # of nodes that are alike
MAX_LINKS = 2**24
BASES = 8  # descriptions on which one is based, and how deep
ETHERNET = 12.5e9  # bytes per second: slower NICs than 100 Gb/s are taken for plain Ethernet (assumed)
_HERE = Path(__file__).parent


def _storage(given: object) -> object:
    return None if given is None else load_storage(given, "storage")


class Cluster(Config):
    """`nodes` equal nodes on a fabric. Hashable: equal clusters are one key of a cache. storage: the file system that all share;
    None: not said.
    """

    name: str
    node: Node
    nodes: int = Field(default=1, ge=1)
    fabric: Annotated[SerializeAsAny[Fabric], BeforeValidator(read_fabric)] = Field(default_factory=lambda: fabrics["single"]())
    source: str = ""
    storage: Annotated[SerializeAsAny[Storage] | None, BeforeValidator(_storage)] = Field(
        default=None, exclude_if=lambda at: at is None
    )
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
    def groups(self) -> tuple[NodeGroup, ...]:
        """Nodes that are alike, in the order of their GPUs."""
        return (NodeGroup.model_construct(count=self.nodes, node=self.node, missing=()),)

    @property
    def gpu_kinds(self) -> tuple[Gpu, ...]:
        """The different GPUs."""
        return tuple(dict.fromkeys(group.node.gpu for group in self.groups))

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node; where nodes have different numbers, the most that divides all of them."""
        return gcd(*(len(group.gpus) for group in self.groups))

    @property
    def described(self) -> str:
        """Its nodes in a few words."""
        return f"{self.nodes} × {self.name}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Caveats of the description: rates that cannot be reached, networks that were not measured."""
        return self._remarks(self.node)

    def _remarks(self, node: Node) -> tuple[str, ...]:
        remarks = []
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


class UnequalCluster(Cluster):
    """Groups of nodes on a fabric, numbered in order. What asks for the `node` of a cluster is for nodes that are alike, and is
    refused: nothing takes some of them for all.
    """

    nodes: int = 0  # in all
    every: tuple[NodeGroup, ...] = Field(min_length=1, max_length=GROUPS)

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """Nodes that are alike, in the order of their GPUs."""
        return self.every

    @property
    def gpus(self) -> int:
        """Number of GPUs in all."""
        return sum(group.count * len(group.gpus) for group in self.every)

    @property
    def described(self) -> str:
        """Its nodes in a few words."""
        parts = [
            f"{group.count} × {len(group.gpus)} {group.node.gpu.name}"
            + (f" without {', '.join(group.missing)}" * bool(group.missing))
            for group in self.every
        ]
        return f"{self.name} ({', '.join(parts)})"

    @model_validator(mode="after")
    def _consistent(self) -> UnequalCluster:
        if self.gpus > MAX_GPUS:
            raise ValueError(f"nodes have {self.gpus:,} GPUs: more than {MAX_GPUS:,} are not simulated")
        for number, group in enumerate(self.every):
            board = group.node.board()
            if not group.node.nics:
                raise ValueError(f"nodes.{number}: nodes that are not alike must all have NICs")
            if group.node.gpus > 1 and not board.joined:
                raise ValueError(f"nodes.{number}: wiring='{group.node.wiring}' gives GPUs no way to each other")
        names = [gpu.name for gpu in self.gpu_kinds]
        if len(set(names)) < len(names):
            raise ValueError(f"nodes: GPUs that differ need names that differ: {', '.join(names)}")
        ranges = self.fabric.backbone_of(
            [(group.node, group.count) for group in self.every]
        ).ranges  # raises when it does not fit
        links = sum(group.count * len(group.node.board().links) for group in self.every) + sum(each.count for each in ranges)
        if links > MAX_LINKS:
            raise ValueError(f"nodes and the fabric have {links:,} links: more than {MAX_LINKS:,} are not simulated")
        return self

    @property
    def remarks(self) -> tuple[str, ...]:
        """Caveats of the descriptions."""
        return tuple(dict.fromkeys(remark for group in self.every for remark in self._remarks(group.node)))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> UnequalCluster:
        """A copy. Raises UserError where the number of nodes or their description would change: they are a list."""
        if {"node", "nodes"} & set(update or ()):
            raise UserError(_not_alike(self))
        return super().model_copy(update=update, deep=deep)


def _not_alike(cluster: Cluster) -> str:
    return f"cluster {cluster.described}: its nodes are not alike, which simulate, advise, whatif and compare take, but not this"


def _no_node(cluster: Cluster) -> Node:
    raise UserError(_not_alike(cluster))


UnequalCluster.node = property(_no_node)  # type: ignore[assignment]  # pydantic takes one in the class for the field's default


@functools.lru_cache(maxsize=64)
def _topology(cluster: Cluster) -> ClusterTopology:
    if isinstance(cluster, UnequalCluster):
        return UnequalTopology(cluster.every, cluster.fabric)
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


def load_cluster(name_or_path: str, nodes: int | list[Any] | None = None, overrides: Mapping[str, Any] | None = None) -> Cluster:
    """A cluster of the catalogue, or the one that a file describes: YAML, JSON, or what a machine printed (`topologies.readers`).

    Several names joined by "+" are merged, the later ones on top: "dgx-h100+slurm/topology.conf".
    nodes: replaces the number of nodes. overrides: fields that replace fields of the description, nested or with dots in their
    names (`{"node.nic": "200 Gb/s"}`). Raises UserError for unknown names, unreadable files and impossible descriptions.
    """
    data = _stack([name_or_path] if is_there(Path(name_or_path), folder=False) else name_or_path.split("+"), {}, ())
    for key, value in (overrides or {}).items():
        if str(key).partition(".")[0] == "node" and isinstance(data.get("nodes"), list):
            raise UserError(f"{name_or_path}: {key}: its nodes are a list of some that are not alike: change them there")
        for part in reversed(str(key).split(".")):
            value = {part: value}
        data = _complete(_merge(data, value))
    if nodes is not None:
        if isinstance(data.get("nodes"), list) and not isinstance(nodes, list):
            raise UserError(f"{name_or_path}: nodes={nodes} contradicts its list of nodes that are not alike")
        data["nodes"] = nodes
    return _built(data, name_or_path)


def inline_cluster(data: Mapping[str, Any], where: str) -> Cluster:
    """The cluster whose fields are given, with the name of a GPU in place of its description where wanted. Raises UserError."""
    return _built(_complete({"name": "cluster"} | dict(data)), where)


def _built(data: dict[str, Any], where: str) -> Cluster:
    """A cluster of equal nodes, or of a list of groups of nodes that differ."""
    if not isinstance(data.get("nodes"), list):
        return build(Cluster, data, where)
    given = data["nodes"]
    if not 0 < len(given) <= GROUPS:
        raise UserError(f"{where}: nodes: a list of {len(given)} groups; must be 1 to {GROUPS:,}")
    own = data.pop("node", None)
    groups = [
        build(NodeGroup, _group(group, own, f"{where}: nodes.{number}"), f"{where}: nodes.{number}").clocked()
        for number, group in enumerate(given)
    ]
    merged: list[NodeGroup] = []
    for group in groups:  # neighbours that are equal are one group
        if merged and merged[-1].model_copy(update={"count": group.count}) == group:
            merged[-1] = group.model_copy(update={"count": merged[-1].count + group.count})
        else:
            merged.append(group)
    total = sum(group.count for group in merged)
    if len(merged) == 1 and not merged[0].missing:
        return build(Cluster, data | {"nodes": total, "node": merged[0].node}, where)
    return build(UnequalCluster, data | {"nodes": total, "node": merged[0].node, "every": tuple(merged)}, where)


def _group(given: object, own: object, where: str) -> dict[str, Any]:
    """A group's fields, with the description of its node: that of a cluster of the catalogue or a file, what differs from it
    (`based_on`) or from the cluster's own node, or the cluster's own node.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"{where}={shown(given)}: must be fields such as {{count: 8, node: dgx-a100}}")
    node: Any = given.get("node")
    if isinstance(node, str):
        node = _stack([node], {}, ()).get("node")
    elif isinstance(node, Mapping) and "based_on" in node:
        base = _stack([str(node["based_on"])], {}, ()).get("node", {})
        node = _merge(base, {field: value for field, value in node.items() if field != "based_on"})
    elif isinstance(node, Mapping) and isinstance(own, Mapping):
        node = _merge(own, node)
    elif node is None:
        node = own
    if node is None:
        raise UserError(f"{where}: field 'node' is required: a cluster of the catalogue, or the fields of a node")
    return {**given, "node": _complete({"node": node})["node"]}


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
    """Replace the name of a GPU by its description; fields of a storage that is named can be changed."""
    if isinstance(data.get("storage"), str):
        data = data | {"storage": {"based_on": data["storage"]}}
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
