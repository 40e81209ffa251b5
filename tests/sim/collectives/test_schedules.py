"""Every schedule moves real arrays to the mathematically right result and sends what theory says; or refuses with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.collectives import OFFERED, OPERATIONS, NotApplicable, Place, Schedule, algorithms, offered
from sim.collectives.tree import double_tree
from topologies.reading import UserError

EVEN = [Place(tuple(i // k for i in range(n * k))) for n in (2, 3, 4) for k in (2, 3, 4)]
PLACES = (
    [Place((0,) * n) for n in range(1, 18)]
    + [Place(tuple(range(n))) for n in range(2, 18)]
    + EVEN
    + [Place((0, 0, 0, 1, 1)), Place((0, 1, 0, 1))]
)
PLACES += [Place(place.node, meshed=True) for place in (*EVEN, Place((0, 0, 0, 0, 1, 1, 1)), Place((0, 1, 0, 0, 1, 1, 1)))]
PLACES += [Place(place.node, place.node) for place in PLACES if place.size > 1]  # with a switch that adds in every node


def below_switches(nodes: int, each: int, nics: int, rails: bool, multicast: bool, switched: bool = True) -> Place:
    """Two nodes on a leaf, leaves below one top; with rails a leaf per NIC. Members of a node take its NICs in turn."""
    node = tuple(i // each for i in range(nodes * each))
    nic = tuple(member % each * nics // each + nics * where for member, where in enumerate(node))
    leaf = [where // 2 * nics + port % nics if rails else where // 2 for where, port in zip(node, nic, strict=True)]
    known = sorted(set(leaf))
    above = (len(known),) * len(known) + (-1,)
    switch = node if multicast else ()
    return Place(node, switch, leaf=tuple(map(known.index, leaf)), above=above, nic=nic, switched=switched)


PLACES += [
    below_switches(nodes, each, nics, rails, multicast, switched)
    for nodes in (2, 3, 5)
    for each, nics in ((1, 1), (2, 2), (4, 4), (4, 2))
    for rails, multicast, switched in ((True, True, True), (False, False, True), (True, False, False))
]


def endpoints_of(place: Place) -> int:
    """Members, switches of nodes, switches of the fabric."""
    return place.size + len(set(place.switch)) + len(place.above)


def play(plan: Schedule, buffers: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """Move buffers (endpoints, labels, width) by the schedule, every round from the state before it.

    valid: (endpoints, labels), who may send what: nobody sends what it has not.
    """
    for phase in plan.phases:
        for turn in range(phase.times):
            before, had = buffers.copy(), None if valid is None else valid.copy()
            chunks = phase.chunk(turn).reshape(len(phase.source), -1)
            if valid is None:
                assert ((chunks >= 0).sum(axis=1) == phase.amounts).all()
            for source, destination, row in zip(phase.source, phase.destination, chunks, strict=True):
                row = row[row >= 0]
                assert source != destination
                assert len(set(row.tolist())) == len(row)
                if phase.reduce:
                    buffers[destination, row] += before[source, row]
                else:
                    buffers[destination, row] = before[source, row]
                if had is not None:
                    assert had[source, row].all()
                    valid[destination, row] = True
    return buffers


def filled(place: Place, labels: int, seed: int = 0) -> np.ndarray:
    """Numbers for members, zeros for switches."""
    buffers = np.random.default_rng(seed).integers(-1000, 1000, (endpoints_of(place), labels, 2))
    buffers[place.size :] = 0
    return buffers


def pieces(plan: Schedule, n: int) -> np.ndarray:
    return np.arange(plan.chunks).reshape(n, -1)


def check_all_reduce(plan: Schedule, place: Place) -> None:
    n, given = place.size, filled(place, plan.chunks)
    assert (play(plan, given.copy())[:n] == given.sum(axis=0)).all()


def check_reduce(plan: Schedule, place: Place) -> None:
    given = filled(place, plan.chunks)
    assert (play(plan, given.copy())[0] == given.sum(axis=0)).all()


def check_broadcast(plan: Schedule, place: Place) -> None:
    n, given = place.size, filled(place, plan.chunks)
    assert (play(plan, given.copy())[:n] == given[0]).all()


def check_reduce_scatter(plan: Schedule, place: Place) -> None:
    given, own = filled(place, plan.chunks), pieces(plan, place.size)
    result = play(plan, given.copy())
    for member in range(place.size):
        assert (result[member, own[member]] == given.sum(axis=0)[own[member]]).all()


def held(place: Place, labels: int, who: Callable[[int], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Content of all labels, and buffers in which member i has who(i) only."""
    content = np.random.default_rng(1).integers(1, 1000, (labels, 2))
    start = np.zeros((endpoints_of(place), labels, 2), np.int64)
    for member in range(place.size):
        start[member, who(member)] = content[who(member)]
    return content, start


