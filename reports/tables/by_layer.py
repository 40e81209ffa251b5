"""Memory by layer on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.formatting import count, digits, gigabytes
from strategies.memory_by_layer import ByLayer, PartMemory

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

COLUMNS = ("part", "number", "parameters", "weights", "gradients", "optimizer", "activations", "recomputed")
STATES = ("parameter", "gradient", "optimizer")


def tables(memory: ByLayer) -> RenderableType:
    """Parts, the tensors of a layer, and the textbook's counts."""
    from rich.console import Group
    from rich.text import Text

    tunes = any(each.trained < each.parameters for each in memory.parts)
    parts = _table(*columns(tunes))
    for each in memory.parts:
        parts.add_row(*row(each, tunes))
    held = f"{digits(memory.microbatches)} × one microbatch's activations at its peak"
    lines: list[RenderableType] = [
        Text(f"one part on a rank of stage {memory.stage}, in GB; the rank holds {held}", "bold"),
        parts,
    ]
    layer = next((each for each in memory.parts if each.tensors), None)
    if layer is not None:
        kept = ", ".join(f"{name} {gigabytes(size)}" for name, size in sorted(layer.tensors.items(), key=lambda item: -item[1]))
        lines.append(Text(f"{layer.name.partition(',')[0]} keeps, in GB: {kept}"))
    states = _table("bytes per parameter", "textbook", "this plan", "held at the peak", "why")
    for state in memory.states:
        cells = (number(value) for value in (state.textbook, state.planned, state.held))
        states.add_row(state.kind, *cells, state.why)
    totals = [sum(getattr(state, field) or 0 for state in memory.states) for field in ("textbook", "planned", "held")]
    states.add_row("together", *map(digits, totals), "")
    rules = _table("activations of a microbatch by", "GB")
    for rule in memory.activations:
        rules.add_row(rule.rule, gigabytes(rule.bytes))
    return Group("", *lines, "", states, rules, *(Text(f"differs: {text}") for text in memory.differences))


def columns(tunes: bool) -> list[str]:
    """Headings; tunes: not all parameters are trained."""
    return [*COLUMNS[:3], *(["trained"] if tunes else []), *COLUMNS[3:]]


def row(part: PartMemory, tunes: bool = False) -> list[str]:
    """Cells of a part."""
    sizes = [part.states.get(kind, 0.0) for kind in STATES]
    numbers = [count(part.parameters), *([count(part.trained)] if tunes else [])]
    return [part.name, str(part.count), *numbers, *map(gigabytes, (*sizes, part.activations, part.recomputed))]


def number(value: float | None) -> str:
    """A number, or nothing."""
    return "" if value is None else digits(value)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        left = column in ("part", "bytes per parameter", "why") or column.startswith("activations of")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "why")
    return table
