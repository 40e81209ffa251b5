"""Members, transfers and links that behave alike, against partitions worked out by hand and by plain refinement of tuples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from random import Random

import numpy as np

from sim.pricing.transfers.symmetry import Classes, classes

Transfer = tuple[int, int, int, tuple[int, ...]]  # colour, source, destination, links


def numbered(names: Iterable[Hashable]) -> list[int]:
    """Equal names have equal numbers, in the order in which they first appear."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def refined(transfers: list[Transfer], links: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Classes of transfers, members and links."""
    hops = max(len(route) for *_, route in transfers)
    colour, source, destination, routes = zip(*transfers, strict=True)
    numbers = classes(
        np.array(colour, np.uint64),
        np.array(source),
        np.array(destination),
        np.array([(*route, *[-1] * (hops - len(route))) for route in routes]).reshape(len(transfers), hops),
        np.array(links, np.uint64),
    )
    assert isinstance(numbers, Classes)
    transfer, member, link = (numbered(part.tolist()) for part in numbers)
    return transfer, member, link


def by_tuples(transfers: list[Transfer], links: list[int]) -> tuple[list[int], list[int], list[int]]:
    """The coarsest equitable partition, with multisets in place of hashes."""
    members = [0] * (max(max(source, destination) for _, source, destination, _ in transfers) + 1)
    links, number = numbered(links), 0
    while True:
        transfer = numbered(
            (colour, members[source], members[destination], frozenset(Counter(links[link] for link in route).items()))
            for colour, source, destination, route in transfers
        )

        def of(position: int, who: int, kinds: list[int] = transfer) -> frozenset[tuple[int, int]]:
            mine = (kind for kind, row in zip(kinds, transfers, strict=True) if row[position] == who)
            return frozenset(Counter(mine).items())

        members = numbered((kind, of(1, who), of(2, who)) for who, kind in enumerate(members))
        crossing = [
            Counter(kind for kind, (*_, route) in zip(transfer, transfers, strict=True) for at in route if at == link)
            for link in range(len(links))
        ]
        links = numbered((kind, frozenset(crossing[link].items())) for link, kind in enumerate(links))
        if number == (number := len({*transfer}) + len({*members}) + len({*links})):
            return transfer, members, links


def ring(size: int, *odd: int) -> tuple[list[Transfer], list[int]]:
    """Member i sends to the next over link i; links `odd` have another colour."""
    return [(1, at, (at + 1) % size, (at,)) for at in range(size)], [7 + (at in odd) for at in range(size)]


def test_in_a_ring_all_are_alike() -> None:
    assert refined(*ring(5)) == ([0] * 5, [0] * 5, [0] * 5)


def test_one_odd_link_tells_all_of_a_ring_apart_and_two_opposite_ones_its_halves() -> None:
    """Each member is at a distance of its own before the odd link."""
    assert refined(*ring(6, 2)) == (list(range(6)),) * 3
    assert refined(*ring(6, 2, 5)) == ([0, 1, 2, 0, 1, 2],) * 3


def test_a_chain_has_a_class_for_each_place() -> None:
    """0 → 1 → … → 7 over equal links: refinement goes on until it has gone from both ends to the middle."""
    assert refined([(1, at, at + 1, (at,)) for at in range(7)], [7] * 7) == (list(range(7)), list(range(8)), list(range(7)))


def test_who_sends_is_another_than_who_receives() -> None:
    senders = [(1, at, 3, (at,)) for at in range(3)]
    assert refined(senders, [7] * 3) == ([0] * 3, [0, 0, 0, 1], [0] * 3)
    assert refined([(1, 0, 1, (0,))], [7]) == ([0], [0, 1], [0])


def test_a_link_that_carries_two_is_another_than_one_that_carries_one() -> None:
    """0 → 1 and 2 → 3 share link 0, 4 → 5 has link 1 for itself; link 2 carries nothing."""
    pairs = [(1, 0, 1, (0,)), (1, 2, 3, (0,)), (1, 4, 5, (1,))]
    assert refined(pairs, [7, 7, 7]) == ([0, 0, 1], [0, 1, 0, 1, 2, 3], [0, 1, 2])


def test_colours_of_transfers_tell_their_ends_apart() -> None:
    """Two pairs exchange: equal sizes there and back make all four alike, another size back two classes."""
    there, back = [(1, 0, 1, (0,)), (1, 2, 3, (1,))], [(1, 1, 0, (2,)), (1, 3, 2, (3,))]
    assert refined(there + back, [7] * 4) == ([0] * 4, [0] * 4, [0] * 4)
    smaller = [(2, *row[1:]) for row in back]
    assert refined(there + smaller, [7] * 4) == ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1])


def test_refinement_goes_on_when_the_first_pass_has_split_little() -> None:
    """0 exchanges with 1 and with 2 over one link: members split at once, only then what 0 sends from what it receives."""
    exchanged = [(1, 0, 1, (0,)), (1, 1, 0, (0,)), (1, 0, 2, (0,)), (1, 2, 0, (0,))]
    assert refined(exchanged, [7]) == ([0, 1, 0, 1], [0, 1, 1], [0])


def test_two_triangles_and_a_hexagon_are_alike() -> None:
    """All have one neighbour on either side: the coarsest classes that respect that, as colour refinement is known to find."""
    hexagon, _ = ring(6)
    triangles = [(1, 6 + at, 6 + (at + 1) % 3, (6 + at,)) for at in range(3)]
    triangles += [(1, 9 + at, 9 + (at + 1) % 3, (9 + at,)) for at in range(3)]
    assert refined(hexagon + triangles, [7] * 12) == ([0] * 12, [0] * 12, [0] * 12)


def test_random_transfers_against_tuples() -> None:
    """Routes of unequal length, links that are crossed twice, two sizes, two capacities."""
    random, several = Random(5), 0
    for _ in range(150):
        members, links = random.randint(2, 7), random.randint(1, 5)
        transfers = [
            (
                random.choice([1, 1, 2]),
                *random.sample(range(members), 2),
                tuple(random.choices(range(links), k=random.randint(1, 3))),
            )
            for _ in range(random.randint(1, 9))
        ]
        met = numbered([end for row in transfers for end in row[1:3]])  # members 0, 1, …, all of which are met
        rows = [(colour, met[2 * at], met[2 * at + 1], route) for at, (colour, _, _, route) in enumerate(transfers)]
        kinds = [random.choice([7, 7, 7, 8]) for _ in range(links)]
        numbers = refined(rows, kinds)
        assert numbers == by_tuples(rows, kinds)
        several += 1 < len({*numbers[0]}) < len(rows)
    assert several > 20  # neither all alike nor all apart
