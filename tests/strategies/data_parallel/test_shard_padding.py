"""What fills up parameters that ranks do not divide."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.data_parallel.shard_padding import padded
from strategies.plan.plan import Plan

FSDP = {"data_parallel": "zero3", "kernels": "torch"}


@pytest.mark.parametrize(
    ("plan", "elements"),
    [
        (FSDP, 8 * 3 + 4),  # FSDP2: rows of each
        (FSDP | {"flat_parameters": True}, 20),  # FSDP1: the 19 of all
        ({"data_parallel": "zero3", "deepspeed": {}}, 20 + 4),  # elements of each
        ({"data_parallel": "zero1", "deepspeed": {}}, 19),
        ({"data_parallel": "zero3"}, 19),  # Megatron-LM
    ],
)
def test_a_matrix_of_six_rows_of_three_and_a_number_over_four_ranks(plan: dict[str, Any], elements: int) -> None:
    assert padded(Plan(**plan), [(6, 3), (1,)], 4) == elements
    assert padded(Plan(**plan), [(8, 3), (4,)], 4) == 28  # which they divide
