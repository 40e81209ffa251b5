"""Pipeline schedules beside each other: how long, how idle, how much they hold. All-reduces: rounds, and what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.formatting import digits, percent
from sim.analysis.collective_rounds import Rounds
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


def all_reduces(plays: Sequence[Rounds]) -> RenderableType:
    """One row per algorithm; sizes in buffers S."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("all-reduce", "rounds", "sent at most", "received at most", "sent by all"):
        table.add_column(name, justify="left" if name == "all-reduce" else "right", no_wrap=True)
    for play in plays:
        sizes = (play.sent.max(), play.received.max(), play.sent.sum())
        table.add_row(play.name, str(len(play.rounds)), *(f"{digits(each)} S" for each in sizes))
    about = f"{plays[0].ranks} ranks, a buffer of S; at most: by one rank. A small buffer pays for rounds, a large one for bytes"
    return Group(table, Text(about, "dim"))
