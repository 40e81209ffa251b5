"""Predictions beside published measurements, and how often error bars hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from calibration.published.comparison import Compared, Errors, grouped
from reports.figures import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, RED, SKY, YELLOW, figure
from reports.formatting import percent
from strategies.planner.uncertainty import NORMAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

Corner = Literal["upper left", "lower right"]
_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, DARK, GREY, "tab:brown", "tab:olive")
_MARKS = "osD^vPX*<>hd"


@figure("published")
def published(rows: Sequence[Compared]) -> Figure:
    """Predicted against published step time, with y = x and ±10 %, by source and GPU; beside it, how often intervals hold."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(12, 6.4), layout="constrained")
    left, right = drawing.subplots(1, 2, width_ratios=(3, 2))
    _scatter(left, rows)
    _calibration(right, rows)
    return drawing


def _scatter(axes: Axes, rows: Sequence[Compared]) -> None:
    predicted = [row for row in rows if row.error is not None]
    colours = {gpu: _colour(number) for number, gpu in enumerate(sorted({row.gpu for row in predicted}))}
    sources = dict(sorted(grouped(predicted, "source").items()))
    marks = {source: _MARKS[number % len(_MARKS)] for number, source in enumerate(sources)}
    for source, group in sources.items():
        for gpu in sorted({row.gpu for row in group}):
            these = [row for row in group if row.gpu == gpu]
            steps = [row.step or 0.0 for row in these], [row.predicted_step or 0.0 for row in these]
            axes.scatter(*steps, s=18, color=colours[gpu], alpha=0.7, lw=0, marker=marks[source])
    every = [value for row in predicted for value in (row.step, row.predicted_step) if value]
    ends = [min(every) / 1.5, max(every) * 1.5] if every else [0.1, 1]
    axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color=GREY, alpha=0.4, lw=0)
    axes.plot(ends, ends, color=DARK, lw=1)
    axes.set(
        xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published step time in s", ylabel="predicted step time in s"
    )
    errors = Errors.of(predicted)
    off = f"off by {percent(errors.mean)} in the mean; " if errors else ""
    axes.set_title(f"Predicted against published step time: {off}grey: ±10 %")
    axes.add_artist(_legend(axes, "source", {source: (DARK, mark) for source, mark in marks.items()}, "upper left"))
    axes.add_artist(_legend(axes, "GPU", {gpu: (colour, "o") for gpu, colour in colours.items()}, "lower right"))


def _colour(number: int) -> str:
    """Of the GPU or source with that number."""
    return _COLOURS[number % len(_COLOURS)]


def _legend(axes: Axes, title: str, entries: dict[str, tuple[str, str]], place: Corner) -> Legend:
    """What a colour or a mark means, where no points are."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, marker=mark, ls="", ms=4, label=name) for name, (colour, mark) in entries.items()]
    return axes.legend(handles=handles, title=title, title_fontsize=8, fontsize=7, loc=place)


def stated_and_held(rows: Sequence[Compared]) -> list[tuple[float, float]]:
    """(level, share of rows whose interval of that level holds the published step), for levels of 5 to 95 %."""
    from statistics import NormalDist

    scores = []
    for row in rows:
        if row.error is not None and row.high and row.low and row.predicted_step and row.step:
            side = row.high if row.step > row.predicted_step else row.low
            scores.append(abs(math.log(row.step / row.predicted_step) / math.log(side / row.predicted_step)) * NORMAL)
    levels = [level / 100 for level in range(5, 100, 5)]
    return [
        (level, sum(score <= NormalDist().inv_cdf((1 + level) / 2) for score in scores) / max(1, len(scores))) for level in levels
    ]


def _calibration(axes: Axes, rows: Sequence[Compared]) -> None:
    for number, (source, group) in enumerate(sorted(grouped(rows, "source").items())):
        axes.plot(
            *zip(*stated_and_held(group), strict=True),
            color=_colour(number),
            lw=1,
            marker=_MARKS[number % len(_MARKS)],
            ms=3,
            label=source,
        )
    axes.plot(*zip(*stated_and_held(rows), strict=True), color=DARK, lw=2.5, label="all")
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls="--")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="stated level of the interval", ylabel="share of rows that it holds")
    axes.set_title("Do the error bars hold?")
    axes.legend(fontsize=7)
