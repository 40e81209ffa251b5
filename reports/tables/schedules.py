"""Pipeline schedules beside each other: how long, how idle, how much they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.formatting import percent
from strategies.schedules.unit_play import UnitPlay

if TYPE_CHECKING:
    from rich.console import RenderableType


def overview(plays: Sequence[UnitPlay]) -> RenderableType:
    """One row per schedule."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("schedule", "chunks", "length", "bubble", "between own passes", "idle / busy", "microbatches held, by rank"):
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    for play in plays:
        held = " ".join(f"{play.held(rank):.3g}" for rank in range(play.ranks))
        numbers = f"{play.length:.4g}", percent(play.bubble), percent(play.gaps), percent(play.overhead)
        table.add_row(play.name, str(play.chunks), *numbers, held)
    first = plays[0]
    about = (
        f"{first.ranks} ranks, {first.microbatches} microbatches; lengths in forward passes of a microbatch through a rank, with "
        "equal work; transfers take no time. gpipe and 1f1b: idle / busy = (p − 1)/m; interleaved: (p − 1)/(v·m) with v chunks"
    )
    return Group(table, Text(about, "dim"))
