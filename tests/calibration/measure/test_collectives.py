"""What a measurement of collectives refuses, and the groups that it measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from calibration.launch.place import Place
from topologies.reading import UserError


def test_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from calibration.measure import collectives
    from calibration.measure.bench import Bench
    from calibration.measure.grid import grid

    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        bench = Bench(Place(0, 1, 0, "cpu", (), lambda _: None), 0.01)
        alone = collectives.Group((0,), 1, None, 0)
        true = collectives.prepared
        probe = collectives.probes(grid("cpu", True), [alone], 2**14)[0]
        assert probe.run(bench).value > 0
        monkeypatch.setattr(collectives, "prepared", lambda *a: (*true(*a)[:2], [2.0]))
        with pytest.raises(UserError, match="all_reduce of 1024 bytes among 1 ranks: the result is wrong"):
            probe.run(bench)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "groups"),
    [
        ([0.0], []),
        ([0.0, 0.0], [[(0, 1)]]),
        ([0.0] * 4, [[(0, 1), (2, 3)], [(0, 1, 2, 3)]]),
        ([0.0, 2.0], [[(0, 1)]]),
        ([0, 0, 2, 2], [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)]]),
        ([0, 0, 2], [[(0, 1, 2)]]),
        ([0, 1, 2, 3], [[(0, 1), (2, 3)], [(0, 1, 2, 3)]]),  # sends between nodes are of pairs
        (
            [0, 0, 2, 2, 4, 4, 6, 6],
            [
                [(0, 1), (2, 3), (4, 5), (6, 7)],
                [(0, 2), (1, 3), (4, 6), (5, 7)],
                [(0, 2, 4, 6), (1, 3, 5, 7)],
                [tuple(range(8))],
            ],
        ),
    ],
)
def test_groups_inside_nodes_across_and_all(hosts: Sequence[float], groups: list[list[tuple[int, ...]]]) -> None:
    pytest.importorskip("torch")
    from calibration.measure.collectives import layouts

    assert layouts(hosts) == groups
    for siblings in groups:  # NCCL makes them by splitting the communicator of all, in which each rank must take part
        assert sorted(rank for ranks in siblings for rank in ranks) == list(range(len(hosts)))


@pytest.mark.parametrize(
    ("size", "nodes", "sends"),
    [(2, 1, (2, 1)), (2, 2, (2, 2)), (3, 1, (2, 1)), (3, 3, (2, 2)), (4, 4, None), (6, 3, None), (9, 3, None)],
)
def test_sends_are_of_pairs_also_among_an_odd_number(size: int, nodes: int, sends: tuple[int, int] | None) -> None:
    """What has pairs in another layout is left to that: of 4 ranks, and of 3 nodes with 2 or 3 ranks."""
    pytest.importorskip("torch")
    from calibration.measure import collectives
    from calibration.measure.grid import grid

    cases = [
        probe.case
        for probe in collectives.probes(grid("cpu", True), [collectives.Group(tuple(range(size)), nodes, None, 0)], 2**14)
    ]
    found = {(case["ranks"], case["nodes"]) for case in cases if case["operation"] == "send"}
    assert found == ({sends} if sends else set())


def test_whoever_does_not_send_or_receive_looks_on() -> None:
    pytest.importorskip("torch")
    from calibration.measure import collectives
    from calibration.measure.bench import Bench

    bench = Bench(Place(2, 3, 2, "cpu", (), lambda _: None), 0.01)
    action, result, expected = collectives.prepared("send", 24, collectives.Group((0, 1, 2), 3, None, 2), bench)
    assert (action(), result(), expected) == (None, [], [])


def test_a_rank_of_1024_makes_its_own_groups_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2, 4 and 8 ranks in a node, of two nodes and of all, one of each; all ranks in the same order, as NCCL splits demand."""
    torch = pytest.importorskip("torch")
    from calibration.measure import collectives
    from calibration.measure.bench import Bench

    asked: dict[int, list[tuple[int, ...]]] = {}
    for rank in (0, 700, 1023):
        bench = Bench(Place(rank, 1, rank % 8, "cpu", (), lambda _: None), 0.01)
        bench.host = torch.arange(1024).div(8, rounding_mode="floor").double().numpy() * 8
        made = asked.setdefault(rank, [])
        monkeypatch.setattr(collectives, "new_group", lambda ranks, alone, made=made: made.append(tuple(ranks)) or alone)
        assert all(group.handle for group in collectives.groups(bench))
        assert all(rank in ranks for ranks in made)
    assert [[len(ranks) for ranks in made] for made in asked.values()] == [[2, 4, 8, 2, 128, 1024]] * 3
