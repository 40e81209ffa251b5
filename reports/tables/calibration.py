"""What a calibration found: a bar while it measures, the errors of the fit as a table, dots and lines with residuals below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

from reports import formatting
from reports.figures import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, RED, SKY, YELLOW, figure, log_ticks
from reports.formatting import percent, seconds, signed
from reports.terminal import progress_bar
from topologies.documents.units import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from calibration.fit.machine.parts import Fitted
    from calibration.fit.machine.tables import Point
    from calibration.request import Result

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, DARK, YELLOW)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "h")
_PANELS = {  # part -> title, quantity of the axis
    "gemm": ("matrix products, a dot per shape and layout", "FLOPs"),
    "attention": ("attention, forward and backward", "FLOPs"),
    "memory": ("bound by memory", "bytes"),
    "links": ("collectives", "bytes of the full buffer"),
}


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar with the time that is left, moved by what a session tells; on stderr, where that is a terminal and not `quiet`."""
    with progress_bar(quiet) as bar:
        task = bar.add_task("starting", total=None)

        def hear(message: dict[str, Any]) -> None:
            if "cases" in message:
                bar.update(task, total=message["cases"])
            elif "waiting" in message:
                bar.update(task, description=f"waiting: {message['waiting']}")
            elif "note" in message:
                bar.console.print(message["note"], style="yellow")
            elif "skipped" in message:
                bar.advance(task)
            elif message.get("sample", {}).get("part") != "footprint":
                sample = message["sample"]
                name = sample["case"].get("operation") or sample["case"].get("kind") or sample["case"].get("layout") or ""
                bar.update(task, advance=1, description=f"{sample['part']} {name}")

        yield hear


def _rows(points: Sequence[Point]) -> list[tuple[str, int, float, float, float | None]]:
    """Series, sizes, median error fitted and held out, worst."""
    series: dict[str, list[Point]] = {}
    for point in points:
        series.setdefault(point.series, []).append(point)
    result = []
    for name, of_series in series.items():
        fitted, out = ([abs(point.error) for point in of_series if point.heldout == held] for held in (False, True))
        worst = max(of_series, key=lambda point: abs(point.error)).error
        result.append((name, len(of_series), median(fitted) if fitted else 0.0, worst, median(out) if out else None))
    return result


