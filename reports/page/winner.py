"""Which of all plans that a page shows is the best, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reports.formatting import count, percent
from strategies.planner.ranking import Key


class Entry(NamedTuple):
    """A plan of the page: its name, its place (`strategies.planner.ranking`), tokens/s/GPU, and what makes the job this plan."""

    name: str
    key: Key
    rate: float
    arguments: str = ""

    @property
    def fits(self) -> bool:
        """Whether it fits in memory."""
        return not self.key[0]


def winner(own: Entry, others: Sequence[Entry], unit: str = "tokens") -> str:
    """The best of the job and the others that fit, and what it gains on the job; nothing without others. Plans that are one job
    count once. unit: what is counted of what they train on.
    """
    from strategies.planner.uncertainty import tied

    different = {entry.key[-1]: entry for entry in (*reversed(others), own)}
    fitting = [entry for entry in different.values() if entry.fits]
    if len(different) < 2:
        return ""
    if not fitting:
        return f"None of the {len(different):,} plans on this page fits in memory."
    best = min(fitting, key=lambda entry: entry.key)
    if best is own:
        return f"No other of the {len(different):,} plans on this page is better than {own.name}."
    what = f"The best of the {len(different):,} plans on this page that fits: {best.name}, {count(best.rate)} {unit}/s/GPU"
    gain = f", {percent(best.rate / own.rate - 1)} more than {own.name}" if own.fits else ""
    tie = f", which is a tie: {TIED}" if own.fits and tied(best.rate, own.rate) else ""
    return f"{what}{gain}{tie}. As arguments: {best.arguments}" if best.arguments else f"{what}{gain}{tie}."


TIED = "too near to tell which is faster"
