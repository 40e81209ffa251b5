"""Tables in a narrow terminal have fewer columns, and no cell is broken."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from reports.tables.fitting import FittingGrid, FittingTable

HEADS = ("way", "step", "days", "cost")
ROWS = (("TP8 + ZeRO-1", "16.4 s", "181", "$1.08 M"), ("DDP", "1.90 s", "9", "$92.7 k"))


def lines(part: Any, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as caught:
        console.print(part)
    return [line.rstrip() for line in caught.get().splitlines()]


@pytest.mark.parametrize(("width", "left_out"), [(80, ""), (35, ""), (34, "days"), (29, "days"), (28, "days, cost")])
def test_columns_are_left_out_in_their_order(width: int, left_out: str) -> None:
    shown = lines(FittingTable(HEADS, ROWS, ("days", "cost"), ("way",)), width)
    said = " ".join(shown).partition("left out, as the terminal is narrow: ")[2]
    assert said == left_out
    assert all(len(line) <= width for line in shown)
    assert shown[1].split()[:4] == ["TP8", "+", "ZeRO-1", "16.4"]
    assert ("181" in shown[1], "$1.08 M" in shown[1]) == ("days" not in left_out, "cost" not in left_out)


@pytest.mark.parametrize(("width", "rows"), [(80, 2), (25, 2), (24, 2), (16, 2), (15, 4)])
def test_a_grid_has_as_many_columns_as_there_is_room_for(width: int, rows: int) -> None:
    """Four pairs, of which two are side by side in 16 columns and three in 25."""
    pairs = [(Text("abc"), Text("12")) for _ in range(4)]
    assert len(lines(FittingGrid(pairs), width)) == rows
