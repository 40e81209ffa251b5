"""Fair sharing on textbook cases, and against a linear programme."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment

from sim.engine.network import FlowPart, Network, fair_rates


def test_textbook_example() -> None:
    """Bertsekas and Gallager, Data Networks, figure 6.11: a long session shares each link with short ones."""
    rates = fair_rates([1.0, 1.0, 1.0], {"long": ((0, 1), (1, 1), (2, 1)), "a": ((0, 1),), "b": ((1, 1),), "c": ((1, 1),)})
    assert rates == pytest.approx({"long": 1 / 3, "a": 2 / 3, "b": 1 / 3, "c": 1 / 3})


def test_multiplicity_counts() -> None:
    assert fair_rates([6.0], {"one": ((0, 1),), "two": ((0, 2),)}) == pytest.approx({"one": 2.0, "two": 2.0})


flows = st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=6)


@given(flows, st.lists(st.integers(1, 20), min_size=5, max_size=5))
@settings(max_examples=60, deadline=None)
def test_fair_rates_are_max_min(routes: list[set[int]], capacity: list[int]) -> None:
    """The least rate is the largest that a linear programme finds; and every flow has a full link on which nobody is faster."""
    from scipy.optimize import linprog

    demands = {number: tuple((link, 1.0) for link in sorted(route)) for number, route in enumerate(routes)}
    rates = fair_rates([float(c) for c in capacity], demands)
    n = len(routes)
    use = np.array([[link in route for route in routes] for link in range(5)], float)
    assert (use @ [rates[i] for i in range(n)] <= np.array(capacity) * (1 + 1e-12)).all()
    best = linprog(
        [0.0] * n + [-1.0],
        A_ub=np.block([[use, np.zeros((5, 1))], [-np.eye(n), np.ones((n, 1))]]),
        b_ub=[*capacity, *[0.0] * n],
        bounds=[(0, None)] * (n + 1),
    )
    assert min(rates.values()) == pytest.approx(-best.fun)
    for number, route in enumerate(routes):
        full = [link for link in route if use[link] @ [rates[i] for i in range(n)] >= capacity[link] * (1 - 1e-9)]
        assert any(rates[number] >= max(rates[i] for i in range(n) if link in routes[i]) * (1 - 1e-9) for link in full)


def played(*starts: tuple[float, float, tuple[tuple[int, float], ...], float], capacity: list[float]) -> list[float]:
    """End of each transfer (start, bytes, links, latency)."""
    env = Environment()
    network = Network(env, capacity)
    ends = [0.0] * len(starts)

    def begin(number: int, size: float, links: tuple[tuple[int, float], ...], latency: float) -> None:
        network.start((FlowPart(size, links),), latency, lambda: ends.__setitem__(number, env.now))

    for number, (start, *rest) in enumerate(starts):
        env.timeout(start).callbacks.append(lambda _, number=number, rest=rest: begin(number, *rest))
    env.run()
    return ends


def test_rates_change_when_flows_come_and_go() -> None:
    """Link of 1: A (10) alone until 4, then half each: B (3) ends at 10, A has 3 left and ends at 13."""
    assert played((0, 10, ((0, 1),), 0), (4, 3, ((0, 1),), 0), capacity=[1.0]) == pytest.approx([13.0, 10.0])


def test_latency_comes_after_the_bytes_and_leaves_the_link_free() -> None:
    assert played((0, 4, ((0, 1),), 10.0), (5, 2, ((0, 1),), 0), capacity=[1.0]) == pytest.approx([14.0, 7.0])


def test_a_flow_that_a_newcomer_does_not_slow_tells_it_when_the_link_is_free() -> None:
    """A (8 over links of 1 and 2 bytes/s) keeps its rate of 1 when B comes to the wider link; B has 1 too, and 2 after A."""
    ends = played((0, 8, ((0, 1), (1, 1)), 10.0), (2, 10, ((1, 1),), 0), capacity=[1.0, 2.0])
    assert ends == pytest.approx([18.0, 10.0])


def test_untouched_flows_are_one_event_each() -> None:
    env = Environment()
    network = Network(env, [1.0, 1.0])
    for link in (0, 1):
        network.start((FlowPart(5.0, ((link, 1),)),), 1.0, lambda: None)
    env.run()
    assert len(network.scheduled) == 2


def test_parts_follow_each_other() -> None:
    env = Environment()
    network = Network(env, [1.0, 2.0])
    ends: list[float] = []
    network.start((FlowPart(4.0, ((0, 1),)), FlowPart(4.0, ((1, 2),))), 0.5, lambda: ends.append(env.now))
    env.run()
    assert ends == [pytest.approx(4 + 4 + 0.5)]


def test_flows_over_no_link_are_done_at_once_and_others_share() -> None:
    """Two flows on a link of 6 bytes/s, one of which counts twice there: 2 each, and the link is full (2 + 2 · 2)."""
    rates = fair_rates([6.0, 9.0], {"one": ((0, 1),), "two": ((0, 2), (1, 1)), "none": (), "other": ((1, 1),)})
    assert rates == {"one": 2.0, "two": 2.0, "none": float("inf"), "other": 7.0}


def test_a_flow_whose_last_byte_leaves_now_is_not_on_its_links_any_more() -> None:
    """1 GB at 1 GB/s, and a second of latency: the link is busy until 1 s, and not after that."""
    env = Environment()
    network = Network(env, [1e9])
    network.start((FlowPart(1e9, ((0, 1.0),)),), 1.0, lambda: None)
    looked: list[tuple[float, list[int]]] = []
    for moment in (0.5, 1.0, 1.5):
        env.timeout(moment).callbacks.append(lambda _: looked.append((env.now, network.busy([0]))))
    env.run()
    assert looked == [(0.5, [0]), (1.0, []), (1.5, [])]
