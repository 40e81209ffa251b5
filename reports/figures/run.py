"""A job over days: one run as a timeline, where its GPU-seconds go, goodput by checkpoint interval, when runs are over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.figures import figure
from reports.figures.badput import waterfall
from reports.figures.completion import distribution
from reports.figures.intervals import optimum
from reports.figures.run_timeline import close, overview
from sim.runs.run import Outcome
from strategies.resilience.run_spec import Prepared
from strategies.resilience.runs import RunAnswer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@figure("run")
def run(data: tuple[Prepared, RunAnswer, Sequence[tuple[int, float]], Outcome]) -> Figure:
    """data: the job, its answer, (steps, goodput) of intervals that were tried, and a run with its timeline."""
    from matplotlib.figure import Figure

    prepared, answer, tried, outcome = data
    drawn = Figure(figsize=(13, 8.4), layout="constrained")
    drawn.suptitle(f"{prepared.job.name}: {prepared.spec.gpus:,} GPUs", x=0.01, ha="left", fontsize=13)
    grid = drawn.add_gridspec(3, 3, height_ratios=(4, 0.8, 3.2))
    overview(drawn.add_subplot(grid[0, :]), outcome)
    close(drawn.add_subplot(grid[1, :]), outcome)
    waterfall(drawn.add_subplot(grid[2, 0]), answer)
    optimum(drawn.add_subplot(grid[2, 1]), prepared, tried)
    distribution(drawn.add_subplot(grid[2, 2]), answer)
    return drawn