def accuracy(result: Result) -> RenderableType:
    """A row per series: sizes, median error of the fit and on the half that was kept out; the layer that checks the prices."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"profile {result.fitted.profile.name}", title_justify="left")
    for name in ("measured", "sizes", "error of the fit", "kept out", "worst"):
        table.add_column(name, justify="left" if name == "measured" else "right")
    for points in result.fitted.points.values():
        for name, count, fitted, worst, out in _rows(points):
            table.add_row(
                name,
                str(count),
                percent(fitted) if fitted > 1e-9 else "",
                "" if out is None else percent(out),
                f"{100 * worst:+.0f} %",
            )
    lines = []
    if crowded := result.fitted.profile.crowding:
        times = "; ".join(
            f"{name} × {each.factor:.3f}, and {show(each.rate, 'B/s', 3)} for products' operands and results besides"
            for name, each in crowded.items()
        )
        lines.append(f"in a step the parts of a layer take longer than alone: {times}")
    lines += [
        f"a transformer layer of {check.hidden} features over {check.tokens} tokens, forward and backward (not fitted to): "
        f"measured {seconds(sum(check.measured))}, predicted {seconds(sum(check.predicted))}, {signed(check.error)}"
        for check in result.layers
    ]
    lines += [f"copy {way}: {show(rate, 'B/s', 3)}" for way, rate in result.copies.items()]
    return Group(table, *lines)


def to_dict(result: Result) -> dict[str, Any]:
    """For machines, with stable keys."""
    series = {
        name: {"sizes": count, "fit_error": fitted, "heldout_error": out, "worst": worst}
        for points in result.fitted.points.values()
        for name, count, fitted, worst, out in _rows(points)
    }
    return {
        "profile": result.fitted.profile.name,
        "files": [str(path) for path in result.files],
        "series": series,
        "layers": [check._asdict() | {"error": check.error} for check in result.layers],
        "copies": result.copies,
        "notes": result.fitted.notes,
    }


@figure("calibration")
def calibration(data: Fitted) -> Figure:
    """Dots measured, lines and crosses predicted, and predicted over measured − 1 below; hollow dots were kept out of the fit."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    parts = [part for part in _PANELS if data.points.get(part)]
    columns = min(2, len(parts))
    drawn = Figure(figsize=(6.6 * columns, 5.4 * -(-len(parts) // columns) + 0.5), layout="constrained")
    cells = drawn.add_gridspec(-(-len(parts) // columns), columns)
    for number, part in enumerate(parts):
        grid = cells[number // columns, number % columns].subgridspec(2, 1, height_ratios=(3, 1), hspace=0.05)
        above = drawn.add_subplot(grid[0])
        below = drawn.add_subplot(grid[1], sharex=above)
        above.tick_params(labelbottom=False, which="both")
        _panel(above, below, part, data)
    drawn.suptitle(
        f"profile {data.profile.name}: measured and predicted, and below predicted over measured − 1", x=0.01, ha="left"
    )
    dot: dict[str, Any] = {"color": DARK, "linestyle": "none", "marker": "o", "markersize": 5}
    handles = [
        Line2D([], [], **dot, label="measured, fitted to"),
        Line2D([], [], **dot, markerfacecolor="none", label="measured, kept out of the fit"),
        Line2D([], [], color=DARK, linestyle="none", marker="x", markersize=5, label="predicted"),
        Line2D([], [], color=DARK, linewidth=1.2, label="predicted, collectives in a step"),
        Line2D([], [], color=DARK, linewidth=0.9, linestyle="--", label="measured, collectives back to back"),
        Line2D([], [], color=DARK, linestyle="none", marker="^", markersize=5, label="error beyond the axis"),
    ]
    drawn.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return drawn


def _panel(above: Axes, below: Axes, part: str, data: Fitted) -> None:
    title, quantity = _PANELS[part]
    series: dict[str, list[Point]] = {}
    for point in data.points[part]:
        series.setdefault(point.series, []).append(point)
    series = {
        name: points for name, points in series.items() if any(point.bytes > 0 for point in points)
    }  # a barrier has no size
    most = min(100.0, max(15.0, *(115 * abs(point.error) for point in data.points[part])))
    for number, (name, points) in enumerate(series.items()):
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        ordered = sorted((p for p in points if p.bytes > 0), key=lambda point: point.bytes)
        _dots(above, below, ordered, colour, marker, name, part == "links", most)
        if alone := [pair for pair in data.alone.get(name, []) if pair[0] > 0]:
            above.plot(*zip(*alone, strict=True), color=colour, linestyle="--", linewidth=0.9, alpha=0.7)
    above.set(xscale="log", yscale="log", ylabel="time", title=title)
    above.legend(fontsize=8, ncols=2)
    below.axhspan(-10, 10, color=GREY, alpha=0.25, linewidth=0)
    below.axhline(0, color=DARK, linewidth=0.8)
    below.set(xscale="log", xlabel=quantity, ylabel="error (%)", ylim=(-most, most))
    log_ticks(above.yaxis, *above.get_ylim(), seconds)
    log_ticks(below.xaxis, *below.get_xlim(), formatting.count)


def _dots(
    above: Axes, below: Axes, points: Sequence[Point], colour: str, marker: str, name: str, line: bool, most: float
) -> None:
    """Measurements and what the fit says of them. most: error in % that the axis shows; what is beyond it is at its edge."""
    for held in (False, True):
        own = [point for point in points if point.heldout == held]
        style: dict[str, Any] = {"color": colour, "markersize": 4, "linestyle": "none"}
        style |= {"markerfacecolor": "none"} if held else {}
        above.plot(
            [point.bytes for point in own], [point.measured for point in own], marker=marker, **style, label="" if held else name
        )
        inside = [point for point in own if abs(100 * point.error) <= most]
        below.plot([point.bytes for point in inside], [100 * point.error for point in inside], marker=marker, **style)
        for edge, sign, arrow in ((most, 1, "^"), (-most, -1, "v")):
            beyond = [point.bytes for point in own if 100 * point.error * sign > most]
            below.plot(beyond, [0.93 * edge] * len(beyond), marker=arrow, **style)
    sizes, prices = [point.bytes for point in points], [point.predicted for point in points]
    shape: dict[str, Any] = {"linewidth": 1.2} if line else {"linestyle": "none", "marker": "x", "markersize": 3.5, "alpha": 0.7}
    above.plot(sizes, prices, color=DARK if not line else colour, **shape)
