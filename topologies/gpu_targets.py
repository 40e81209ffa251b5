"""GPUs as people name them: `all`, `gpu 3`, `gpus 0-7,12`, `rank 3`, `node 2`, `nodes 2,5`."""

from __future__ import annotations

import re

import numpy as np

from topologies.links.topology import Ids, Topology
from topologies.reading import UserError

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def gpus_named(target: str, topology: Topology, what: str) -> Ids:
    """The GPUs of a target, sorted. Raises UserError that begins with `what` when there are none of that number."""
    every = np.arange(topology.gpus)
    if target == "all":
        return every
    word, _, listed = target.partition(" ")
    parts = [_RANGE.fullmatch(part.strip()) for part in listed.split(",")]
    if word.removesuffix("s") not in ("gpu", "rank", "node") or not all(parts):
        raise UserError(f"{what}: must be on 'all', 'gpu 3', 'gpus 0-7,12' or 'node 2'")
    where = topology.node_of(every) if word.startswith("node") else every
    chosen = np.zeros(topology.gpus, dtype=bool)
    for part in parts:
        assert part is not None
        first, last = int(part[1]), int(part[2] or part[1])
        if first > last or last > where[-1]:
            raise UserError(f"{what}: {word.removesuffix('s')} {last}: they are numbered 0 to {where[-1]}")
        chosen |= (where >= first) & (where <= last)
    return np.flatnonzero(chosen)
