"""What a search found, and what it tells while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from strategies.planner.ranking import Key, rank_row
from strategies.planner.search.objective import Objective
from strategies.planner.search.results import Row


@dataclass
class Answer:
    """What a search found. rows: simulated plans that keep to everything, the best first, each with its "value" of the objective.

    proven: how many of the first rows nothing in the space can beat; bound: no plan that was not simulated is better than this.
    """

    objective: Objective
    rows: list[Row]
    proven: int
    bound: float
    combinations: int
    counts: dict[str, int]  # of plans: allowed, simulated, …
    refused: Counter[str]  # combinations that break a rule, by rule
    pruned: Counter[str]  # plans that a constraint rules out, by constraint
    nearest: dict[str, str]  # of each constraint that ruled out plans: what would keep to it
    seconds: dict[str, float]  # of bounds, and in all
    interrupted: str = ""
    front: bool = False  # whether the Pareto front is proven, too
    examples: dict[str, str] = field(default_factory=dict)  # of rules that are broken
    ended: KeyboardInterrupt | None = None  # by Ctrl-C or a signal

    @property
    def best(self) -> Row | None:
        """The winner."""
        return self.rows[0] if self.rows else None

    @property
    def gap(self) -> float:
        """By what fraction something that was not simulated could at most be better than the best."""
        return max(0.0, 1 - self.bound / self.rows[0]["value"]) if self.rows else 1.0


@dataclass
class Progress:
    """What a search tells while it runs."""

    stage: str
    simulated: int = 0
    open: int = 0  # plans that may still be better than the best
    best: float | None = None
    gap: float = 1.0  # by what fraction a plan that is open could at most be better
    display: Callable[[float], tuple[float, str]] = lambda value: (value, "")  # a value and its unit, for people
    pruned: int = 0


def order(row: Row) -> Key:
    """By which rows are sorted, the best first."""
    return rank_row(row, row["value"])


def pareto(rows: Iterable[Row]) -> list[Row]:
    """Rows that no other beats in time per token, cost per token and memory at once; the fastest first."""
    ordered = sorted(rows, key=lambda row: (row["pace"], row["spend"], row["memory"], row["hash"]))
    front: list[Row] = []
    for row in ordered:
        if not any(all(other[k] <= row[k] for k in ("pace", "spend", "memory")) for other in front):
            front.append(row)
    return front