def check_all_gather(plan: Schedule, place: Place) -> None:
    own = pieces(plan, place.size)
    content, start = held(place, plan.chunks, lambda member: own[member])
    assert (play(plan, start)[: place.size] == content).all()


def check_gather(plan: Schedule, place: Place) -> None:
    own = pieces(plan, place.size)
    content, start = held(place, plan.chunks, lambda member: own[member])
    assert (play(plan, start)[0] == content).all()


def check_scatter(plan: Schedule, place: Place) -> None:
    own = pieces(plan, place.size)
    content, start = held(place, plan.chunks, lambda member: own.ravel() if member == 0 else own[0, :0])
    result = play(plan, start)
    for member in range(place.size):
        assert (result[member, own[member]] == content[own[member]]).all()


def check_all_to_all(plan: Schedule, place: Place) -> None:
    n = place.size
    assert plan.chunks == n
    labels = np.arange(n * n).reshape(n, n)  # from, to
    content, start = held(place, n * n, lambda member: labels[member])
    result = play(plan, start)
    for member in range(n):
        assert (result[member, labels[:, member]] == content[labels[:, member]]).all()


def check_barrier(plan: Schedule, place: Place) -> None:
    """Everybody has heard from everybody, without a byte."""
    knows = np.eye(place.size, dtype=bool)
    for phase in plan.phases:
        before = knows.copy()
        for source, destination in zip(phase.source, phase.destination, strict=True):
            knows[destination] |= before[source]
    assert knows.all()
    assert plan.sent(place.size).max() == 0


def check_send(plan: Schedule, place: Place) -> None:
    given = filled(place, plan.chunks)
    assert (play(plan, given.copy())[1] == given[0]).all()


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
NAMES = [name for name in algorithms if not name.startswith("all_to_allv/")]
REFUSED = {
    "not a power of two": lambda p: p.size & (p.size - 1),
    "several nodes with several members": lambda p: len(p.per_node()) == 1 or {len(node) for node in p.per_node()} == {1},
    "different numbers of members": lambda p: len({len(node) for node in p.per_node()}) > 1,
    "no switch": lambda p: not len(p.switch),
    "switches, not one": lambda p: len(set(p.switch)) > 1,
    "switches above these members": lambda p: not len(p.leaf),
    "members are in one node": lambda p: len(p.per_node()) == 1,
    "share": lambda p: len(set(p.nic)) < p.size,
    "through a switch": lambda p: not p.switched,
    "one member needs no switch": lambda p: p.size == 1,
    "one member per node": lambda p: len(p.per_node()) < p.size,
}


def test_every_operation_has_algorithms() -> None:
    assert {name.split("/")[0] for name in algorithms} == set(OPERATIONS) == {*CHECKS, "all_to_allv"}
    assert {f"{operation}/{name}" for operation in OFFERED for name in offered(operation)} <= set(algorithms)
    assert set(offered("all_to_allv")) == {"direct", "pairwise"}  # an operation that is not in the table has them all


def plan_of(name: str, place: Place) -> Schedule | None:
    """The schedule, or None when it is refused for a reason that holds."""
    try:
        return algorithms[name](place)
    except NotApplicable as error:
        refusal = str(error)
    assert any(reason in refusal and holds(place) for reason, holds in REFUSED.items()), refusal
    return None


