"""Hops on the way that data takes: (inner links, outer links, seconds of wire)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.collectives import Phase
from sim.pricing.transfers.path_latency import Hops, Paths, hops_of, slowest, worst

FAST, SLOW = [1.0, 0.0, 0.1], [0.0, 1.0, 0.5]


def hops(*rows: list[float]) -> Hops:
    """Of each transfer its own row."""
    return Hops(np.array(rows), np.arange(len(rows)))


def after(paths: list[list[float]], phase: Phase, times: int, of: Hops) -> list[list[float]]:
    """Paths to all members' data when those before were `paths`."""
    result = Paths(np.array(paths))
    result.lengthen(phase, times, of)
    return result.rows[result.of].tolist()


def ring(members: int, times: int) -> Phase:
    every = np.arange(members)
    return Phase(every, np.roll(every, -1), np.zeros(members, np.int64), lambda _: every, times)


def test_a_route_is_a_hop_of_its_outermost_link_with_the_latency_of_all() -> None:
    """Over two inner links, over these and an outer one, and of a rank to itself."""
    kinds, latency = np.array([0, 0, 1]), np.array([0.1, 0.2, 0.5])
    topology: Any = SimpleNamespace(kinds=("inner", "outer"), kind=kinds.__getitem__, latency=latency.__getitem__)
    rows, of = hops_of(topology, np.array([[0, 1, -1], [0, 2, 1], [-1, -1, -1], [1, 0, -1]]))
    assert rows[of].tolist() == [pytest.approx(row) for row in ([1, 0, 0.3], [0, 1, 0.8], [0, 0, 0], [1, 0, 0.3])]
    assert len(rows) == 3
    alike = hops_of(topology, np.array([[0, 2], [2, 0]]))
    assert (len(alike.rows), alike.rows[alike.of].tolist()) == (1, [pytest.approx([0, 1, 0.6])] * 2)


def test_one_outer_hop_is_slower_than_any_number_of_inner_ones() -> None:
    assert slowest(np.array([[5.0, 1.0, 0.0], [0.0, 2.0, 0.0], [9.0, 1.0, 3.0]])).tolist() == [0.0, 2.0, 0.0]
    assert slowest(np.array([[1.0, 1.0, 0.2], [1.0, 1.0, 0.7], [2.0, 0.0, 9.0]])).tolist() == [1.0, 1.0, 0.7]


def test_the_slowest_group_counts_of_each_transfer() -> None:
    """Two groups of two transfers."""
    rows, of = worst(hops(FAST, SLOW, SLOW, FAST), groups=2)
    assert rows[of].tolist() == [SLOW, SLOW]


@pytest.mark.parametrize(("times", "ways"), [(2, [1, 1, 0.6]), (3, [1, 2, 1.1]), (6, [3, 3, 1.8])])
def test_data_in_a_ring_crosses_fast_and_slow_hops_in_turns(times: int, ways: list[float]) -> None:
    """Of the slowest start, after what took (0, 1, 0) before."""
    before = [[0.0, 1.0, 0.0]] + [[0.0, 0.0, 0.0]] * 3
    paths = after(before, ring(4, times), times, hops(FAST, SLOW, FAST, SLOW))
    assert paths == [pytest.approx([ways[0], ways[1] + 1, ways[2]])] * 4


def test_alike_hops_add_up() -> None:
    alike = Hops(np.array([SLOW]), np.zeros(4, np.int64))
    assert after([[0.0, 0.0, 0.0]] * 4, ring(4, 3), 3, alike) == [[0.0, 3.0, 1.5]] * 4


def test_one_round_adds_a_hop_to_the_slower_of_what_is_there_and_what_comes() -> None:
    """Member 1 hears of 0 over a slow hop, 2 of 1 over a fast one; 2 had waited longer than both."""
    phase = Phase(np.array([0, 1]), np.array([1, 2]), np.zeros(2, np.int64), lambda _: np.arange(2))
    before = [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 3.0, 0.0]]
    assert after(before, phase, 1, hops(SLOW, FAST)) == [before[0], SLOW, [0.0, 3.0, 0.0]]


def test_the_slowest_of_some_paths_has_most_hops_of_the_outermost_kind() -> None:
    """Then of inner links, then on the longest wire; of one path it is that one."""
    assert slowest(np.array([[1.0, 2.0, 0.5]])).tolist() == [1.0, 2.0, 0.5]
    paths = np.array([[9.0, 0.0, 0.5], [2.0, 1.0, 0.1], [3.0, 1.0, 0.2], [3.0, 1.0, 0.1]])
    assert slowest(paths).tolist() == [3.0, 1.0, 0.2]


def key(path: list[float]) -> tuple[float, ...]:
    """What the order of paths is by: hops of the outermost kind, of the next one, and wire."""
    return (path[1], path[0], path[2])


def drawn(random: np.random.Generator, count: int) -> NDArray[np.float64]:
    return random.integers(0, 3, (count, 3)).astype(float)


@pytest.mark.parametrize(("members", "transfers"), [(200, 5), (30, 8), (200, 60), (3, 60)])
def test_members_that_many_send_to_keep_the_slowest_of_all_paths(members: int, transfers: int) -> None:
    """Few transfers, up to a handful to a member, and twenty: against the slowest of a list."""
    random = np.random.default_rng(members + transfers)
    source, destination = random.integers(0, members, (2, transfers))
    arrival, ways = drawn(random, members), drawn(random, transfers)
    phase = Phase(source, destination, np.zeros(transfers, np.int64), lambda _: source)
    paths = Paths(arrival)
    paths.lengthen(phase, 1, hops(*ways.tolist()))
    for member, path in enumerate(paths.rows[paths.of].tolist()):
        comes = [arrival[member], *(arrival[source] + ways)[destination == member]]
        assert path == max((each.tolist() for each in comes), key=key)
    assert paths.longest.tolist() == max(paths.rows[paths.of].tolist(), key=key)


@pytest.mark.parametrize("times", [2, 7, 40, 130])
def test_a_ring_whose_hops_repeat_takes_what_it_takes_in_any_order(times: int) -> None:
    """64 members, hops that repeat every 8; transfers listed in the ring's order and in another one, where nothing repeats."""
    random = np.random.default_rng(times)
    whole, ways = ring(64, times), Hops(drawn(random, 8) / 10, np.tile(np.arange(8), 8))
    mixed = random.permutation(64)
    other = Phase(whole.source[mixed], whole.destination[mixed], whole.channel, whole.chunk, times)
    paths = [
        after([[0.0, 0.0, 0.0]] * 64, *way) for way in ((whole, times, ways), (other, times, Hops(ways.rows, ways.of[mixed])))
    ]
    assert paths[0] == paths[1]
