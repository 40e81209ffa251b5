"""Schedules that are the same when members of nodes take each other's places: one turn of them, turned, is all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from sim.collectives import Phase, Place, algorithms, is_turning

TURNING = [name for name in algorithms if is_turning(name)]


def transfers(phase: Phase, place: Place, turn: int) -> Counter[tuple[int, int, int]]:
    """(source, destination, chunks) of a phase, with every member replaced by the `turn`-th next one of its node."""
    each = place.size // len(place.per_node())
    ends = np.arange(place.size + 1 + max(place.switch, default=0))
    members = ends[: place.size]
    ends[: place.size] = members // each * each + (members + turn) % each
    return Counter(zip(ends[phase.source].tolist(), ends[phase.destination].tolist(), phase.amounts.tolist(), strict=True))


@pytest.mark.parametrize("meshed", [False, True])
@pytest.mark.parametrize("nodes", [2, 3, 6, 8])
@pytest.mark.parametrize("name", TURNING)
def test_turns_of_one_turn_are_the_whole(name: str, nodes: int, meshed: bool) -> None:
    """Phase by phase the same transfers; the same chunks, and what each member sends."""
    each = 4
    node = np.repeat(np.arange(nodes), each)
    place = Place(tuple(node.tolist()), tuple(node.tolist()), meshed=meshed)
    whole, one = algorithms[name](place), algorithms[name](replace(place, turned=True))
    assert (whole.chunks, whole.pieces, len(whole.phases)) == (one.chunks, one.pieces, len(one.phases))
    for phase, part in zip(whole.phases, one.phases, strict=True):
        assert (phase.times, phase.reduce) == (part.times, part.reduce)
        assert len(part.source) * each == len(phase.source)
        assert transfers(phase, place, 0) == sum((transfers(part, place, turn) for turn in range(each)), Counter())
    assert one.sent(place.size, each).tolist() == whole.sent(place.size).tolist()


def test_which_schedules_turn() -> None:
    """Rings and trees have a channel for each member of a node."""
    assert {"all_reduce/ring", "all_gather/ring", "reduce_scatter/ring", "all_reduce/tree", "all_reduce/in_switch_tree"} == set(
        TURNING
    )
