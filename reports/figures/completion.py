"""When runs are over, or how far they got: the part of all runs by days or by tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reports.figures import BLUE, DARK, SKY, canvas, figure
from reports.formatting import counted
from sim.runs.replications import HIGH, LOW
from strategies.resilience.runs import RunAnswer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS = ((1e12, "trillion "), (1e9, "billion "), (1e6, "million "), (1.0, ""))
TOP = 125.0  # of the axis: room for the legend


@figure("completion")
def completion(answer: RunAnswer) -> Figure:
    """answer: of a job over days."""
    drawn, axes = canvas(6.6, 4.2)
    distribution(axes, answer)
    return drawn


def distribution(axes: Axes, answer: RunAnswer) -> None:
    """How many of the runs are over after so many days; where all have the same days, how many had got so many tokens."""
    values, label, title = _values(answer)
    ordered = np.sort(values)
    parts = 100 * np.arange(1, len(ordered) + 1) / len(ordered)
    low, middle, high = np.quantile(ordered, [LOW, 0.5, HIGH]).tolist()
    axes.axvspan(low, high, ymax=100 / TOP, color=SKY, alpha=0.25, linewidth=0, label=f"80 % of runs: {low:.4g} to {high:.4g}")
    axes.axvline(middle, ymax=100 / TOP, color=DARK, linestyle="--", linewidth=0.9, label=f"median: {middle:.4g}")
    axes.step([ordered[0], *ordered], [0.0, *parts], where="post", color=BLUE)
    axes.plot(ordered, np.zeros(len(ordered)), "|", color=BLUE, markersize=9, clip_on=False)
    room = 0.05 * (ordered[-1] - ordered[0]) or 0.02 * abs(ordered[-1]) or 1.0
    axes.set_xlim(ordered[0] - room, ordered[-1] + room)
    axes.set_ylim(0, TOP)
    axes.set_yticks(range(0, 101, 25))
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set(xlabel=label, ylabel="runs (%)")
    axes.set_title(f"{title}, {len(ordered):,} run{'s' * (len(ordered) != 1)}")
    axes.legend(fontsize=8, loc="upper left", ncols=2)


def _values(answer: RunAnswer) -> tuple[list[float], str, str]:
    days = [outcome.seconds / 86400 for outcome in answer.outcomes]
    if max(days) > min(days) or answer.finished:
        return days, "days", "Days until all is trained"
    tokens, unit = [outcome.steps * answer.tokens_per_step for outcome in answer.outcomes], counted(answer.sequence)
    size, number = next((each for each in UNITS if max(tokens) >= each[0]), UNITS[-1])
    return [value / size for value in tokens], f"{number}{unit}", f"{unit.capitalize()} after {days[0]:.4g} days"
