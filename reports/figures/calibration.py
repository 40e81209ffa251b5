"""A profile beside the measurements that it was made of: how far kernels' prices are off, and the times of collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.figures import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, RED, SKY, YELLOW, figure, log_ticks
from reports.formatting import count, percent, plural, seconds, size
from reports.tables.execution import CLOSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from calibration.fit.machine.parts import Fitted
    from calibration.fit.machine.tables import Point

COLUMNS = 3  # panels beside each other
KERNELS: Mapping[str, tuple[str, str, Callable[[float], str]]] = {  # part -> title, quantity of its axis, and how it is written
    "gemm": ("matrix products", "FLOPs of a product", count),
    "attention": ("attention", "FLOPs of a pass", count),
    "memory": ("bound by memory", "bytes read and written", size),
}
EDGE = 50.0  # error in % that is shown at most; beyond it there is an arrow
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, DARK, YELLOW)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_DOT: dict[str, Any] = {"color": DARK, "linestyle": "none", "marker": "o", "markersize": 5}


@figure("calibration")
def calibration(data: Fitted) -> Figure:
    """Above, errors of kernels by their size, a panel for each kind; below, times of collectives by the size of their buffer, a
    panel for each operation.
    """
    from matplotlib.figure import Figure

    kernels = [part for part in KERNELS if data.points.get(part)]
    collectives = _by_name(point for point in data.points.get("links", ()) if point.bytes > 0)  # a barrier has no size
    operations = list(dict.fromkeys(name.partition(" ")[0] for name in collectives))
    heights = [2.9] * bool(kernels) + [0.7 + 1.75 * -(-len(operations) // COLUMNS)] * bool(operations)
    drawn = Figure(figsize=(9, 0.6 + sum(heights)), layout="constrained")
    parts = list(drawn.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]) if heights else []
    if kernels:
        _kernels(parts[0], {part: data.points[part] for part in kernels})
    if operations:
        _collectives(parts[-1], operations, collectives, data.alone)
    drawn.legend(handles=_handles(data), loc="outside lower center", ncols=3, fontsize=9)
    return drawn


def _by_name(points: Any) -> dict[str, list[Point]]:
    """Series in the order of their sizes."""
    series: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.bytes):
        series.setdefault(point.series, []).append(point)
    return series


def _kernels(part: SubFigure, points: Mapping[str, Sequence[Point]]) -> None:
    """Predicted over measured, less 1, of the kernels of each kind."""
    part.suptitle("Kernels: predicted over measured time, less 1", x=0.01, ha="left", fontsize=11)
    every = part.subplots(1, COLUMNS, sharey=True, squeeze=False)[0]
    errors = [abs(100 * point.error) for each in points.values() for point in each]
    edge = min(EDGE, max(15.0, 1.15 * float(np.percentile(errors, 95))))
    for axes, (name, own) in zip(every, points.items(), strict=False):
        title, quantity, text = KERNELS[name]
        series = _by_name(own)
        for number, (label, each) in enumerate(series.items()):
            _errors(axes, each, edge, {"color": _COLOURS[number % 8], "marker": _MARKERS[number % 8], "markersize": 4.5}, label)
        axes.axhspan(-100 * CLOSE, 100 * CLOSE, color=GREY, alpha=0.25, linewidth=0)
        axes.axhline(0, color=DARK, linewidth=0.8)
        axes.set(xscale="log", xlabel=quantity)
        axes.set_title(f"{title}\n{_summed(own)}", fontsize=10)
        _few_ticks(axes.xaxis, axes.get_xlim(), text)
        if len(series) > 1:
            axes.legend(fontsize=8, loc="upper center", ncols=3, columnspacing=0.8, handletextpad=0.1, borderaxespad=0.1)
    every[0].set(ylabel="error (%)", ylim=(-edge, edge * (1.3 if any(axes.get_legend() for axes in every) else 1)))
    every[0].set_yticks([tick for tick in every[0].get_yticks() if abs(tick) <= edge])
    for axes in every[len(points) :]:
        axes.remove()


def _summed(points: Sequence[Point]) -> str:
    """The median error of what was fitted to, and of what was kept out."""
    names = {False: "fitted", True: "kept out"}
    medians = {held: [abs(point.error) for point in points if point.heldout == held] for held in names}
    return "median " + ", ".join(f"{names[held]} {percent(median(each))}" for held, each in medians.items() if each)


def _errors(axes: Axes, points: Sequence[Point], edge: float, style: dict[str, Any], label: str) -> None:
    """Dots, hollow where they were kept out of the fit; arrows at the edge for what lies beyond it."""
    for held in (False, True):
        own = [(point.bytes, 100 * point.error) for point in points if point.heldout == held]
        drawn = style | {"linestyle": "none"} | ({"markerfacecolor": "none"} if held else {})
        inside = [dot for dot in own if abs(dot[1]) <= edge]
        axes.plot([x for x, _ in inside], [y for _, y in inside], **drawn, label="" if held else label.removeprefix("products "))
        for place, arrow in ((edge, "^"), (-edge, "v")):
            beyond = [x for x, y in own if abs(y) > edge and y * place > 0]
            axes.plot(beyond, [0.93 * place] * len(beyond), **(drawn | {"marker": arrow}))


def _collectives(
    part: SubFigure,
    operations: Sequence[str],
    series: Mapping[str, Sequence[Point]],
    alone: Mapping[str, list[tuple[float, float]]],
) -> None:
    """Times in a step by the size of the buffer, measured and predicted, and those back to back; a colour for ranks (and
    nodes): "all_reduce 16 on 2 nodes" is 16 of them.
    """
    groups = sorted({name.partition(" ")[2] for name in series}, key=lambda group: (int(group.split()[0]), group))
    labels = [f"{plural(int(group.split()[0]), 'rank')}{group.removeprefix(group.split()[0])}" for group in groups]
    of = f" of {labels[0]}" if len(groups) == 1 else ""
    part.suptitle(f"Collectives{of}: time by size of the full buffer", x=0.01, ha="left", fontsize=11)
    columns = min(COLUMNS, len(operations))
    every = list(part.subplots(-(-len(operations) // columns), columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, operation in zip(every, operations, strict=False):
        for number, (group, label) in enumerate(zip(groups, labels, strict=True)):
            if own := series.get(name := f"{operation} {group}"):
                _times(axes, own, alone.get(name, []), _COLOURS[number % 8], label)
        axes.set(xscale="log", yscale="log")
        axes.set_title(operation, fontsize=10)
        axes.grid(alpha=0.3)
    low, high = every[0].get_ylim()
    log_ticks(every[0].yaxis, low, high, seconds)
    _few_ticks(every[0].xaxis, every[0].get_xlim(), size)
    if len(groups) > 1:
        every[0].legend(fontsize=8, loc="upper left")
    for axes in every[len(operations) - columns : len(operations)]:
        axes.tick_params(labelbottom=True)
    for axes in every[len(operations) :]:
        axes.remove()


def _times(axes: Axes, points: Sequence[Point], alone: Sequence[tuple[float, float]], colour: str, label: str) -> None:
    axes.plot([point.bytes for point in points], [point.predicted for point in points], color=colour, linewidth=1.2, label=label)
    for held in (False, True):
        own = [(point.bytes, point.measured) for point in points if point.heldout == held]
        hollow: dict[str, Any] = {"markerfacecolor": "none"} if held else {}
        axes.plot([x for x, _ in own], [y for _, y in own], "o", color=colour, markersize=4.5, **hollow)
    if by_itself := sorted(pair for pair in alone if pair[0] > 0):
        axes.plot(*zip(*by_itself, strict=True), color=colour, linestyle="--", linewidth=0.9, alpha=0.7)


def _few_ticks(axis: Any, limits: tuple[float, float], text: Callable[[float], str]) -> None:
    """Labels of a narrow panel: one per decade or two, or two in a decade."""
    from matplotlib.ticker import LogLocator

    low, high = limits
    log_ticks(axis, low, high, text)
    axis.set_major_locator(LogLocator(subs=(1, 3) if high < 100 * low else (1,), numticks=5))


def _handles(data: Fitted) -> list[object]:
    from matplotlib.lines import Line2D

    collectives = [
        Line2D([], [], color=DARK, linewidth=1.2, label="predicted, in a step"),
        *[Line2D([], [], color=DARK, linewidth=0.9, linestyle="--", label="measured, back to back")] * bool(data.alone),
    ] * bool(data.points.get("links"))
    return [
        Line2D([], [], **_DOT, label="measured, fitted to"),
        Line2D([], [], **_DOT, markerfacecolor="none", label="measured, kept out of the fit"),
        *collectives,
        *[Line2D([], [], **(_DOT | {"marker": "^"}), label="beyond the axis")] * any(data.points.get(part) for part in KERNELS),
    ]
