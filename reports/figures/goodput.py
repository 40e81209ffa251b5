"""Goodput of runs over an input: scale, interval, spares, bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.figures import BLUE, SKY, canvas, figure
from strategies.resilience.compare_runs import RunCase

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@figure("goodput")
def goodput(data: tuple[str, Sequence[RunCase]]) -> Figure:
    """data: name of the input, and a case for each of its values: mean, 80 % of the runs, the best one marked."""
    name, cases = data
    drawn, axes = canvas(6.8, 3.8)
    played = [case for case in cases if case.answer is not None]
    labels = [str(case.changes[name]) for case in played]
    every = [case.answer.goodput for case in played if case.answer is not None]
    places = range(len(every))
    mean = [100 * each.mean for each in every]
    axes.fill_between(places, [100 * each.low for each in every], [100 * each.high for each in every], color=SKY, alpha=0.35)
    axes.plot(places, mean, "o-", color=BLUE, clip_on=False)
    if mean:
        best = max(places, key=lambda place: mean[place])
        axes.annotate(f"{mean[best]:.1f} %", (best, mean[best]), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set_xticks(list(places), labels, rotation=45 if len(labels) > 6 else 0)
    axes.set(xlabel=name, ylabel="goodput (%)")
    axes.set_title("Goodput: mean, and 80 % of the runs")
    axes.grid(alpha=0.3)
    return drawn
