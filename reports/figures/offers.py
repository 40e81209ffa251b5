"""What to buy: days and cost of each offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.figures import BLUE, DARK, ORANGE, figure
from reports.formatting import dollars, tokens_text, unit_of_job

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from strategies.planner.spending.purchase import Bought


@figure("offers")
def offers(data: tuple[Sequence[Bought], float]) -> Figure:
    """Offers that can train the model, and the tokens: bars of days and of dollars (without prices: GPU-hours), with what 80 % of
    runs are in.
    """
    from matplotlib.figure import Figure

    bought, tokens = data
    unit = unit_of_job(bought[0].offer.job) if bought else "tokens"
    able = [each for each in bought if each.training is not None and each.run is not None]
    priced = all(each.training is not None and each.training.usd is not None for each in able)
    drawn = Figure(figsize=(10, 1.3 + 0.55 * max(1, len(able))), layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    days, spread, money = list[float](), list[tuple[float, float]](), list[float]()
    for each in able:
        assert each.training is not None
        assert each.run is not None
        days.append(each.run.days.mean)
        spread.append((each.run.days.low, each.run.days.high))
        money.append(each.training.usd if priced and each.training.usd is not None else each.training.gpu_hours)
    shares = [(low / mean, high / mean) for mean, (low, high) in zip(days, spread, strict=True)]
    _bars(left, days, shares, BLUE, [f"{day:.3g} days" for day in days])
    _bars(right, money, shares, ORANGE, [dollars(each) if priced else f"{each:,.0f}" for each in money])
    left.set_yticks(range(len(able)), [each.offer.name for each in able])
    left.set_ylim(len(able) - 0.5, -0.5)
    left.set(title="Time", xlabel=f"days for {tokens_text(tokens, unit)}, failures included")
    right.set(title="Cost", xlabel="cost (dollars)" if priced else "GPU-hours")
    if priced:
        right.xaxis.set_major_formatter(lambda value, _: dollars(value))
    right.locator_params(axis="x", nbins=6)
    return drawn


def _bars(ax: Axes, sizes: Sequence[float], shares: Sequence[tuple[float, float]], colour: str, labels: Sequence[str]) -> None:
    """A bar each with its interval, given as parts of its length, and a label behind it; the shortest in full colour."""
    for y, (size, (low, high), label) in enumerate(zip(sizes, shares, labels, strict=True)):
        across = [[size * (1 - low)], [size * (high - 1)]]
        ax.barh(y, size, height=0.6, color=colour, alpha=1.0 if size == min(sizes) else 0.45)
        ax.errorbar([size], [y], xerr=across, color=DARK, capsize=3, linewidth=1)
        ax.text(size * high, y, f"  {label}", va="center", fontsize=9)
    ax.set_xlim(0, 1.3 * max((size * high for size, (_, high) in zip(sizes, shares, strict=True)), default=1.0))
    ax.tick_params(axis="y", length=0)
