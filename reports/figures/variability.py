"""What waiting for the slowest rank leaves of the ideal speed, by the number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.figures import BLUE, canvas, figure
from reports.formatting import percent
from strategies.planner.variability import Variability

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@figure("variability")
def variability(data: tuple[Variability, int]) -> Figure:
    """data: the spread of a step, and GPUs of one replica."""
    spread, replica = data
    drawn, axes = canvas(6.4, 3.6)
    gpus, left = [count * replica for count in spread.scaling], [100 * part for part in spread.scaling.values()]
    axes.plot(gpus, left, "o-", color=BLUE, clip_on=False)
    for x, y in ((gpus[0], left[0]), (gpus[-1], left[-1])):
        axes.annotate(f"{y:.1f} %", (x, y), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus], rotation=45 if len(gpus) > 6 else 0)
    axes.set(xlabel="GPUs", ylabel="of the speed when all are alike (%)", ylim=(min(99.0, min(left) - 0.5), 100.4))
    axes.set_title(f"Waiting for the slowest: GPUs vary by {percent(spread.gpus)}")
    axes.grid(alpha=0.3)
    return drawn
