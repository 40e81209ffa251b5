"""Collectives: every operation, size and group, back to back and between pieces of a training step.

Imports torch: import this module inside the function that needs it.

Sibling groups run at the same time, as a job's do. Back to back the price is the time of the rank that waited least (the others'
includes waiting for it), the median over repetitions. In a step it is the mean over ranks, waiting included: what a rank's
compute loses per collective; a mean over repetitions, because a step pays for the slow ones too. Where some ranks only send, the
longest counts. Every size is verified before it is timed.

gloo adds up 16-bit numbers one at a time: an all-reduce of them tells what a number takes beyond its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from calibration.launch.groups import new_group
from calibration.measure.bench import LEAST, Action, Bench, Probe, Reading, spread, trimmed
from calibration.measure.grid import OFTEN, OPERATIONS, SMALL, Grid
from calibration.measure.training import piece
from topologies.reading import UserError

USUAL = ("all_reduce", "all_gather", "reduce_scatter", "send")  # what training mostly does
ROOTED = ("broadcast", "reduce", "gather", "scatter", "send")  # some ranks are done before the others have their data


@dataclass(frozen=True)
class Group:
    """This rank's group and its place in it; its siblings run the same at the same time. nodes: how many it spans."""

    ranks: tuple[int, ...]
    nodes: int
    handle: Any
    place: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


def layouts(hosts: Sequence[float]) -> list[list[tuple[int, ...]]]:
    """Sibling groups to measure: of 2, 4, 8 … ranks inside each node, pairs of neighbouring nodes, one rank of every node, and
    all ranks.

    hosts: the machine of every rank. Machines with unlike numbers of ranks have only the group of all.
    """
    nodes = [tuple(int(rank) for rank in np.flatnonzero(np.array(hosts) == host)) for host in dict.fromkeys(hosts)]
    local, world = len(nodes[0]), len(hosts)
    result: list[list[tuple[int, ...]]] = []
    if all(len(node) == local for node in nodes):
        size = 2
        while size <= local:
            if local % size == 0:
                result.append([node[at : at + size] for node in nodes for at in range(0, local, size)])
            size *= 2
        if local > 1 and local & (local - 1):
            result.append(list(nodes))
        if len(nodes) > 2 and len(nodes) % 2 == 0:  # sends between nodes are of pairs
            result.append(
                [pair for first, second in zip(nodes[::2], nodes[1::2], strict=True) for pair in zip(first, second, strict=True)]
            )
        if len(nodes) > 1 and local > 1:
            result.append(list(zip(*nodes, strict=True)))
    everyone = [tuple(range(world))]
    return result if world < 2 or everyone in result else [*result, everyone]


def groups(bench: Bench) -> list[Group]:
    """This rank's process group of every layout. Each rank makes its own: on 1,024 ranks there are some 900 in all."""
    result = []
    for siblings in layouts(bench.host.tolist()):
        ranks = next((ranks for ranks in siblings if bench.place.rank in ranks), None)
        if ranks is not None:
            handle = new_group(ranks, alone=True)
            nodes = len({bench.host[rank] for rank in ranks})
            result.append(Group(ranks, nodes, handle, ranks.index(bench.place.rank)))
    return result


def everyone(bench: Bench) -> Group:
    """All ranks, who meet in the group that they have already."""
    ranks = tuple(range(bench.place.world))
    return Group(ranks, len(set(bench.host.tolist())), None, bench.place.rank)


NARROW = 2**23  # bytes of an all-reduce of 16-bit numbers