@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_right_or_refused_with_a_reason_that_holds(name: str) -> None:
    ran = 0
    for place in PLACES[name.startswith("send") :]:  # nobody sends to itself
        plan = plan_of(name, place)
        if plan is not None:
            CHECKS[name.split("/")[0]](plan, place)
            ran += 1
    assert ran > 3


@given(st.lists(st.integers(0, 3), min_size=2, max_size=17), st.sampled_from([n for n in NAMES if "in_switch" not in n]))
@settings(max_examples=150, deadline=None)
def test_any_place(node: list[int], name: str) -> None:
    """Members on nodes in any order and number."""
    place = Place(tuple(node))
    plan = plan_of(name, place)
    if plan is not None:
        CHECKS[name.split("/")[0]](plan, place)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_all_to_allv_delivers_any_matrix(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 9))
    row = st.lists(st.integers(0, 5), min_size=n, max_size=n)
    counts = tuple(tuple(data.draw(row)) for _ in range(n))
    labels = np.arange(n * n).reshape(n, n)
    off = np.array(counts) * (1 - np.eye(n, dtype=int))
    for name in ("direct", "pairwise"):
        place = Place((0,) * n, counts=counts)
        plan = algorithms[f"all_to_allv/{name}"](place)
        content, start = held(place, n * n, lambda member: labels[member])
        valid = np.zeros((n, n * n), bool)
        for member in range(n):
            valid[member, labels[member]] = True
        result = play(plan, start, valid)
        for i, j in zip(*np.nonzero(off), strict=True):
            assert (result[j, labels[i, j]] == content[labels[i, j]]).all()
        assert plan.sent(n) * plan.chunks == pytest.approx(off.sum(axis=1))


def test_all_to_allv_with_equal_counts_is_all_to_all() -> None:
    for name in ("direct", "pairwise"):
        variable = algorithms[f"all_to_allv/{name}"](Place((0,) * 5, counts=((7,) * 5,) * 5))
        equal = algorithms[f"all_to_all/{name}"](Place((0,) * 5))
        assert variable.sent(5) == pytest.approx(equal.sent(5))


def test_all_to_allv_without_counts_is_refused() -> None:
    with pytest.raises(NotApplicable, match="2 × 2"):
        algorithms["all_to_allv/direct"](Place((0, 0)))


def test_algorithms_are_asked_for_by_operation_or_for_all() -> None:
    assert offered("all_reduce", "tree") == ("tree",)
    assert offered("all_reduce", "all_reduce/tree, all_gather/pat") == ("tree",)
    assert offered("reduce_scatter", "all_reduce/tree, all_gather/pat") == offered("reduce_scatter")
    with pytest.raises(UserError, match="unknown collective algorithm 'all_reduce/three'; did you mean 'all_reduce/tree'"):
        offered("all_gather", "all_reduce/three")


def log(n: int) -> int:
    return math.ceil(math.log2(n))


# Sent by each member, as a fraction of S: design.md section 5; nccl-tests doc/PERFORMANCE.md; Thakur et al. 2005, sections 4 to 8
EACH = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, ("ring", "direct", "halving_doubling")),
    "all_gather": (lambda n: (n - 1) / n, ("ring", "direct", "recursive_doubling", "bruck", "pat")),
    "reduce_scatter": (lambda n: (n - 1) / n, ("ring", "direct", "recursive_halving", "bruck", "pat")),
    "all_to_all": (lambda n: (n - 1) / n, ("direct", "pairwise")),
}
# Sent by all members together, as a fraction of S
ALL = {
    "all_reduce/tree": lambda n: 2 * (n - 1),
    "broadcast/flat": lambda n: n - 1,
    "broadcast/binomial": lambda n: n - 1,
    "broadcast/chain": lambda n: n - 1,
    "reduce/flat": lambda n: n - 1,
    "reduce/binomial": lambda n: n - 1,
    "reduce/chain": lambda n: n - 1,
    "scatter/flat": lambda n: (n - 1) / n,
    "gather/flat": lambda n: (n - 1) / n,
    "barrier/dissemination": lambda n: 0,
    "send/direct": lambda n: 1,
}


