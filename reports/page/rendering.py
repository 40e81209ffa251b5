"""Pages from templates, with their figures inside."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FULL = 1300  # dots of a figure that takes the whole width
ROW = 6  # cards beside each other at most
KEYLESS = ".keyless.png"  # ends of pictures without a legend, which a page with one of its own shows
TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, pictures: Iterable[str], folder: Path, **values: Any) -> str:
    """A page by a template, with the pictures of these names that lie in `folder` inside it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"shown": _cell, "anchor": _anchor, "row": row}
    files = {name: _file(folder, name) for name in pictures}
    embedded = {name: _embedded(file) for name, file in files.items()}
    full = {name for name, file in files.items() if _width(file) > FULL}
    return environment.get_template(template).render(pictures=embedded, full=full, **values)


def _file(folder: Path, name: str) -> Path:
    keyless = folder / f"{name}{KEYLESS}"
    return keyless if keyless.exists() else folder / f"{name}.png"


def _cell(value: object) -> str:
    """A cell of a table, as the page's script writes it too."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}" if isinstance(value, float) else str(value)
    return str(value)


def _anchor(title: str) -> str:
    """A heading's name in addresses."""
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def row(cards: int) -> int:
    """Cards in a row, so that rows are filled evenly."""
    return -(-cards // -(-cards // ROW))


def _embedded(path: Path) -> str:
    """A picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _width(path: Path) -> int:
    """Dots of a PNG, whose header has them."""
    return int.from_bytes(path.read_bytes()[16:20], "big")
