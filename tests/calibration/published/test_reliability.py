"""Widths of intervals as published rows tell them, and what intervals hold of sources that had no say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from calibration.published.comparison import Compared
from calibration.published.reliability import left_out, widths


def rows(source: str, errors: list[float], spread: float = 0.0, launch: float = 0.0) -> list[Compared]:
    """Of a source; errors: logarithms of published over predicted steps."""
    return [
        Compared(
            f"{source}/{number}", source, "F", "t", "m", step=math.exp(error), predicted_step=1.0, spread=spread, launch=launch
        )
        for number, error in enumerate(errors)
    ]


def drawn(source: str, sigma: float, count: int = 4000, **more: float) -> list[Compared]:
    return rows(source, (sigma * np.random.default_rng(len(source)).standard_normal(count)).tolist(), **more)


def test_the_spreads_that_made_the_errors_are_found() -> None:
    """Errors of 0.1, where prices say 0.06: the rest is 0.08. A source that is bound by hosts has 0.1 and 0.3 of its elasticity
    of a half.
    """
    usual = drawn("usual", 0.1, spread=0.06)
    hosts = drawn("of hosts", math.hypot(0.1, 0.15), spread=0.06, launch=0.5)
    both = widths([*usual, *hosts])
    assert both.launch == pytest.approx(0.3, abs=0.051)
    assert both.composition == pytest.approx(0.08, rel=0.05)


def test_each_source_has_the_same_weight() -> None:
    """Of 10 errors of 0.1 and 1000 of 0.02 half are below 0.06: the wider ones decide alone from 50 % on."""
    few, many = rows("few", [0.1] * 10), rows("many", [0.02] * 1000)
    assert widths([*few, *many]).composition == pytest.approx(0.1 / 1.28155, rel=1e-4)


def test_a_source_is_judged_by_the_others() -> None:
    """Widths by errors of 0.05 hold none of 0.2, which hold all of those."""
    every = [*rows("near", [0.05, -0.05]), *rows("far", [0.2, -0.2])]
    assert left_out(every) == {"near": 1.0, "far": 0.0}
    assert left_out(rows("alone", [0.1])) == {}


def test_rows_without_a_prediction_say_nothing() -> None:
    unknown = Compared("a/1", "a", "F", "t", "m", step=1.0, reason="fp8 arithmetic")
    assert left_out([unknown, *rows("b", [0.1])]) == {}
    with pytest.raises(ValueError, match="no rows"):
        widths([unknown])
