"""Which price moves a step: a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.formatting import PRICED, bar, seconds, signed
from strategies.planner.sensitivity import Effect

if TYPE_CHECKING:
    from rich.console import RenderableType


def table(name: str, step: float, effects: Sequence[Effect]) -> RenderableType:
    """A row per price."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("price", "times", "step", "", "times", "step", "", "swing"):
        result.add_column(column, justify="left" if column in ("price", "swing") else "right", no_wrap=True)
    widest = max((effect.swing for effect in effects), default=1.0)
    for effect in effects:
        cells = []
        for factor, value in ((1 / effect.factor, effect.low), (effect.factor, effect.high)):
            cells += [f"{factor:.2f}", seconds(value), signed(value / step - 1, 2)]
        result.add_row(PRICED.get(effect.name, effect.name), *cells, Text(bar(effect.swing / widest, 20), "cyan"))
    return Group(Text(f"{name}: {seconds(step)} per step; what each price does to it", "bold"), result)
