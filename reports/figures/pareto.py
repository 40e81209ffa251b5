"""What should I buy: time against cost, and against memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from reports.figures import BLUE, DARK, GREY, ORANGE, figure, log_ticks
from reports.formatting import count, digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 10  # labels of one panel at most
LETTER = 0.075  # inches of a label's letter
NEAR = 0.1  # of the days: their axis is no narrower, so that plans that tie do not seem to be apart
FAR = 4.0  # times as many days as the least, from which on their axis is logarithmic


class Plan(NamedTuple):
    """A plan that fits: days to train `Front.tokens` tokens, what that costs in `Front.money`, bytes at its peak."""

    name: str
    days: float
    spent: float
    memory: float
    front: bool  # no other is better in one and at least as good in the others


class Front(NamedTuple):
    """Plans and what their numbers count."""

    plans: Sequence[Plan]
    tokens: str  # "10⁹ tokens"
    money: str  # "$" or "GPU-hours"
    capacity: float


@figure("pareto")
def pareto(data: Front) -> Figure:
    """Time against cost (where plans have different numbers of GPUs or prices) and against memory; the frontier is named."""
    from matplotlib.figure import Figure

    ratio = [plan.spent / plan.days for plan in data.plans]
    apart = max(ratio) > 1.0001 * min(ratio)  # on the same GPUs cost is time
    drawn = Figure(figsize=(12, 4.4) if apart else (9, 4.2), layout="constrained")
    panels = drawn.subplots(1, 2, squeeze=False)[0] if apart else [drawn.subplots()]
    letter = LETTER * len(panels) / (0.9 * drawn.get_figwidth())
    if apart:
        _panel(panels[0], data.plans, [plan.spent for plan in data.plans], f"{data.money} for {data.tokens}", letter)
    _panel(panels[-1], data.plans, [plan.memory / 1e9 for plan in data.plans], "peak memory of the fullest GPU (GB)", letter)
    for ax in panels:
        ax.set_xlabel(f"days for {data.tokens}")
    panels[0].set_title(f"{len(data.plans):,} plans that fit; blue: nothing is better in time, cost and memory at once")
    return drawn


def _panel(ax: Axes, plans: Sequence[Plan], heights: Sequence[float], label: str, letter: float) -> None:
    """Dots, the frontier of the two numbers as a line, the names of those on it."""
    ax.scatter([plan.days for plan in plans], heights, s=12, color=GREY, linewidths=0, zorder=1)
    best: list[tuple[float, float, str]] = []
    on = sorted((plan.days, height, plan.name) for plan, height in zip(plans, heights, strict=True) if plan.front)
    for days, height, name in on:
        if not best or height < best[-1][1]:
            best.append((days, height, name))
    ax.scatter([x for x, _, _ in on], [y for _, y, _ in on], s=26, color=BLUE, zorder=2)
    ax.step([x for x, _, _ in best], [y for _, y, _ in best], where="post", color=BLUE, linewidth=1.2, zorder=2)
    ax.scatter(*best[0][:2], s=130, marker="*", color=ORANGE, edgecolors=DARK, linewidths=0.6, zorder=3)
    ax.set(ylabel=label, ylim=(0, 1.12 * max(heights)))
    low, high = min(plan.days for plan in plans), max(plan.days for plan in plans)
    if high > FAR * low:
        ax.set_xscale("log")
        margin = (high / low) ** 0.03
        ax.set_xlim(low / margin, high * margin)
        log_ticks(ax.xaxis, low, high, digits)
    else:
        wide = max(high - low, NEAR * low)  # what is nearly alike stays so
        ax.set_xlim((low + high - 1.06 * wide) / 2, (low + high + 1.06 * wide) / 2)
    if max(heights) > 1e4:  # dollars
        ax.yaxis.set_major_formatter(lambda value, _: count(value) if value else "0")
    _named(ax, best, letter)


def _named(ax: Axes, best: Sequence[tuple[float, float, str]], letter: float) -> None:
    """Names where there is room for them: from the left, none over another. letter: its width, as a part of the panel's."""
    there: list[tuple[float, float, float]] = []  # from, to, height
    for days, height, name in best:
        x, y = ax.transAxes.inverted().transform(ax.transData.transform((days, height)))
        side = "left" if x < 0.6 else "right"
        begin, end = (x, x + letter * len(name)) if side == "left" else (x - letter * len(name), x)
        if len(there) == NAMED or any(abs(y - at) < 0.055 and begin < last and first < end for first, last, at in there):
            continue
        there.append((begin, end, y))
        ax.annotate(
            name,
            (days, height),
            (7 if side == "left" else -7, 5),
            textcoords="offset points",
            ha=side,
            fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8},
            zorder=4,
        )
