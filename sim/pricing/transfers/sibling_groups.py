"""Equivalent sibling groups of a collective, and ranks that do the same and may share a lane.

Every group is a communicator of its own: NCCL looks where its members are and lays rings and trees, and chooses among them, for
this group. With tp=4 on nodes of 6 GPUs one group is inside a node and the next on two.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.collectives import Ids
from sim.collectives.cycles import MEMBERS
from sim.grid import Grid
from sim.pricing.transfers.traffic import Traffic, members
from sim.pricing.transfers.translation import copies, translated
from sim.pricing.transfers.wiring import endpoints, plan_of, rings
from topologies.links.cluster_topology import ClusterTopology
from topologies.links.impaired import varying
from topologies.links.topology import Topology, aggregation, is_unequal, node_kind

_VARYING = np.uint64(0xD6E8FEB86659FD93)


class Membership(NamedTuple):
    """The groups of one collective. group: the group of each rank; kind: the kind of each group; groups of one kind are
    equivalent.
    """

    group: Ids
    kind: Ids


@lru_cache(maxsize=4096)
def placements(topology: Topology, grid: Grid, traffic: Traffic) -> tuple[tuple[int, ...], ...]:
    """Numbers of sibling groups, those together for which algorithms have the same schedule: their members are in the same way
    spread over nodes and wired to each other. `()` stands for all groups.
    """
    again = copies(topology, grid, traffic)
    return _classes(again.of_all(topology, _placed_alike(topology, members(grid, again.first))))


def _placed_alike(topology: Topology, groups: Ids) -> Ids:
    """A number for each group."""
    if len(groups) == 1:
        return np.zeros(1, np.int64)
    where = _pattern(topology.node_of(groups))
    if (kind := node_kind(topology, groups)).any():
        where = np.concatenate([where, kind], axis=1)
    if (fabric := aggregation(topology)) is not None:
        where = np.concatenate([where, *map(_pattern, np.moveaxis(fabric.aggregators(groups), 2, 0))], axis=1)
    if not 2 < groups.shape[1] <= MEMBERS:  # no rings along direct links
        return numbered(where)
    _, first, each = np.unique(topology.node_of(np.arange(topology.gpus)), return_index=True, return_inverse=True)
    rows = np.concatenate([where, groups - first[each][groups]], axis=1)  # nodes, and places inside them
    _, examples, row = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    keys = [(tuple(where[group].tolist()), rings(topology, tuple(groups[group].tolist()))) for group in examples]
    names = {key: number for number, key in enumerate(keys)}
    return np.array([names[key] for key in keys])[row.ravel()]


def _classes(kind: Ids) -> tuple[tuple[int, ...], ...]:
    return together(kind.tolist()) if (kind != kind[:1]).any() else ((),)


def _pattern(node: Ids) -> Ids:
    """Each member's node as the number of the first member there, row by row."""
    order = np.argsort(node, axis=1, kind="stable")
    ranked = np.take_along_axis(node, order, axis=1)
    starts = np.concatenate([np.ones_like(ranked[:, :1], dtype=bool), ranked[:, 1:] != ranked[:, :-1]], axis=1)
    begin = np.maximum.accumulate(np.where(starts, np.arange(node.shape[1]), 0), axis=1)
    result = np.empty_like(order)
    np.put_along_axis(result, order, np.take_along_axis(order, begin, axis=1), axis=1)
    return result


def together(values: Iterable[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Positions of equal values, in order of first appearance."""
    positions: dict[Hashable, list[int]] = {}
    for position, value in enumerate(values):
        positions.setdefault(value, []).append(position)
    return tuple(map(tuple, positions.values()))


@lru_cache(maxsize=4096)
def kinds(topology: Topology, grid: Grid, traffic: Traffic) -> tuple[int, ...]:
    """A number for each group of `traffic`, `()` where all are equal: groups of equal numbers send over equal links. Their
    algorithm has one schedule.
    """
    again = copies(topology, grid, traffic)
    if len(members(grid, again.first)) == 1:
        return ()
    plan, _ = plan_of(topology, grid, traffic)
    groups = endpoints(topology, grid, again.first, plan)
    sums, equal = np.zeros(len(groups), np.uint64), True
    for number, phase in enumerate(plan.phases):
        routes = topology.routes(groups[:, phase.source].ravel(), groups[:, phase.destination].ravel())
        rows = _marks(topology, routes).reshape(len(groups), -1)
        if not (rows == rows[0]).all():
            equal = False
            weights = np.random.default_rng(number).integers(1, 2**63, size=rows.shape[1], dtype=np.uint64)
            sums += (rows * weights).sum(axis=1)
    return () if equal else tuple(again.of_all(topology, numbered(sums[:, None])).tolist())


def _marks(topology: Topology, routes: Ids) -> NDArray[np.uint64]:
    """A number for each route that only routes over links of equal kinds, capacities and latencies share."""
    real = routes >= 0
    links = routes[real]
    bits = (
        topology.kind(links).astype(np.uint64),
        topology.capacity(links).view(np.uint64),
        topology.latency(links).view(np.uint64),
    )
    random = np.random.default_rng(0).integers(1, 2**63, size=len(bits), dtype=np.uint64)
    marks = np.zeros(routes.shape, np.uint64)
    marks[real] = sum(value * weight for value, weight in zip(bits, random, strict=True))
    marks[real] += varying(topology, links).astype(np.uint64) * _VARYING
    return np.asarray(marks.sum(axis=1, dtype=np.uint64))


def lanes(memberships: Sequence[Membership], lane: Ids, most: int) -> Ids | None:
    """Ranks that do the same share a lane: the lane of each rank, numbered in order of first ranks; None if more than `most`.

    lane: equal numbers for ranks that are alike by themselves, numbered in order of first ranks.

    Ranks are alike whose groups are of equal kind and bring together the same lanes: then all of them come to the same meetings
    at the same times (colour refinement, as in `sim.pricing.transfers.symmetry`).
    """
    while True:
        parts = [lane]
        for group, kind in memberships:
            present = np.zeros((len(kind), int(lane.max(initial=0)) + 1), dtype=bool)
            present[group, lane] = True
            parts.append(numbered(np.concatenate([kind[:, None], np.packbits(present, axis=1)], axis=1))[group])
        refined = numbered(np.stack(parts, axis=1))
        if refined.max(initial=0) == lane.max(initial=0):
            return refined
        if refined.max() >= most:
            return None
        lane = refined


def numbered(rows: NDArray[Any]) -> Ids:
    """Equal rows have equal numbers, in order of first appearance."""
    _, first, number = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[number.ravel()])


@lru_cache(maxsize=4096)
def first_alike(topology: Topology, grid: Grid, siblings: Traffic) -> Traffic:
    """The groups at the lowest coordinates whose ranks are those of `siblings`, shifted by periods of the cluster."""
    if not isinstance(topology, ClusterTopology) or is_unequal(topology):
        return siblings
    node = topology.node_of(members(grid, copies(topology, grid, siblings).first))
    period = topology.gpus_per_node if (node == node[:, :1]).all() else topology.period
    if period is None:
        return siblings
    return translated(grid, siblings, period)[0]
