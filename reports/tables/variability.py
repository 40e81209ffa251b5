"""How a step is spread: a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.formatting import percent, seconds, signed
from strategies.planner.variability import Variability

if TYPE_CHECKING:
    from rich.console import RenderableType


def table(name: str, spread: Variability, replica: int) -> RenderableType:
    """Percentiles of the step, and what is left of the ideal speed by the number of replicas. replica: GPUs of one."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    steps = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "step", "of the ideal one"):
        steps.add_column(column, justify="left" if not column else "right", no_wrap=True)
    steps.add_row("all GPUs alike", seconds(spread.ideal), "")
    steps.add_row("mean", seconds(spread.mean), signed(spread.cost, 2))
    for each, value in spread.percentiles.items():
        steps.add_row(f"p{each}", seconds(value), signed(value / spread.ideal - 1, 2))
    scaling = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("replicas", "GPUs", "speed left"):
        scaling.add_column(column, justify="right", no_wrap=True)
    for replicas, left in spread.scaling.items():
        scaling.add_row(str(replicas), str(replicas * replica), percent(left))
    what = f"GPUs vary by {percent(spread.gpus)}"
    if spread.collectives:
        what += f", collectives by {percent(spread.collectives)}"
    said = f"{name}: {seconds(spread.mean)} per step on average, {signed(spread.cost, 2)} ({what}, {spread.samples} samples)"
    return Group(Text(said, "bold"), steps, "what waiting for the slowest leaves, by data parallel replicas:", scaling)
