"""Times of a graph of ops: toys whose times can be worked out by hand, and random graphs against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from sim.replay.graph import NARROW, CycleError, Graph, Late


def test_a_chain_adds_up() -> None:
    times = Graph(3, [0, 1], [1, 2]).times([1.0, 2.0, 3.0])
    assert times.start.tolist() == [0, 1, 3]
    assert times.end.tolist() == [1, 3, 6]


def test_an_op_waits_for_the_latest_of_several() -> None:
    #      1 (5 s)
    # 0 <          > 3
    #      2 (1 s)
    times = Graph(4, [0, 0, 1, 2], [1, 2, 3, 3]).times([1.0, 5.0, 1.0, 2.0])
    assert times.start.tolist() == [0, 1, 1, 6]
    assert times.end.tolist() == [1, 6, 2, 8]


def test_ops_that_meet_start_with_the_last_and_end_apart() -> None:
    # rank 0: op 0 (1 s), op 1 (2 s), op 2; rank 1: op 3 (4 s), op 4 (3 s), op 5; ops 1 and 4 meet
    graph = Graph(6, [0, 1, 3, 4], [1, 2, 4, 5], [-1, 7, -1, -1, 7, -1])
    times = graph.times([1.0, 2.0, 1.0, 4.0, 3.0, 1.0])
    assert times.start.tolist() == [0, 4, 6, 0, 4, 7]
    assert times.end.tolist() == [1, 6, 7, 4, 7, 8]


def test_delays_come_after_what_is_waited_for() -> None:
    graph = Graph(4, [0, 1], [1, 2], [-1, 0, -1, 0])
    times = graph.times([1.0, 1.0, 1.0, 1.0], [0.5, 0.25, 0.0, 3.0])
    assert times.start.tolist() == [0.5, 3, 4, 3]  # op 3 is late, and op 1 meets it
    assert graph.ready(times.end).tolist() == [0, 1.5, 4, 0]


def test_trailing_axes_are_samples() -> None:
    graph = Graph(3, [0, 1], [2, 2])
    durations = np.array([[[1, 2], [3, 4]], [[2, 2], [2, 2]], [[1, 1], [1, 1]]], float)
    assert graph.times(durations).end[2].tolist() == [[3, 3], [4, 5]]
    assert graph.times(durations, [1.0, 0.0, 0.0]).end[2].tolist() == [[3, 4], [5, 6]]
    assert graph.ready(durations)[2].tolist() == [[2, 2], [3, 4]]


def test_nothing_takes_no_time() -> None:
    assert Graph(0, [], []).times([]).end.shape == (0,)


def test_ops_that_wait_in_a_circle_never_start() -> None:
    with pytest.raises(CycleError, match="op 1 never starts"):
        Graph(3, [0, 2, 1], [1, 1, 2])
    with pytest.raises(CycleError):  # two ranks come to two collectives the other way round
        Graph(4, [0, 2], [1, 3], [0, 1, 1, 0])
    with pytest.raises(CycleError):  # an op cannot meet one that it waits for
        Graph(2, [0], [1], [0, 0])


@pytest.mark.parametrize("width", [2, 2 * NARROW])
def test_random_graphs_are_as_a_plain_loop_has_them(width: int) -> None:
    random = np.random.default_rng(width)
    layers = 8
    count = layers * width
    rows = [(before, after) for after in range(width, count) for before in random.integers(after // width * width, size=3)]
    meeting = np.full(count, -1)
    for layer in range(0, layers, 2):
        meeting[layer * width : (layer + 1) * width] = layer * width + random.integers(width // 2, size=width)
    durations, delays = random.random((count, 2)), random.random(count)
    start, end = np.zeros((count, 2)), np.zeros((count, 2))
    for layer in range(layers):  # ops wait for earlier layers only, and meet within theirs
        ops = range(layer * width, (layer + 1) * width)
        for op in ops:
            start[op] = np.max([end[before] for before, after in rows if after == op] or [[0, 0]], axis=0) + delays[op]
        own = start.copy()
        for op in ops:
            start[op] = np.max([own[other] for other in ops if other == op or meeting[other] == meeting[op] >= 0], axis=0)
            end[op] = start[op] + durations[op]
    before, after = zip(*rows, strict=True)
    order = random.permutation(count)  # the numbers of ops mean nothing
    place = np.argsort(order)
    times = Graph(count, place[list(before)], place[list(after)], meeting[order]).times(durations[order], delays[order])
    assert (times.start[place] == start).all()
    assert (times.end[place] == end).all()


def test_ops_start_and_end_no_sooner_than_is_said() -> None:
    # op 1 starts at 3 at the soonest, and op 3, which waits for it, ends at 9 at the soonest; ops 1 and 4 meet
    graph = Graph(5, [0, 1, 1], [1, 2, 3], [-1, 0, -1, -1, 0])
    soonest = [0.0, 3.0, 0.0, 0.0, 4.0], [0.0, 0.0, 0.0, 9.0, 0.0]
    times = graph.times([1.0, 1.0, 1.0, 1.0, 2.0], soonest=soonest)
    assert times.start.tolist() == [0, 4, 5, 5, 4]
    assert times.end.tolist() == [1, 5, 6, 9, 6]
    late = Late(np.array([1, 3, 4]), np.array([3.0, 0.0, 4.0]), np.array([[0.0], [9.0], [0.0]]))
    table = np.array([[1.0], [2.0]])
    assert graph.ends(np.arange(5), table, np.array([0, 0, 0, 0, 1]), late).ravel().tolist() == [1, 5, 6, 9, 6]
