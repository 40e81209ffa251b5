"""The ranks of a communication: groups of ranks that run a collective, or pairs of a sender and a receiver."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sim.collectives import Ids
from sim.grid import Grid


class Traffic(NamedTuple):
    """The ranks of a communication: a collective along `axes` of the ranks at coordinates `at`, or (to not empty) a send to the
    ranks at `to`.

    `groups` picks some of the sibling groups by number; () is all of them at once. `algorithm` is the full name,
    "all_reduce/ring".
    counts: of an all_to_allv, as in `Place`.
    """

    algorithm: str
    axes: tuple[str, ...]
    at: tuple[tuple[str, int], ...]
    to: tuple[tuple[str, int], ...] = ()
    groups: tuple[int, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()


def members(grid: Grid, traffic: Traffic) -> Ids:
    """Ranks of the groups, shape (groups, n); of a send, (pairs, 2): sender and receiver."""
    return _members(grid, traffic._replace(algorithm="", counts=()))


@lru_cache(maxsize=4)  # the algorithms of a collective have the same
def _members(grid: Grid, traffic: Traffic) -> Ids:
    at = dict(traffic.at)
    if traffic.to:
        groups = np.stack([grid.groups((), at).ravel(), grid.groups((), dict(traffic.to)).ravel()], axis=1)
    else:
        groups = grid.groups(traffic.axes, at)
    groups = groups[list(traffic.groups)] if traffic.groups else groups
    groups.flags.writeable = False
    return groups


def first_members(grid: Grid, traffic: Traffic) -> Ids:
    """The first row of `members`."""
    number = traffic.groups[0] if traffic.groups else 0
    if not traffic.to:
        return grid.group(number, traffic.axes, dict(traffic.at))
    return np.concatenate([grid.group(number, (), dict(at)) for at in (traffic.at, traffic.to)])


def ranks_of(grid: Grid, traffic: Traffic) -> int:
    """Ranks of a group; of a send 2."""
    return 2 if traffic.to else grid.size(traffic.axes)
