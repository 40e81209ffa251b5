"""Bytes that an update moves and takes, per parameter."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.lowering.optimizer_step import on_the_cpus, passes_of, update_workspace
from strategies.plan.plan import Plan

ADAM = 2 * (4 + 4 + 4)  # master and two moments, read and written


@pytest.mark.parametrize(
    ("plan", "kernels"),
    [
        (
            {},
            [
                ("gradient copy", 2 + 4),
                ("gradient norm", 4),
                ("adam", 4 + ADAM),
                ("parameter copy", 4 + 2),
                ("gradient zeroing", 2),
            ],
        ),
        (
            {"data_parallel": "zero1", "deepspeed": {}},
            [("gradient copy", 2 + 4), ("gradient norm", 4), ("adam", 4 + ADAM), ("parameter copy", 4 + 2)],
        ),
        (
            {"precision": "fp16", "clip_gradients": False},
            [
                ("gradient copy", 2 + 4),
                ("loss unscaling", 4 + 4),
                ("adam", 4 + ADAM),
                ("parameter copy", 4 + 2),
                ("gradient zeroing", 2),
            ],
        ),
        ({"precision": "fp32"}, [("gradient norm", 4), ("adam", 4 + ADAM), ("gradient zeroing", 4)]),
        ({"gradients": "fp32"}, [("gradient norm", 4), ("adam", 4 + ADAM), ("parameter copy", 4 + 2), ("gradient zeroing", 4)]),
        (
            {"precision": "fp32", "optimizer": "sgd", "kernels": "torch", "fused_optimizer": False, "set_to_none": False},
            [("gradient norm", 4), ("gradient clipping", 4 + 4), ("sgd update", 4 + 4 + 4), ("gradient zeroing", 4)],
        ),
        ({"precision": "fp32", "kernels": "compiled", "clip_gradients": False}, [("adam", 4 + ADAM)]),
    ],
)
def test_bytes_of_an_update(plan: dict[str, Any], kernels: list[tuple[str, int]]) -> None:
    assert passes_of(Plan(**plan)) == kernels


@pytest.mark.parametrize(("precision", "moved"), [("bf16", 2 + ADAM + 2), ("fp32", 4 + ADAM)])
def test_the_cpus_read_the_gradient_and_write_the_weight(precision: str, moved: int) -> None:
    assert on_the_cpus(Plan(precision=precision)) == moved


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ({}, 4 * 3e9),  # 16-bit gradients in fp32
        ({"gradients": "fp32"}, 0.0),
        ({"data_parallel": "zero1", "deepspeed": {}}, (2 + 4) * 3e9),
        ({"data_parallel": "zero3", "deepspeed": {}}, (2 + 4) * 1e9),  # of a sub-group
    ],
)
def test_what_an_update_of_3e9_parameters_takes(plan: dict[str, Any], size: float) -> None:
    assert update_workspace(Plan(**plan), 3e9, 1e6) == size


def test_deepspeeds_norm_of_a_large_gradient_takes_more_than_a_small_shard() -> None:
    """fp64: 8 bytes of 90 elements, and 2 + 4 of 100."""
    plan: dict[str, Any] = {"data_parallel": "zero1", "deepspeed": {}}
    assert update_workspace(Plan(**plan), 100, 90) == 8 * 90
    assert update_workspace(Plan(**plan), 100, 1000) == 8 * 100
    assert update_workspace(Plan(**plan, clip_gradients=False), 100, 90) == 6 * 100
