"""One collective against size, as nccl-tests shows it: every algorithm and protocol, the chosen one, and measurements."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from reports.formatting import digits, percent, seconds, signed
from sim.analysis.collective_sweep import Sweep
from topologies.documents.units import show

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = 7  # choices that a table shows one by one


def accuracy(data: Sweep) -> str:
    """One line: how far the prices are from the measurements."""
    absolute = sorted(abs(error) for error in data.errors)
    worst, (size, _) = max(zip(data.errors, data.measured, strict=True), key=lambda pair: abs(pair[0]))
    p90 = absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))]
    return (
        f"{len(absolute)} sizes: median error {percent(median(absolute))}, 90th percentile {percent(p90)}, "
        f"worst {signed(worst)} at {size_of(size)}"
    )


def size_of(value: float) -> str:
    """`64 KiB`, as nccl-tests' sizes are powers of two; else `1.5 MB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor and value % factor == 0:
            return f"{value / factor:.0f} {unit}"
    return show(value, "B", 3)


def table(data: Sweep) -> RenderableType:
    """A row per size: what is chosen, time, algbw and busbw in GB/s (1e9), and the time of the other choices."""
    from rich import box
    from rich.table import Table

    others = data.names[:COLUMNS]
    title = f"{data.operation} on {data.where}; GB/s = 1e9 bytes/s"
    result = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("size", "chosen", "time", "algbw", "busbw", *others):
        style = "dim" if name in others else None
        result.add_column(name.replace("/", "\n"), justify="left" if name == "chosen" else "right", style=style, no_wrap=True)
    for options in data.prices:
        first, times = options[0], {point.name: seconds(point.seconds) for point in options}
        rates = [digits(rate / 1e9) for rate in data.rate(first.bytes, first.seconds)]
        result.add_row(
            size_of(first.bytes), first.name, seconds(first.seconds), *rates, *(times.get(name, "") for name in others)
        )
    return result


def comparison(data: Sweep) -> RenderableType:
    """Measured beside predicted, and the summary of the errors."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("size", "measured", "predicted", "error", "measured busbw"):
        result.add_column(name, justify="right")
    for (size, time), price, error in zip(data.measured, data.at_measured, data.errors, strict=True):
        busbw = digits(data.rate(size, time)[1] / 1e9)
        result.add_row(size_of(size), seconds(time), seconds(price), signed(error), busbw)
    return Group(result, accuracy(data))
