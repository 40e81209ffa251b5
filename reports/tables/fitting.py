"""Tables and grids that fit the terminal, however narrow: with fewer columns, never with numbers that are cut or broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

UNLIMITED = 1000  # columns


class FittingTable:
    """Rows below `heads`. What is in `least` is left out where the terminal is too narrow, one after the other, and that is said;
    columns of `left` are to the left.
    """

    def __init__(self, heads: Sequence[str], rows: Sequence[Sequence[str]], least: Sequence[str], left: Sequence[str]) -> None:
        self.heads, self.rows, self.least, self.left = heads, rows, least, left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        gone: list[str] = []
        for name in (None, *self.least):
            gone += [name] if name is not None else []
            table = self._table(gone)
            if _columns(console, options, table) <= options.max_width:
                break
        yield table
        if gone:
            yield Text(f"left out, as the terminal is narrow: {', '.join(gone)}", "dim")

    def _table(self, gone: Sequence[str]) -> Table:
        table, kept = Table(box=None, pad_edge=False), [head not in gone for head in self.heads]
        for head, there in zip(self.heads, kept, strict=True):
            if there:
                table.add_column(head, justify="left" if head in self.left else "right", no_wrap=head not in self.left)
        for row in self.rows:
            table.add_row(*(cell for cell, there in zip(row, kept, strict=True) if there))
        return table


class FittingGrid:
    """Labels, each with its value, in up to three columns."""

    def __init__(self, pairs: Sequence[tuple[Text, Text]]) -> None:
        self.pairs = pairs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        for columns in (3, 2, 1):
            grid = Table.grid(padding=(0, 2))
            for start in range(0, len(self.pairs), columns):
                grid.add_row(*chain.from_iterable(self.pairs[start : start + columns]))
            if _columns(console, options, grid) <= options.max_width:
                break
        yield grid


def _columns(console: Console, options: ConsoleOptions, table: Table) -> int:
    """Of the terminal, that a table takes whose cells are not broken."""
    return Measurement.get(console, options.update(width=UNLIMITED), table).maximum
