"""Slurm's `topology.conf` and `topology.yaml`: which nodes hang on which switch. The tree, but no speeds that can be used.

slurm.schedmd.com/topology.conf.html: `SwitchName=s0 Nodes=n[0-15]`, `SwitchName=core Switches=s[0-3]`; the block plugin has
`BlockName=b0 Nodes=n[0-17]`. A block is taken as a leaf.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import Any, NamedTuple

from topologies.documents.syntaxes import parse
from topologies.readers import ClusterDump, readers

_LIMIT = 2**20  # nodes, and names of switches with the nodes of each


class _Switch(NamedTuple):
    name: str
    nodes: list[str]
    switches: list[str]


@readers("Slurm topology")
def slurm(text: str) -> ClusterDump | None:
    """Number of nodes and the fabric. What a node is comes from another description: `based_on: [dgx-h100, topology.conf]`."""
    if re.search(r"^[ \t]*(SwitchName|BlockName)[ \t]*=", text, re.MULTILINE | re.IGNORECASE):
        switches, notes = _conf(text)
    elif re.search(r"^-[ \t]*topology[ \t]*:", text, re.MULTILINE):
        switches, notes = _yaml(text)
    else:
        return None
    data, more = _fabric(switches)
    assumed = "not in the file: rates; leaves have the uplinks for all their NICs (oversubscription 1) unless given"
    return ClusterDump(data, (*notes, *more, assumed))


def _conf(text: str) -> tuple[list[_Switch], list[str]]:
    switches, ignored, total = [], set(), 0
    for number, line in enumerate(re.sub(r"\\\n", " ", text).splitlines(), start=1):
        fields = {}
        for word in line.partition("#")[0].split():
            key, equals, value = word.partition("=")
            if not equals or not value:
                raise ValueError(f"line {number}: '{word}' is not KEY=VALUE")
            fields[key.lower()] = value
        name = fields.pop("switchname", None) or fields.pop("blockname", None)
        if name:
            names, nodes, below = (hostlist(part) for part in (name, fields.pop("nodes", ""), fields.pop("switches", "")))
            total += len(names) * max(1, len(nodes) + len(below))
            if total > _LIMIT:
                raise ValueError(f"line {number}: more than {_LIMIT:,} nodes")
            switches += [_Switch(each, nodes, below) for each in names]
        ignored |= set(fields)
    return switches, [f"ignored: {key}" for key in sorted(ignored)]


def _yaml(text: str) -> tuple[list[_Switch], list[str]]:
    """The first topology of the file that is a tree or consists of blocks."""
    data = parse(text)
    switches: list[_Switch] = []
    notes: list[str] = []
    for entry in data if isinstance(data, list) else ():
        tree = entry.get("tree", entry.get("block")) if isinstance(entry, dict) else None
        parts = (tree.get("switches") or tree.get("blocks")) if isinstance(tree, dict) else None
        if switches or not isinstance(parts, list):
            notes.append(f"ignored: topology '{entry.get('topology') if isinstance(entry, dict) else entry}'")
            continue
        total = 0
        for part in parts:
            switches.append(_part(part))
            total += len(switches[-1].nodes) + len(switches[-1].switches)
            if total > _LIMIT:
                raise ValueError(f"more than {_LIMIT:,} nodes")
    if not switches:
        raise ValueError("no topology with a tree of switches or with blocks")
    return switches, notes


def _part(part: Any) -> _Switch:
    name = part.get("switch", part.get("block")) if isinstance(part, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"'{part}' is not a switch or a block with a name")
    return _Switch(name, hostlist(str(part.get("nodes") or "")), hostlist(str(part.get("children") or "")))


def hostlist(text: str) -> list[str]:
    """Slurm's short form: `n[0-2,7],m1` is n0, n1, n2, n7, m1. Raises ValueError when it is malformed."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        choices = [_range(piece) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        size = 1
        for choice in choices:
            size *= len(choice)
        if size + len(names) > _LIMIT:
            raise ValueError(f"'{part[:80]}' is more than {_LIMIT:,} names")
        names += ["".join(choice) for choice in product(*choices)]
    if text.count("[") != text.count("]") or ("[" in text and not names):
        raise ValueError(f"'{text[:80]}' is not a list of names such as n[0-15]")
    return names


def _range(text: str) -> list[str]:
    result: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(f"'[{text[:80]}]' is not a list of numbers such as [0-15,20]")
        if int(match[2] or match[1]) - int(match[1]) >= _LIMIT - len(result):
            raise ValueError(f"'[{text[:80]}]' is more than {_LIMIT:,} numbers")
        result += [str(n).zfill(len(match[1])) for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return result


def _fabric(switches: list[_Switch]) -> tuple[dict[str, Any], list[str]]:
    by_name = {switch.name: switch for switch in switches}
    nodes = [node for switch in switches for node in switch.nodes]
    _check(switches, by_name, nodes)
    roots = set(by_name) - {below for switch in switches for below in switch.switches}
    leaves = [switch for switch in switches if switch.nodes]
    tiers, notes = [list(roots)], []
    while any(by_name[name].switches for name in tiers[-1]):
        tiers.append([below for name in tiers[-1] for below in by_name[name].switches])
        if len(tiers) > 3 or len(tiers[-1]) > len(by_name):
            raise ValueError("more than 3 tiers of switches, switches in a circle, or one below several others")
    if not roots or sum(map(len, tiers)) != len(by_name):
        raise ValueError("switches in a circle")
    if set(tiers[-1]) != {switch.name for switch in leaves}:
        raise ValueError("nodes hang on switches of different tiers")
    if len(roots) > 1:
        names = ", ".join(sorted(roots)[:4]) + " …" * (len(roots) > 4)
        notes.append(f"not in the file: what joins {names}; a spine assumed")
        tiers.insert(0, [""])
    if len(tiers) > 3:
        raise ValueError("more than 3 tiers of switches")
    sizes = {len(switch.nodes) for switch in leaves}
    if len(sizes) > 1:
        notes.append(f"leaves of {min(sizes)} to {max(sizes)} nodes taken as leaves of {max(sizes)}")
    if len(leaves) == 1:
        none = dict.fromkeys(("leaf_nodes", "oversubscription", "pod_nodes", "pod_oversubscription"))  # of a description below
        return {"nodes": len(nodes), "fabric": {"kind": "single", **none}}, notes
    fabric: dict[str, Any] = {"kind": "fat_tree", "leaf_nodes": max(sizes), "pod_nodes": None}
    if len(tiers) == 3:
        pods = {len(by_name[name].switches) for name in tiers[1]}
        fabric["pod_nodes"] = max(pods) * max(sizes)
    return {"nodes": len(nodes), "fabric": fabric}, notes


def _check(switches: list[_Switch], by_name: dict[str, _Switch], nodes: list[str]) -> None:
    if len(by_name) < len(switches):
        raise ValueError("a switch is described twice")
    if not nodes:
        raise ValueError("no switch has nodes")
    if len(set(nodes)) < len(nodes):
        twice = Counter(nodes).most_common(1)[0][0]
        raise ValueError(f"node '{twice}' hangs on two switches")
    for switch in switches:
        unknown = [below for below in switch.switches if below not in by_name]
        if unknown:
            raise ValueError(f"switch '{switch.name}' is joined to '{unknown[0]}', which is not described")
        if switch.nodes and switch.switches:
            raise ValueError(f"switch '{switch.name}' has nodes and switches; leaves have nodes only")
