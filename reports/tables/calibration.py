"""What a calibration found: a bar while it measures, the errors of the fit as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

from reports.formatting import percent, seconds, signed
from reports.terminal import progress_bar
from topologies.documents.units import show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calibration.fit.machine.tables import Point
    from calibration.request import Result


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
            elif message.get("sample", {}).get("part") not in ("footprint", "anchor"):
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
            f"{name} × {each.factor:.3f}"
            + (f", and products' operands and results besides at {show(each.rate, 'B/s', 3)}" if isfinite(each.rate) else "")
            for name, each in crowded.items()
        )
        lines.append(f"in a step the parts of a layer take longer than alone: {times}")
    lines += [
        f"a transformer layer of {check.hidden} features over {check.tokens} tokens, forward and backward (not fitted to): "
        f"measured {seconds(sum(check.measured))}, predicted {seconds(sum(check.predicted))}, {signed(check.error)}"
        for check in result.layers
    ]
    if result.company:
        times = ", ".join(f"{kind} × {factor:.3f}" for kind, factor in result.company.items())
        lines.append(f"while all ranks of a node compute, over the time while the others wait: {times}")
    if apart := result.fitted.profile.variability:
        lines.append(f"ranks that do the same work differ by {apart:.1%} (standard deviation): steps wait for the slowest")
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
        "company": result.company,
        "variability": result.fitted.profile.variability,
        "copies": result.copies,
        "notes": result.fitted.notes,
    }
