"""Goodput of runs over an input: scale, interval, spares, bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.figures import BLUE, RED, SKY, canvas, figure
from strategies.resilience.compare_runs import RunCase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 8  # times as large as the smallest: from there on a logarithmic scale
APART = 1.12  # ratio of two values below which only one of them has its label


@figure("goodput")
def goodput(data: tuple[str, Sequence[RunCase]]) -> Figure:
    """data: name of the input, and a case for each of its values: mean, 80 % of the runs, the best one marked."""
    drawn, axes = canvas(6.6, 4.2)
    over(axes, *data)
    return drawn


def over(axes: Axes, name: str, cases: Sequence[RunCase]) -> None:
    """A number's values lie where they are; others beside each other. `nodes` are shown as GPUs."""
    played = [case for case in cases if case.answer is not None]
    every = [case.answer.goodput for case in played if case.answer is not None]
    mean = [100 * each.mean for each in every]
    places, label = _places(axes, name, played)
    axes.fill_between(
        places, [100 * each.low for each in every], [100 * each.high for each in every], color=SKY, alpha=0.3, linewidth=0
    )
    axes.plot(places, mean, "o-", color=BLUE, markersize=4)
    if mean:
        best = max(range(len(mean)), key=lambda place: mean[place])
        axes.plot(places[best], mean[best], "o", color=RED, markersize=8)
        axes.annotate(f"{mean[best]:.1f} %", (places[best], mean[best]), textcoords="offset points", xytext=(0, 9), ha="center")
        top = max(100 * max(each.high for each in every), mean[best] + 0.12 * (max(mean) - min(mean)))
        bottom = axes.get_ylim()[0]
        axes.set_ylim(bottom, min(100 + 0.02 * (100 - bottom), top) + 0.05 * (top - bottom))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set(xlabel=label, ylabel="goodput (%)")
    axes.set_title("Goodput: mean, and 80 % of the runs")
    axes.grid(alpha=0.3)


def _places(axes: Axes, name: str, played: Sequence[RunCase]) -> tuple[list[float], str]:
    """Where each case lies, and what the axis is called; its ticks are set."""
    if name == "nodes":
        texts, unit, label = [f"{case.prepared.spec.gpus}" for case in played if case.prepared], "", "GPUs"
    else:
        texts = [str(case.changes[name]) for case in played]
        units = {text.partition(" ")[2] for text in texts}
        unit = units.pop() if len(units) == 1 else ""
        label = f"{name} ({unit})" if unit else name
    try:
        places = [float(text.removesuffix(f" {unit}") if unit else text) for text in texts]
    except ValueError:
        axes.set_xticks(range(len(texts)), texts, rotation=45 if len("".join(texts)) > 60 else 0)
        return [float(place) for place in range(len(texts))], label
    if len(places) > 1 and min(places) > 0 and max(places) >= WIDE * min(places):
        axes.set_xscale("log")
        axes.set_xticks([], minor=True)
    shown: list[float] = []
    for place in sorted(places):
        if axes.get_xscale() == "linear" or not shown or place >= APART * shown[-1]:
            shown.append(place)
    if len(shown) <= 12:
        crowded = len(shown) > 7
        axes.set_xticks(shown, [f"{place:,.6g}" for place in shown], rotation=45 if crowded else 0)
    return places, label
