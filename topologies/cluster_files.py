"""Clusters and GPUs by name from the catalogue, from files, or given as fields.

`ls topologies/clusters topologies/gpus` is the catalogue. A file may say `based_on: dgx-h100` and give only what differs; nested
fields are merged one by one (`peak` is replaced as a whole), `null` takes a field away.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from topologies.cluster import GROUPS, Cluster, UnequalCluster
from topologies.hardware import Gpu
from topologies.node_group import NodeGroup
from topologies.readers import read_dump
from topologies.reading import UserError, build, is_there, load_text, load_yaml, nearest, parse_yaml, shown

BASES = 8  # descriptions on which one is based, and how deep
KEPT = 64  # clusters that are known by their fields
_KNOWN: dict[str, Cluster] = {}
_HERE = Path(__file__).parent


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
        return _equal(data, where)
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


def _equal(data: dict[str, Any], where: str) -> Cluster:
    """A cluster of equal nodes; of the fields of one that was asked for before, that one: to check them takes most of the time of
    reading a job. A file system may be described in a file, which can change.
    """
    if data.get("storage") is not None:
        return build(Cluster, data, where)
    fields = repr(data)
    if fields not in _KNOWN:
        if len(_KNOWN) >= KEPT:
            _KNOWN.clear()
        _KNOWN[fields] = build(Cluster, data, where)
    return _KNOWN[fields]


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
    return list(_there(folder, (_HERE / folder).stat().st_mtime_ns))


@functools.lru_cache(maxsize=2)
def _there(folder: str, _changed: int) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (_HERE / folder).glob("*.yaml")))


def _shipped(folder: str, name: str) -> dict[str, Any]:
    """The fields in a file of the catalogue, which is read once."""
    path = _HERE / folder / f"{name}.yaml"
    return deepcopy(_read(path, path.stat().st_mtime_ns))


@functools.cache
def _read(path: Path, _changed: int) -> dict[str, Any]:
    return load_yaml(path)


def _cluster(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """The complete raw mapping behind a name or a path, with `based_on` and GPU names resolved."""
    if name in seen:
        raise UserError(f"{name}: based_on={name!r} refers to itself")
    is_path = "/" in name or "." in name or (name not in cluster_names() and is_there(Path(name), folder=False))
    if not is_path and name not in cluster_names():
        raise UserError(f"unknown cluster '{name}'{nearest(name, cluster_names())}")
    path = Path(name) if is_path else _HERE / "clusters" / f"{name}.yaml"
    data = {"name": path.stem} | (_file(path) if is_path else _shipped("clusters", name))
    if is_path and "model" in data:
        raise UserError(f"{name}: is a job, as it has a model, and no cluster: give it before all options")
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
    return {"name": description} | _shipped("gpus", description)


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
