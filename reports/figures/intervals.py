"""Goodput by checkpoint interval: the intervals that were tried, the best one and the job's own marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.figures import BLUE, DARK, RED, canvas, figure
from reports.figures.run_timeline import unit_of
from strategies.resilience.run_spec import Prepared

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@figure("intervals")
def intervals(data: tuple[Prepared, Sequence[tuple[int, float]]]) -> Figure:
    """data: the job, and (steps, mean goodput) of intervals that were tried."""
    drawn, axes = canvas(6.6, 4.2)
    optimum(axes, *data)
    return drawn


def optimum(axes: Axes, prepared: Prepared, tried: Sequence[tuple[int, float]]) -> None:
    """The curve, with its best point and the present one."""
    axes.set_title("Goodput by checkpoint interval")
    if not tried:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "not tried", ha="center", transform=axes.transAxes)
        return
    step = prepared.summary.step_seconds
    size, unit = unit_of(tried[-1][0] * step)
    times = [steps * step / size for steps, _ in tried]
    values = [100 * value for _, value in tried]
    best = max(range(len(values)), key=lambda place: values[place])
    present = prepared.spec.savings[0].steps * step / size
    axes.plot(times, values, "o-", color=BLUE, markersize=4)
    axes.axvline(present, ymax=0.8, color=DARK, linestyle="--", linewidth=0.9, label=f"the job's: {present:.3g} {unit}")
    axes.plot(times[best], values[best], "o", color=RED, markersize=8, label=f"best tried: {times[best]:.3g} {unit}")
    axes.set_xscale("log")
    axes.set_xticks(times[::2], [f"{value:.2g}" for value in times[::2]])
    axes.set_xticks([], minor=True)
    low, high = min(values), max(values)
    axes.set_ylim(low - 0.06 * (high - low), high + 0.35 * (high - low) + 1e-3)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set(xlabel=f"{unit} of training between saves", ylabel="goodput (%)")
    axes.legend(fontsize=8, loc="upper left", ncols=2)
    axes.grid(alpha=0.3)
