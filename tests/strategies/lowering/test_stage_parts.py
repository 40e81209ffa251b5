"""Sizes of a stage's parts, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strategies.lowering.stage_parts import StageParts


def stage(**plan: Any) -> StageParts:
    """A part of 100 parameters, 60 of them in fp8, and one of 50, 10 of them, with 20 of experts, all of these, in fp8; a second
    copy of 10 tied ones belongs to the last.
    """
    sizes = ((100, 0, 60, 0), (50, 20, 10, 20))
    names = ("parameters", "experts", "fp8_parameters", "fp8_expert_parameters")
    every: Any = [SimpleNamespace(**dict(zip(names, each, strict=True))) for each in sizes]
    result = StageParts(0, 0, 0, every, SimpleNamespace(bytes_per_element=2, **plan), None)  # type: ignore[arg-type]
    result.tied = 10
    return result


@pytest.mark.parametrize(
    ("first", "last", "experts", "width"),
    [(0, 1, False, 2 - 60 / 100), (1, 2, False, 2 - 10 / 40), (0, 2, False, 2 - 70 / 140), (0, 2, True, 1), (0, 1, True, 2)],
)
def test_bytes_of_a_gathered_parameter_by_how_many_are_in_fp8(first: int, last: int, experts: bool, width: float) -> None:
    assert stage(least_gathered=1).gathered_width(first, last, experts) == pytest.approx(width)
    assert stage(least_gathered=2).gathered_width(first, last, experts) == 2
