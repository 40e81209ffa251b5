"""Badput: from all GPU-seconds down to goodput, a step for each cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.figures import DARK, GREEN, canvas, figure
from reports.figures.run_timeline import CAUSES
from sim.runs import ledger
from strategies.resilience.runs import RunAnswer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 5e-5  # share of a step that is drawn; the others are one


@figure("badput")
def badput(answer: RunAnswer) -> Figure:
    """answer: of a job over days."""
    drawn, axes = canvas(6.6, 4.2)
    waterfall(axes, answer)
    return drawn


def waterfall(axes: Axes, answer: RunAnswer) -> None:
    """The largest loss first."""
    losses = [(share, cause) for cause, share in answer.shares.items() if cause != ledger.PRODUCTIVE]
    steps = sorted(((share, cause) for share, cause in losses if share >= LEAST), reverse=True)
    rest = sum(share for share, _ in losses if share < LEAST)
    if rest > LEAST / 10:
        steps.append((rest, "others"))
    top = 100.0
    for place, (share, cause) in enumerate(steps):
        bottom = top - 100 * share
        axes.bar(place, top - bottom, bottom=bottom, color=CAUSES.get(cause, DARK), edgecolor=DARK, linewidth=0.5)
        axes.plot((place - 0.4, place + 1.4), (bottom, bottom), color=DARK, linewidth=0.5)
        axes.annotate(_text(share), (place, top), textcoords="offset points", xytext=(0, 2), ha="center", fontsize=8)
        top = bottom
    goodput, last = 100 * answer.shares[ledger.PRODUCTIVE], len(steps)
    below = max(0.0, goodput - 0.5 * (100 - goodput) - 0.05)
    axes.bar(last, goodput - below, bottom=below, color=GREEN, edgecolor=DARK, linewidth=0.5)
    middle = (below + goodput) / 2
    axes.annotate(f"{goodput:.1f}", (last, middle), ha="center", va="center", fontsize=9, color="white")
    axes.set_xticks(range(last + 1), [*(cause for _, cause in steps), "goodput"], rotation=40, ha="right", fontsize=8)
    axes.set_ylim(below, 100 + 0.12 * (100 - below))
    axes.set_ylabel("of all GPU-seconds (%)")
    axes.set_title("Badput by cause, all runs")


def _text(share: float) -> str:
    return f"{100 * share:.1f}" if share >= 0.01 else f"{100 * share:.2f}"
