"""A job over days: one run as a timeline, where its GPU-seconds go, and goodput by checkpoint interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from reports.figures import BLACK, BLUE, DARK, GREEN, GREY, LIGHT, ORANGE, PURPLE, RED, SKY, WHITE, YELLOW, figure
from sim.runs import ledger
from sim.runs.run import Run
from strategies.resilience.run_spec import Prepared
from strategies.resilience.runs import RunAnswer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    ledger.PRODUCTIVE: GREEN,
    ledger.WASTED: RED,
    ledger.SAVE: BLUE,
    ledger.RESTORE: SKY,
    ledger.INITIALIZATION: ORANGE,
    ledger.DETECTION: PURPLE,
    ledger.DIAGNOSIS: YELLOW,
    ledger.REPLACEMENT: DARK,
    ledger.SLOW: GREY,
    ledger.REDUCED: GREY,
    ledger.EVALUATION: LIGHT,
    ledger.LOADING: BLACK,
    ledger.SPARES: WHITE,
}
ROWS = 8  # of the timeline


@figure("run")
def run(data: tuple[Prepared, RunAnswer, Sequence[tuple[int, float]], int]) -> Figure:
    """data: the job, its answer, (steps, goodput) of intervals that were tried, and the seed whose first run is drawn."""
    from matplotlib.figure import Figure

    prepared, answer, tried, seed = data
    drawn = Figure(figsize=(11, 6.4), layout="constrained")
    grid = drawn.add_gridspec(2, 2, height_ratios=(3, 2.4))
    _timeline(drawn.add_subplot(grid[0, :]), prepared, seed)
    _waterfall(drawn.add_subplot(grid[1, 0]), answer)
    _intervals(drawn.add_subplot(grid[1, 1]), prepared, tried)
    return drawn


def _timeline(axes: Axes, prepared: Prepared, seed: int) -> None:
    """The first run, in rows of equal length one below the other; what follows a failure is never thinner than a hair."""
    from matplotlib.patches import Patch

    outcome = Run(prepared.spec, np.random.SeedSequence(seed, spawn_key=(0,)), record=True).outcome()
    row = outcome.seconds / ROWS
    seen: dict[str, None] = {}
    for start, end, cause in outcome.timeline:
        seen[cause] = None
        while start < end:
            number = min(ROWS - 1, int(start // row))
            until = min(end, (number + 1) * row) if number < ROWS - 1 else end
            left, width = (start - number * row) / 86400, (until - start) / 86400
            axes.barh(number, width, left=left, height=0.8, color=COLOURS[cause], linewidth=0)
            if until <= start:
                break
            start = until
    axes.set_yticks(range(ROWS), [f"day {number * row / 86400:.3g}" for number in range(ROWS)])
    axes.invert_yaxis()
    axes.set(xlabel="days from there", xlim=(0, row / 86400))
    count = sum(outcome.failures.values())
    axes.set_title(f"{prepared.job.name}: the first run, {count} failures, goodput {100 * outcome.goodput:.1f} %")
    handles = [Patch(facecolor=COLOURS[cause], label="training" if cause == ledger.PRODUCTIVE else cause) for cause in seen]
    axes.legend(handles=handles, ncols=len(handles), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _waterfall(axes: Axes, answer: RunAnswer) -> None:
    """Badput from all GPU-seconds down to goodput."""
    top, names = 100.0, list[str]()
    losses = sorted(((share, cause) for cause, share in answer.shares.items() if cause != ledger.PRODUCTIVE), reverse=True)
    for share, cause in losses:
        if share < 5e-5:
            continue
        axes.bar(len(names), 100 * share, bottom=top - 100 * share, color=COLOURS[cause], edgecolor=DARK, linewidth=0.5)
        axes.annotate(f"{100 * share:.2g}", (len(names), top), textcoords="offset points", xytext=(0, 2), ha="center", fontsize=8)
        top -= 100 * share
        names.append(cause)
    axes.bar(len(names), top, color=GREEN, edgecolor=DARK, linewidth=0.5)
    axes.set_xticks(range(len(names) + 1), [*names, "goodput"], rotation=40, ha="right", fontsize=8)
    axes.set_ylim(max(0.0, top - 0.35 * (100 - top) - 0.1), 100 + 0.12 * (100 - top))
    axes.set_ylabel("of all GPU-seconds (%)")
    axes.set_title("Badput by cause, all runs")


def _intervals(axes: Axes, prepared: Prepared, tried: Sequence[tuple[int, float]]) -> None:
    """Goodput by the interval of the first place, the best one and the present one marked."""
    axes.set_title("Goodput by checkpoint interval")
    if not tried:
        axes.text(0.5, 0.5, "not tried", ha="center", transform=axes.transAxes)
        return
    minutes = [steps * prepared.summary.step_seconds / 60 for steps, _ in tried]
    values = [100 * value for _, value in tried]
    best = max(range(len(values)), key=lambda place: values[place])
    axes.plot(minutes, values, "o-", color=BLUE, markersize=4)
    axes.plot(minutes[best], values[best], "o", color=RED, label=f"best: {minutes[best]:.3g} min")
    present = prepared.spec.savings[0].steps
    axes.axvline(present * prepared.summary.step_seconds / 60, color=GREY, linestyle="--", label="now")
    axes.set_xscale("log")
    axes.set_xticks(minutes[::2], [f"{value:.2g}" for value in minutes[::2]])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="minutes between saves", ylabel="goodput (%)")
    axes.legend(fontsize=8)