def probes(grid: Grid, among: Iterable[Group], room: float, narrow: bool = False) -> list[Probe]:
    """Both contexts of every operation and size, one after the other. room: bytes that the buffers of a rank may take; narrow:
    also an all-reduce of 16-bit numbers in each group.
    """
    result = []
    contexts: tuple[Literal["alone", "step"], ...] = ("alone", "step")
    for group in among:
        if narrow and room >= 4 * NARROW:
            size = min(NARROW, grid.largest) // group.size * group.size
            sums: dict[str, str | float] = {
                "operation": "all_reduce",
                "bytes": float(size),
                "ranks": group.size,
                "nodes": group.nodes,
            }
            run = _timed("all_reduce", size, group, 0, grid.side, torch.float16)
            result.append(Probe("collective", sums | {"dtype": "fp16"}, run, rounds=10))
        for operation in OPERATIONS:
            members, nodes = group.size, group.nodes
            if operation == "send":
                odd = group.size % 2 == 1 and group.nodes in (1, group.size)
                if group.size < 2 or (group.size > 2 and not odd):
                    continue  # its pairs are in another layout
                members, nodes = 2, min(2, group.nodes)  # of an odd number the others look on
            sizes = [4 * group.size] if operation == "barrier" else [size for size in grid.sizes if 4 * size <= room]
            sizes = sizes if operation in USUAL else sizes[::-1][:: grid.rare][::-1]
            for size in sizes:
                whole = max(1, size // (4 * members)) * 4 * members  # bytes: a multiple of fp32 elements and members
                case: dict[str, str | float] = {
                    "operation": operation,
                    "bytes": 0.0 if operation == "barrier" else float(whole),
                    "ranks": members,
                    "nodes": nodes,
                }
                often = grid.repeated * (OFTEN if size < SMALL else 1)
                for context in contexts:
                    result.append(
                        Probe(
                            "collective",
                            case,
                            _timed(operation, whole, group, often if context == "step" else 0, grid.side),
                            context,
                            rounds=10 if operation in USUAL or grid.rare == 1 else 1,
                        )
                    )
    return result


def _timed(
    operation: str, size: int, group: Group, in_step: int, side: int, dtype: torch.dtype = torch.float32
) -> Callable[[Bench], Reading]:
    """in_step: least repetitions between pieces of compute; 0: back to back."""

    def run(bench: Bench) -> Reading:
        action, result, expected = prepared(operation, size, group, bench, dtype)
        action()
        right = all(bool((tensor == value).all()) for tensor, value in zip(result(), expected, strict=True))
        if not bench.gather([float(right)]).all():
            raise UserError(f"{operation} of {size} bytes among {group.size} ranks: the result is wrong: nothing is priced by it")
        for tensor in result():
            tensor.zero_()
        between = piece(bench, side) if in_step else None
        extra = bench.repetitions(between)[1] if between else 0.0
        count, _ = bench.repetitions(action, extra, in_step or LEAST)
        bench.barrier()
        table = bench.gather(bench.times(action, count, between).tolist())
        return _reading(table, operation, bool(in_step), bench, group)

    return run


def _reading(table: np.ndarray[Any, Any], operation: str, in_step: bool, bench: Bench, group: Group) -> Reading:
    """Of times (world, repetitions): the group that took longest counts, as siblings are alike."""
    everyone = bench.gather([float(group.ranks[0])])[:, 0]
    best: Reading | None = None
    for first in np.unique(everyone):
        mine = table[everyone == first]
        each = mine.max(axis=0) if operation in ROOTED else mine.mean(axis=0) if in_step else mine.min(axis=0)
        value = trimmed(each) if in_step else float(np.median(each))
        reading = Reading(value, float(np.median(mine.min(axis=0))), spread(each), table.shape[1])
        best = reading if best is None or reading.value > best.value else best
    assert best is not None
    return best


Prepared = tuple[Action, Callable[[], list[Tensor]], list[float]]


def prepared(operation: str, size: int, group: Group, bench: Bench, dtype: torch.dtype = torch.float32) -> Prepared:
    """(the operation on a full buffer of `size` bytes, the tensors that hold its result, the value of each after the first run).

    Rank r of the group begins with r + 1 everywhere.
    """
    n, mine, handle = group.size, group.place + 1.0, group.handle
    whole = torch.full((size // dtype.itemsize,), mine, device=bench.device, dtype=dtype)
    part = torch.full((size // dtype.itemsize // n,), mine, device=bench.device, dtype=dtype)
    total, root = n * (n + 1) / 2, group.ranks[0]
    at_root = group.place == 0
    each = [float(rank + 1) for rank in range(n)]
    if operation in ("all_reduce", "barrier"):
        return lambda: dist.all_reduce(whole, group=handle), lambda: [whole], [total]
    if operation == "all_gather":
        gather = _newest("all_gather_single", "all_gather_into_tensor")
        return lambda: gather(whole, part, group=handle), lambda: list(whole.chunk(n)), each
    if operation == "reduce_scatter":
        scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
        return lambda: scatter(part, whole, group=handle), lambda: [part], [total]
    if operation == "broadcast":
        return lambda: dist.broadcast(whole, root, group=handle), lambda: [whole], [1.0]
    if operation == "reduce":
        return lambda: dist.reduce(whole, root, group=handle), lambda: [whole] if at_root else [], [total] if at_root else []
    if operation == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=handle), lambda: list(other.chunk(n)), each
    return _rooted(operation, whole, part, group)


def _rooted(operation: str, whole: Tensor, part: Tensor, group: Group) -> Prepared:
    n, root, handle, at_root = group.size, group.ranks[0], group.handle, group.place == 0
    pieces = list(whole.chunk(n)) if at_root else None
    if operation == "gather":
        each = [float(rank + 1) for rank in range(n)]
        return lambda: dist.gather(part, pieces, root, group=handle), lambda: pieces or [], each if at_root else []
    if operation == "scatter":
        return lambda: dist.scatter(part, pieces, root, group=handle), lambda: [part], [1.0]
    if at_root:
        return lambda: dist.send(whole, group.ranks[1], group=handle), lambda: [], []
    if group.place > 1:
        return lambda: None, lambda: [], []
    return lambda: dist.recv(whole, root, group=handle), lambda: [whole], [1.0]


def _newest(name: str, fallback: str) -> Callable[..., Any]:
    """torch 2.13 renames its operations on one tensor; older versions have the old name."""
    function: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, fallback)
    return function