@pytest.mark.parametrize("n", range(2, 18))
def test_volumes_are_theory(n: int) -> None:
    for operation, (factor, names) in EACH.items():
        for name in names:
            if name in ("halving_doubling", "recursive_doubling", "recursive_halving") and n & (n - 1):
                continue
            assert algorithms[f"{operation}/{name}"](Place(tuple(range(n)))).sent(n) == pytest.approx(np.full(n, factor(n))), name
    for name, factor in ALL.items():
        assert algorithms[name](Place((0,) * n)).sent(n).sum() == pytest.approx(factor(n)), name


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_volumes_of_powers_of_two(n: int) -> None:
    """Recursive doubling sends S a round, Bruck's all-to-all S/2, a binomial scatter every piece once per level."""
    place = Place((0,) * n)
    assert algorithms["all_reduce/recursive_doubling"](place).sent(n) == pytest.approx(np.full(n, log(n)))
    assert algorithms["all_reduce/rabenseifner"](place).sent(n) == pytest.approx(np.full(n, 2 * (n - 1) / n))
    assert algorithms["all_to_all/bruck"](place).sent(n) == pytest.approx(np.full(n, log(n) / 2))
    assert algorithms["scatter/binomial"](place).sent(n).sum() == pytest.approx(log(n) / 2)
    assert algorithms["scatter/binomial"](place).sent(n)[0] == pytest.approx((n - 1) / n)


@pytest.mark.parametrize("n", range(2, 18))
def test_volumes_in_the_switch(n: int) -> None:
    """A member sends everything up to be added, and the sum of its own piece to be spread."""
    place = Place((0,) * n, (0,) * n)
    assert algorithms["all_reduce/in_switch"](place).sent(n) == pytest.approx(np.full(n, 1 + 1 / n))
    assert algorithms["all_gather/in_switch"](place).sent(n) == pytest.approx(np.full(n, 1 / n))
    assert algorithms["reduce_scatter/in_switch"](place).sent(n) == pytest.approx(np.ones(n))


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_volumes_through_the_switches_of_the_fabric(nodes: int) -> None:
    """A NIC sends its share once and receives the sum once, however many nodes there are: half of what a ring sends across."""
    place = below_switches(nodes, 4, 4, rails=True, multicast=True)
    n, node = place.size, np.array(place.node)

    def across(name: str) -> np.ndarray:
        plan, total = algorithms[name](place), np.zeros(n)
        for phase in plan.phases:
            for source, destination, amount in zip(phase.source, phase.destination, phase.amounts, strict=True):
                if source < n and (destination >= n + nodes or (destination < n and node[source] != node[destination])):
                    total[source] += amount / plan.chunks
        return total

    for name in ("collnet_direct", "collnet_chain", "in_switch_collnet"):
        assert across(f"all_reduce/{name}") == pytest.approx(np.full(n, 1 / 4))
    assert across("all_gather/collnet_direct") == pytest.approx(np.full(n, 1 / n))
    assert across("reduce_scatter/collnet_direct") == pytest.approx(np.full(n, 1 / 4))
    direct = algorithms["all_reduce/collnet_direct"](place).sent(n)
    assert direct == pytest.approx(np.full(n, 3 / 4 + 1 / 4 + 3 / 4))  # to heads, up, to the others


