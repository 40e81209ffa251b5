"""A result as a card of a notebook: a title and rows of names and values, in HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

ROWS = 12  # of a table that a card shows
_BOX = "border:1px solid #8888;border-radius:6px;padding:8px 12px;display:inline-block;max-width:100%;overflow-x:auto"


def card(title: str, values: Mapping[str, str]) -> str:
    """A title over names and values."""
    rows = "".join(
        f'<tr><td style="text-align:left;opacity:.7">{escape(name)}</td><td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in values.items()
    )
    return f'<div style="{_BOX}"><b>{escape(title)}</b><table>{rows}</table></div>'


def table_card(title: str, rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> str:
    """A title over the first ROWS rows of a table."""
    names = list(columns)
    head = "".join(f'<th style="text-align:right">{escape(name)}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:right">{escape(_cell(row.get(name)))}</td>' for name in names) + "</tr>"
        for row in rows[:ROWS]
    )
    more = f"<p>… and {len(rows) - ROWS} more</p>" if len(rows) > ROWS else ""
    return f'<div style="{_BOX}"><b>{escape(title)}</b><table><tr>{head}</tr>{body}</table>{more}</div>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
