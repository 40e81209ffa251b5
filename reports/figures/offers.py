"""What to buy: days against cost of each offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.figures import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, canvas, figure
from reports.formatting import dollars, tokens_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from strategies.planner.spending.purchase import Bought

SHAPES = ("o", "s", "^", "D", "v", "P")


@figure("offers")
def offers(data: tuple[Sequence[Bought], float]) -> Figure:
    """Offers that can train the model, and the tokens: a point each, with the days and dollars that 80 % of runs are in; without
    prices, GPU-hours.
    """
    bought, tokens = data
    drawn, ax = canvas(7.2, 4.4)
    colours = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
    able = [each for each in bought if each.training is not None and each.run is not None]
    priced = all(each.training is not None and each.training.usd is not None for each in able)
    right, top = list[float](), list[float]()
    for number, each in enumerate(able):
        assert each.training is not None
        assert each.run is not None
        days, whole = each.run.days, each.training
        money = whole.usd if priced and whole.usd is not None else whole.gpu_hours
        per_day = money / days.mean
        across = [[days.mean - days.low], [days.high - days.mean]]
        up = [[(days.mean - days.low) * per_day], [(days.high - days.mean) * per_day]]
        right.append(days.high)
        top.append(money + up[1][0])
        colour, shape = colours[number % len(colours)], SHAPES[number % len(SHAPES)]
        ax.errorbar([days.mean], [money], yerr=up, xerr=across, fmt=shape, color=colour, capsize=3, markersize=8)
        text = f"{each.offer.name}\n{days.mean:.3g} days" + (f", {dollars(money)}" if priced else "")
        ax.annotate(text, (days.mean, money), xytext=(10, 8), textcoords="offset points", fontsize=8.5, color=colour)
    longest, most = (max(ends, default=1.0) for ends in (right, top))
    ax.yaxis.set_major_formatter((lambda value, _: dollars(value)) if priced else "{x:,.0f}")
    ax.set(xlim=(0, 1.45 * longest), ylim=(0, 1.25 * most))
    ax.set(xlabel=f"days for {tokens_text(tokens)}, failures included", ylabel="cost" if priced else "GPU-hours")
    return drawn
