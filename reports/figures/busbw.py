"""One collective against size, as nccl-tests shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reports.figures import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, RED, SKY, figure
from reports.tables.busbw import accuracy, size_of
from sim.analysis.collective_sweep import Sweep, bus_factor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
_DASHES = {"ll": ":", "ll128": "--", "p2p_ll": ":"}


@figure("busbw")
def busbw(data: Sweep) -> Figure:
    """Time and bandwidth against size, a line per algorithm and protocol; measurements as dots, and their residuals below."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11.5, 6.4 if data.measured else 4.6), layout="constrained")
    if data.measured:
        grid = drawn.add_gridspec(2, 2, height_ratios=(3, 1))
        left, right, below = drawn.add_subplot(grid[0, 0]), drawn.add_subplot(grid[0, 1]), drawn.add_subplot(grid[1, :])
        _residuals(below, data)
    else:
        left, right = drawn.subplots(1, 2)
    _lines(left, right, data)
    _scales(left, right, data)
    handles, labels = left.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=min(6, len(handles)), fontsize=9)
    drawn.suptitle(
        f"{data.operation} of {data.where}" if data.used else f"{data.operation} on {data.where}", x=0.01, ha="left", fontsize=12
    )
    return drawn


def _lines(left: Axes, right: Axes, data: Sweep) -> None:
    algorithms = list(dict.fromkeys(name.split("/")[0] for name in data.names))
    for name in data.names:
        points = [point for options in data.prices for point in options if point.name == name]
        algorithm, _, protocol = name.partition("/")
        colour, dash = _COLOURS[algorithms.index(algorithm) % len(_COLOURS)], _DASHES.get(protocol, "-")
        _both(left, right, data, [(p.bytes, p.seconds) for p in points], color=colour, linestyle=dash, linewidth=1.4, label=name)
    chosen = [(options[0].bytes, options[0].seconds) for options in data.prices]
    _both(left, right, data, chosen, color=GREY, linewidth=6, alpha=0.6, zorder=0, label="chosen", solid_capstyle="round")
    for number, size in enumerate(data.used):
        for ax in (left, right):
            ax.axvline(size, color=DARK, linewidth=0.8, linestyle=(0, (2, 2)), label="" if number else "sizes of the job")
    if data.measured:
        _both(left, right, data, data.measured, color="black", marker="o", markersize=4.5, linestyle="none", label="measured")


def _both(left: Axes, right: Axes, data: Sweep, points: Sequence[tuple[float, float]], **style: Any) -> None:
    sizes = [size for size, _ in points]
    left.plot(sizes, [1e6 * time for _, time in points], **style)
    right.plot(sizes, [data.rate(*point)[1] / 1e9 for point in points], **style)


def _scales(left: Axes, right: Axes, data: Sweep) -> None:
    factor = bus_factor(data.operation, data.ranks)
    left.set(yscale="log", ylabel="time (µs)")
    right.set(ylabel="busbw (GB/s)", ylim=(0, None))
    if factor != 1:
        second = right.twinx()
        second.set(ylabel="algbw (GB/s)", ylim=(0, right.get_ylim()[1] / factor))
        second.spines["right"].set_visible(True)
    times = [options[0].seconds for options in data.prices] + [time for _, time in data.measured]
    left.set_ylim(0.7e6 * min(times), 3e6 * max(times))
    for ax in (left, right):
        _sizes(ax, data)


def _sizes(ax: Axes, data: Sweep) -> None:
    sizes = [options[0].bytes for options in data.prices] + [size for size, _ in data.measured] + list(data.used)
    low, high = min(sizes), max(sizes)
    ticks = [2.0**power for power in range(0, 61, 5) if low <= 2.0**power <= high] or [low]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [size_of(tick) for tick in ticks])
    ax.set(xlabel="size S", xlim=(low / 1.2, high * 1.2))
    ax.grid(alpha=0.25, linewidth=0.6)


def _residuals(ax: Axes, data: Sweep) -> None:
    errors = [100 * error for error in data.errors]
    ax.axhspan(-10, 10, color=GREY, alpha=0.25, linewidth=0)
    ax.axhline(0, color=DARK, linewidth=0.8)
    ax.vlines([size for size, _ in data.measured], 0, errors, color=BLUE, linewidth=1.2)
    ax.plot([size for size, _ in data.measured], errors, "o", color=BLUE, markersize=4.5)
    _sizes(ax, data)
    most = max(15.0, *(abs(error) * 1.15 for error in errors))
    ax.set(ylabel="error (%)", ylim=(-most, most))
    ax.set_title(f"predicted over measured − 1; {accuracy(data)}", fontsize=9.5)
