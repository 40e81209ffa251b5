"""Who is who, as in PyTorch's tutorial on distributed data parallel training: 2 nodes of 4 GPUs."""

from __future__ import annotations

import pytest

from topologies.ranks import rank_table
from topologies.reading import UserError


def test_one_gpu_per_process() -> None:
    assert rank_table(2, 4) == [
        (0, 0, 0, (0,)),
        (1, 0, 1, (1,)),
        (2, 0, 2, (2,)),
        (3, 0, 3, (3,)),
        (4, 1, 0, (0,)),
        (5, 1, 1, (1,)),
        (6, 1, 2, (2,)),
        (7, 1, 3, (3,)),
    ]


def test_two_gpus_per_process() -> None:
    assert rank_table(2, 4, gpus_per_process=2) == [
        (0, 0, 0, (0, 1)),
        (1, 0, 1, (2, 3)),
        (2, 1, 0, (0, 1)),
        (3, 1, 1, (2, 3)),
    ]


def test_one_process_per_node() -> None:
    assert rank_table(2, 4, gpus_per_process=4) == [(0, 0, 0, (0, 1, 2, 3)), (1, 1, 0, (0, 1, 2, 3))]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((2, 4, 3), "gpus_per_process=3 does not divide gpus_per_node=4"),
        ((2, 4, 8), "gpus_per_process=8 does not divide gpus_per_node=4"),
        ((0, 4, 1), "nodes=0: must be at least 1"),
        ((2, 4, 0), "gpus_per_process=0: must be at least 1"),
    ],
)
def test_impossible_tables(arguments: tuple[int, int, int], line: str) -> None:
    with pytest.raises(UserError) as error:
        rank_table(*arguments)
    assert str(error.value) == line
