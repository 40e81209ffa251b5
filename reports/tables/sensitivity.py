"""Which price moves a step: a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.formatting import PRICED, bar, seconds, signed
from strategies.planner.sensitivity import PriceSwing

if TYPE_CHECKING:
    from rich.console import RenderableType


def table(name: str, step: float, swings: Sequence[PriceSwing]) -> RenderableType:
    """A row per price."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("price", "times", "step", "", "times", "step", "", "swing"):
        result.add_column(column, justify="left" if column in ("price", "swing") else "right", no_wrap=True)
    widest = max((swing.width for swing in swings), default=1.0)
    for swing in swings:
        cells = []
        for factor, value in ((1 / swing.factor, swing.low), (swing.factor, swing.high)):
            cells += [f"{factor:.2f}", seconds(value), signed(value / step - 1, 2)]
        result.add_row(PRICED.get(swing.name, swing.name), *cells, Text(bar(swing.width / widest, 20), "cyan"))
    return Group(Text(f"{name}: {seconds(step)} per step; what each price does to it", "bold"), result)
