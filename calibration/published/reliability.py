"""How wide intervals have to be to hold what they say, as published rows tell, and whether they do so of a source left out.

A step's σ has three parts: what its prices' own spreads tell, the host's launches by one σ of their price (LAUNCH in
`strategies.planner.uncertainty`), and what a simulation leaves out (COMPOSITION). Kernels and collectives that were kept out of
fits say the first; nothing but steps says the others. They are chosen so that 80 % intervals hold 80 % of the rows, each source
with the same weight, however many rows it has; of the pairs that do so the likeliest, by Student's t with 4 degrees of freedom,
as a few rows are far off. Only the width is chosen: no prediction moves.

A source is judged by the widths that all other sources give, so that no row has a say in its own interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.published.comparison import Compared
from strategies.planner.uncertainty import LEVEL, NORMAL

Floats = NDArray[np.float64]
LAUNCHES = np.arange(0.0, 1.01, 0.05)  # σ of launches' price that are tried
WIDEST, STEPS = 1.0, 40  # of COMPOSITION: the largest, and how often it is halved
FREEDOM = 4.0  # degrees of freedom


class Widths(NamedTuple):
    """σ of the price of launches, and of what a simulation leaves out."""

    launch: float
    composition: float


class _Rows:
    """Published rows as arrays. error: logarithm of the published over the predicted step."""

    def __init__(self, rows: Sequence[Compared]) -> None:
        known = [row for row in rows if row.error is not None and row.spread is not None]
        self.source = np.array([row.source for row in known])
        self.error = -np.log1p([row.error or 0.0 for row in known])
        self.spread = np.array([row.spread or 0.0 for row in known])
        self.launch = np.array([row.launch or 0.0 for row in known])  # elasticity of the step to the price of launches

    def sigma(self, widths: Widths) -> Floats:
        """Of each row."""
        return np.sqrt(self.spread**2 + (self.launch * widths.launch) ** 2 + widths.composition**2)

    def held(self, widths: Widths) -> Floats:
        """1 for each row that lies in its interval, 0 for the others."""
        return (np.abs(self.error) <= NORMAL * self.sigma(widths)).astype(float)


def widths(rows: Sequence[Compared]) -> Widths:
    """Those of all rows. Raises ValueError without any."""
    known = _Rows(rows)
    return _chosen(known, np.ones(len(known.error), bool))


def left_out(rows: Sequence[Compared]) -> dict[str, float]:
    """By source, the share of its rows that intervals hold whose widths all other sources choose; nothing of a single one."""
    known = _Rows(rows)
    names = list(dict.fromkeys(known.source.tolist()))
    if len(names) < 2:
        return {}
    own = {name: known.source == name for name in names}
    return {name: float(known.held(_chosen(known, ~mine))[mine].mean()) for name, mine in own.items()}


def _chosen(rows: _Rows, among: NDArray[np.bool_]) -> Widths:
    """The likeliest widths with which intervals hold LEVEL of the rows `among` all."""
    if not among.any():
        raise ValueError("no rows")
    names, number, count = np.unique(rows.source[among], return_inverse=True, return_counts=True)
    weight = 1 / (count[number] * len(names))
    tried = [Widths(float(launch), _composition(rows, among, weight, float(launch))) for launch in LAUNCHES]
    return min(tried, key=lambda each: _unlikely(rows, among, weight, each))


def _composition(rows: _Rows, among: NDArray[np.bool_], weight: Floats, launch: float) -> float:
    """COMPOSITION with which intervals hold LEVEL, given σ of launches."""
    low, high = 0.0, WIDEST
    for _ in range(STEPS):
        middle = (low + high) / 2
        enough = weight @ rows.held(Widths(launch, middle))[among] >= LEVEL
        low, high = (low, middle) if enough else (middle, high)
    return high


def _unlikely(rows: _Rows, among: NDArray[np.bool_], weight: Floats, each: Widths) -> float:
    """Negative logarithm of the likelihood, but for a constant."""
    sigma = np.maximum(rows.sigma(each)[among], 1e-9)
    far = (rows.error[among] / sigma) ** 2 / FREEDOM
    return float(weight @ (np.log(sigma) + (FREEDOM + 1) / 2 * np.log1p(far)))
