"""Predictions beside published measurements: how far each is off, and how often error bars hold, a line per source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from calibration.published.comparison import Compared, Errors, grouped
from reports.figures import BLACK, BLUE, DARK, GREEN, GREY, LIGHT, ORANGE, PURPLE, RED, SKY, WHITE, YELLOW, at_the_right, figure
from reports.formatting import percent, plural
from reports.tables.execution import CLOSE
from strategies.planner.uncertainty import NORMAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVELS = {0.5: SKY, 0.8: BLUE, 0.95: DARK}  # of intervals whose shares are drawn, and their colours
SPREAD, TURN = 0.36, 0.618034  # dots lie that far around their line, a golden section of it from one to the next
_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK, GREY, "tab:brown", "tab:olive")
_MARKERS = ("o", "D", "^")  # where there are more GPUs than colours


@figure("published")
def published(rows: Sequence[Compared]) -> Figure:
    """A line per source and one for all: on the left the error of each row, on the right the share that intervals hold."""
    from matplotlib.figure import Figure

    known = [row for row in rows if row.error is not None]
    lines = {"all": known, **dict(sorted(grouped(known, "source").items()))}
    drawing = Figure(figsize=(12, 2.6 + 0.42 * len(lines)), layout="constrained")
    left, right = drawing.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    handles = _errors(left, lines)
    drawing.legend(handles=handles, loc="outside lower left", ncols=6, fontsize=8.5, columnspacing=1.2)
    drawing.legend(handles=_held(right, lines), loc="outside lower right", ncols=3, fontsize=8.5)
    left.set_yticks(range(len(lines)), [f"{source} ({plural(len(group), 'row')})" for source, group in lines.items()])
    left.get_yticklabels()[0].set_fontweight("bold")
    left.set_ylim(len(lines) - 0.4, -0.6)
    for axes in (left, right):
        axes.axhline(0.5, color=DARK, lw=0.8)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    return drawing


def _errors(axes: Axes, lines: Mapping[str, Sequence[Compared]]) -> list[object]:
    """A dot per row by GPU, the mean error of each line in numbers; returns the entries of the legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = sorted({row.gpu for row in lines["all"]})
    marks = {gpu: (_MARKERS[at // len(_COLOURS) % len(_MARKERS)], _COLOURS[at % len(_COLOURS)]) for at, gpu in enumerate(names)}
    axes.axvspan(-100 * CLOSE, 100 * CLOSE, color=LIGHT, lw=0, zorder=0)
    axes.axvline(0, color=DARK, lw=1, zorder=1)
    for y, group in enumerate(lines.values()):
        dots = [(100 * (row.error or 0.0), y + SPREAD * (2 * (at * TURN % 1) - 1), row.gpu) for at, row in enumerate(group)]
        for gpu, (marker, colour) in marks.items():
            if own := [dot[:2] for dot in dots if dot[2] == gpu]:
                axes.plot(*zip(*own, strict=True), marker, color=colour, ms=3.9, mec=WHITE, mew=0.3, zorder=2)
        summed = Errors.of(group)
        if summed:
            axes.plot([100 * summed.bias] * 2, [y - SPREAD - 0.08, y + SPREAD + 0.08], color=BLACK, lw=2, zorder=3)
            at_the_right(axes, y, percent(summed.mean), 38, color=DARK, fontweight="normal" if y else "bold")
    axes.set(xlabel="predicted over published step time, less 1 (%)")
    axes.set_title("How far are predictions off? At the right: mean error")
    entries = [Line2D([], [], color=colour, marker=marker, ls="", ms=5, label=gpu) for gpu, (marker, colour) in marks.items()]
    bias = Line2D([], [], color=BLACK, marker="|", ls="", ms=11, mew=2, label="bias (mean)")
    return [*entries, bias, Patch(facecolor=LIGHT, label=f"±{100 * CLOSE:.0f} %")]


def stated_and_held(rows: Sequence[Compared]) -> list[tuple[float, float]]:
    """(level, share of rows whose interval of that level holds the published step), for each of `LEVELS`."""
    from statistics import NormalDist

    scores = []
    for row in rows:
        if row.error is not None and row.high and row.low and row.predicted_step and row.step:
            side = row.high if row.step > row.predicted_step else row.low
            scores.append(abs(math.log(row.step / row.predicted_step) / math.log(side / row.predicted_step)) * NORMAL)
    return [
        (level, sum(score <= NormalDist().inv_cdf((1 + level) / 2) for score in scores) / max(1, len(scores))) for level in LEVELS
    ]


def _held(axes: Axes, lines: Mapping[str, Sequence[Compared]]) -> list[object]:
    """A dot per level and line, joined with the level that was stated; returns the entries of the legend."""
    from matplotlib.lines import Line2D

    for level, colour in LEVELS.items():
        axes.axvline(100 * level, color=colour, lw=1.2, ls="--", zorder=0)
    for y, group in enumerate(lines.values()):
        axes.axhline(y, color=LIGHT, lw=0.8, zorder=0)
        for at, (level, share) in enumerate(stated_and_held(group)):
            place, colour = y + 0.22 * (at - 1), LEVELS[level]
            axes.plot([100 * level, 100 * share], [place, place], color=colour, lw=1.4, zorder=1)
            axes.plot(100 * share, place, "o", color=colour, ms=5.5, zorder=2)
    axes.set(xlim=(0, 103), xlabel="rows held (%); left of its line: bars too narrow")
    axes.set_title("Do the error bars hold?")
    return [
        Line2D([], [], color=colour, marker="o", ms=5.5, lw=1.4, label=f"{100 * level:.0f} % interval")
        for level, colour in LEVELS.items()
    ]