@pytest.mark.parametrize("place", EVEN, ids=lambda p: "".join(map(str, p.node)))
def test_two_levels_send_little_across(place: Place) -> None:
    """Across nodes each member of N × G sends the factor of N members of its share S/G."""
    nodes, each = len(place.per_node()), len(place.per_node()[0])
    node = np.array(place.node)
    for name, factor in (
        ("all_reduce", 2 * (nodes - 1) / nodes / each),
        ("all_gather", (nodes - 1) / nodes / each),
        ("reduce_scatter", (nodes - 1) / nodes / each),
        ("all_to_all", (nodes - 1) / nodes),
    ):
        plan = algorithms[f"{name}/hierarchical"](place)
        far = np.zeros(place.size)
        for phase in plan.phases:
            crossing = node[phase.source] != node[phase.destination]
            far += np.bincount(phase.source, phase.amounts * phase.times * crossing, minlength=place.size) / plan.chunks
        assert far == pytest.approx(np.full(place.size, factor)), name


def rounds(name: str, n: int) -> int:
    return sum(phase.times for phase in algorithms[name](Place(tuple(range(n)))).phases)


@pytest.mark.parametrize("n", range(2, 18))
def test_rounds_are_theory(n: int) -> None:
    for name in (
        "broadcast/binomial",
        "reduce/binomial",
        "scatter/binomial",
        "gather/binomial",
        "all_gather/bruck",
        "all_gather/pat",
        "reduce_scatter/pat",
        "all_to_all/bruck",
        "barrier/dissemination",
    ):
        assert rounds(name, n) == log(n), name
    extra = 0 if n & (n - 1) == 0 else 2
    assert rounds("all_reduce/recursive_doubling", n) == int(math.log2(n)) + extra
    assert rounds("all_to_all/pairwise", n) == n - 1
    assert rounds("all_reduce/ring", n) == 2 * (n - 1)


@pytest.mark.parametrize("n", [*range(2, 70), 1000, 1024])
def test_double_tree(n: int) -> None:
    """Both trees reach everybody in about log₂ n hops, nobody has more than two children, and nobody is inner in both.

    (For odd n one member is inner in both, as in NCCL: n − 1 inner places in all, and a root with one child.)
    """
    both = double_tree(n)
    for parents in both:
        assert (parents < 0).sum() == 1
        assert np.bincount(parents[parents >= 0], minlength=n).max() <= 2
        depth, at = 0, np.arange(n)
        while (at >= 0).any():
            at = np.where(at >= 0, parents[np.maximum(at, 0)], -1)
            depth += 1
        assert depth - 1 <= math.floor(math.log2(n)) + 1
    inner = [set(parents[parents >= 0].tolist()) for parents in both]
    assert len(inner[0] & inner[1]) <= n % 2


def test_trees_of_eight_as_nccl_draws_them() -> None:
    """github.com/NVIDIA/nccl src/graph/trees.cc: odd numbers are leaves of the first tree; the second is its mirror image, and
    for an odd number of nodes the first shifted by one.
    """
    first, second = ([*map(int, parents)] for parents in double_tree(8))
    assert first == [-1, 2, 4, 2, 0, 6, 4, 6]
    assert second == [1, 3, 1, 7, 5, 3, 5, -1]
    first, second = ([*map(int, parents)] for parents in double_tree(5))
    assert first == [-1, 2, 4, 2, 0]
    assert second == [1, -1, 3, 0, 3]


@pytest.mark.parametrize("name", ["direct", "pairwise"])
def test_of_all_to_allv_the_largest_row_is_the_buffer(name: str) -> None:
    """Units of the buffer; where nobody sends anything it is one unit that stays."""
    for counts, units in ((((0, 1), (0, 0)), 1), (((0, 0), (0, 0)), 1), (((5, 3), (1, 1)), 8)):
        assert algorithms[f"all_to_allv/{name}"](Place((0, 0), counts=counts)).chunks == units


@pytest.mark.parametrize("name", ["reduce_scatter/collnet_direct", "all_gather/collnet_direct", "all_reduce/collnet_direct"])
def test_members_that_reach_each_other_through_no_switch_hand_nothing_to_all(name: str) -> None:
    assert algorithms[name](below_switches(2, 4, 4, True, True))
    with pytest.raises(NotApplicable, match="through a switch"):
        algorithms[name](below_switches(2, 4, 4, True, True, switched=False))
