"""What published steps consist of beside what they are predicted to: tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calibration.published.components import PARTS, Components
from reports.formatting import percent, seconds, signed

if TYPE_CHECKING:
    from rich.console import RenderableType


def overview(every: Sequence[Components]) -> RenderableType:
    """A row for each part of each source's steps: its errors over the sets of rows that tell it apart."""
    from rich.text import Text

    rows, sources = [], list(dict.fromkeys(each.source for each in every))
    for source in sources:
        errors = [each.errors() for each in every if each.source == source]
        for number, part in enumerate(PARTS):
            known = [error[part] for error in errors if part in error]
            if known:
                mean, bias = sum(map(abs, known)) / len(known), sum(known) / len(known)
                rows.append(
                    ("" if number else source, part, str(len(known)), percent(mean), signed(bias), signed(max(known, key=abs)))
                )
    title = Text("\nparts of a step, where rows differ in layers and microbatches only", "bold")
    return _table(title, ("source", "part", "sets of rows", "mean error", "bias", "worst"), rows)


def every_set(every: Sequence[Components]) -> RenderableType:
    """A row for each set: published and predicted seconds of each part."""
    from rich.text import Text

    rows = []
    for each in every:
        pairs = zip(each.published, each.predicted, strict=True)
        rows.append((each.source, each.name, str(each.rows), *(seconds(value) for pair in pairs for value in pair)))
    columns = [column for part in PARTS for column in (part, "predicted")]
    return _table(Text("\nparts of a step", "bold"), ("source", "rows with", "rows", *columns), rows)


def _table(title: RenderableType, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("source", "part", "rows with") else "right")
    for row in rows:
        table.add_row(*row)
    return Group(title, table)
