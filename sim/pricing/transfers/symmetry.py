"""Equivalence classes of the members, transfers and links of a collective: those that behave alike at all times.

Colour refinement (equitable partition; Paige and Tarjan 1987, doi:10.1137/0216062): a transfer's colour is its phase, size and
latency with the colours of its ends and links; a member's and a link's colour is the multiset of the colours of its transfers.
When no colour splits any more, members of one colour have as many transfers of each colour, and links of one colour carry as
many. By induction over time they then do everything at the same moments at the same rates: whether a round may begin depends on
how many transfers have ended, and a max-min fair rate on how many are on each link. So one of each colour stands for all exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topologies.links.topology import Ids

Hashes = NDArray[np.uint64]
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)


class Classes(NamedTuple):
    """Class numbers 0, 1, … of transfers, members and links."""

    transfer: Ids
    member: Ids
    link: Ids


def classes(transfer: Hashes, source: Ids, destination: Ids, routes: Ids, link: Hashes) -> Classes:
    """Coarsest classes that respect the given colours.

    transfer: colours, shape (E,); source, destination: members 0, 1, … that are all met; routes: links, (E, hops) padded with −1;
    link: colours of all links. Colours are 64-bit hashes: among 10⁶ of them two meet by chance once in 10⁷ runs.
    """
    real = routes >= 0
    crossing, crossed = np.nonzero(real)[0], _Sums(routes[real])
    sent, received = _Sums(source), _Sums(destination)
    member = np.zeros(int(max(source.max(initial=-1), destination.max(initial=-1))) + 1, np.uint64)
    colours, base, before = transfer, transfer, 0
    while True:
        on_links = np.where(real, _mixed(link)[routes], np.uint64(0)).sum(axis=1, dtype=np.uint64)
        colours = _mixed(base + _mixed(member)[source] * _ODD[0] + _mixed(member)[destination] * _ODD[1] + on_links)
        member = _mixed(member + sent(colours, len(member)) * _ODD[2] + received(colours, len(member)) * _ODD[3])
        link = _mixed(link + crossed(colours[crossing], len(link)))
        result = Classes(*(np.unique(colour, return_inverse=True)[1] for colour in (colours, member, link)))
        number = sum(int(classes.max(initial=-1)) for classes in result)
        if number == before:
            return result
        before = number


class _Sums:
    """Adds up values by number."""

    def __init__(self, numbers: Ids) -> None:
        self.order = np.argsort(numbers, kind="stable")
        self.numbers, self.first = np.unique(numbers[self.order], return_index=True)

    def __call__(self, values: Hashes, size: int) -> Hashes:
        result = np.zeros(size, np.uint64)
        if len(self.numbers):
            result[self.numbers] = np.add.reduceat(values[self.order], self.first)
        return result


def _mixed(value: Hashes) -> Hashes:
    """Scrambled bits (the finaliser of SplitMix64, Steele et al. 2014, doi:10.1145/2714064.2660195)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
