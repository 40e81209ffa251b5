"""Predictions beside published measurements: tables, and as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.published.comparison import Compared, Errors, grouped
from calibration.published.reliability import left_out, widths
from reports.formatting import digits, gigabytes, percent, seconds, signed
from topologies.reading import UserError, load_text, parse_document

if TYPE_CHECKING:
    from rich.console import RenderableType

HELD = ("80 % holds", "by others")  # by others: with widths that all other sources choose
BY = ("source", "gpu", "scale", "strategy", "framework")


def overview(rows: Sequence[Compared]) -> RenderableType:
    """Error of the step time by source, GPU, scale, strategy and framework; memory; what could not be expressed."""
    from rich.console import Group
    from rich.text import Text

    every = Errors.of(rows)
    head = f"{len(rows)} published rows"
    if every:
        head += f", {every.rows} compared: step time off by {percent(every.mean)} (mean), {percent(every.median)} (median); bias "
        head += f"{signed(every.bias)}; 80 % intervals hold {percent(every.held)}"
    parts: list[RenderableType] = [Text(head, "bold"), *([_errors(rows)] if every else [])]
    return Group(*parts, *_reliability(rows), *_memory(rows), *_reasons(rows))


def _errors(rows: Sequence[Compared]) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step time by", "", "rows", "mean error", "median", "bias", "worst", *HELD, "GPUs alike", "bias"):
        table.add_column(name, justify="left" if name in ("step time by", "") else "right", no_wrap=True)
    by_others = left_out(rows)
    for by in BY:
        for number, (name, group) in enumerate(sorted(grouped(rows, by).items(), key=_order)):
            errors = Errors.of(group)
            if errors:
                table.add_row(
                    "" if number else by,
                    name,
                    str(errors.rows),
                    percent(errors.mean),
                    percent(errors.median),
                    signed(errors.bias),
                    signed(errors.worst),
                    percent(errors.held),
                    percent(by_others[name]) if by == "source" and name in by_others else "",
                    percent(errors.alike[0]),
                    signed(errors.alike[1]),
                )
        table.add_section()
    return table


def _reliability(rows: Sequence[Compared]) -> list[RenderableType]:
    """What intervals hold of sources that had no say in their width."""
    from rich.text import Text

    held = left_out(rows)
    if not held:
        return []
    chosen, mean = widths(rows), percent(sum(held.values()) / len(held))
    said = f"with widths by all other sources 80 % intervals hold {mean} of a source's rows, in the mean of sources"
    return [Text(f"{said}; by all: launches' σ {chosen.launch:.3g}, composition {chosen.composition:.3g}")]


def _order(group: tuple[str, list[Compared]]) -> tuple[int, str]:
    """Scales by size, everything else by name."""
    name, rows = group
    return (min(row.gpus for row in rows) if name == rows[0].scale else 0, name)


def _memory(rows: Sequence[Compared]) -> list[RenderableType]:
    from rich.text import Text

    lines: list[RenderableType] = []
    measured: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.memory_error is not None:
            measured.setdefault((row.source, row.memory_is), []).append(row.memory_error)
    for (source, kind), errors in measured.items():
        mean = sum(map(abs, errors)) / len(errors)
        bias = sum(errors) / len(errors)
        lines.append(Text(f"memory, {source} ({kind}): {len(errors)} rows, off by {percent(mean)}, bias {signed(bias)}"))
    known = [row for row in rows if row.fits is not None]
    out = [row for row in known if row.ran_out_of_memory]
    predicted = sum(not row.fits for row in out)
    wrong = sum(not row.fits for row in known) - predicted
    if known:
        lines.append(
            Text(f"out of memory: {predicted} of {len(out)} found; {wrong} of {len(known) - len(out)} that ran said not to fit")
        )
    return lines


def _reasons(rows: Sequence[Compared]) -> list[RenderableType]:
    from rich.text import Text

    counted = Counter((row.source, row.reason) for row in rows if row.reason)
    lines = [Text(f"  {times:3d}  {source}: {reason}") for (source, reason), times in sorted(counted.items())]
    return [Text(f"\nnot expressed: {sum(counted.values())} rows", "bold"), *lines] if lines else []


def every_row(rows: Sequence[Compared]) -> RenderableType:
    """A line per row."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "row",
        "model",
        "GPUs",
        "strategy",
        "step",
        "predicted",
        "80 % interval",
        "error",
        "TFLOP/s",
        "predicted",
        "MFU",
        "predicted",
        "memory GB",
        "predicted",
    ):
        table.add_column(name, justify="left" if name in ("row", "model", "strategy") else "right", no_wrap=True)
    for row in rows:
        if row.reason:
            continue
        table.add_row(
            row.row,
            row.model,
            str(row.gpus),
            row.strategy,
            *(seconds(value) if value else "–" for value in (row.step, row.predicted_step)),
            f"{seconds(row.low or 0)} to {seconds(row.high or 0)}",
            "–" if row.error is None else signed(row.error),
            *(digits(value / 1e12) if value else "–" for value in (row.flops, row.predicted_flops)),
            *(percent(value) if value else "–" for value in (row.mfu, row.predicted_mfu)),
            *(gigabytes(value) if value else "–" for value in (row.memory, row.predicted_memory)),
        )
    return table


def from_file(path: Path) -> list[Compared]:
    """What `shardyard validate` wrote: published rows (.csv), or executed jobs (.json). Raises UserError for another file."""
    return _from_json(path) if path.suffix == ".json" else _from_csv(path)


def _from_json(path: Path) -> list[Compared]:
    """Step times of executed jobs."""
    text = load_text(path)
    try:
        pairs = [
            (validated, row) for validated in parse_document(text, path) for row in validated["rows"] if row["what"] == "step"
        ]
        return [
            Compared(
                row["job"],
                path.stem,
                "PyTorch",
                "",
                row["job"],
                gpu=validated["execution"]["machine"]["machine"],
                gpus=validated["execution"]["ranks"],
                profile=validated["profile"],
                step=row["measured"],
                predicted_step=row["predicted"],
            )
            for validated, row in pairs
        ]
    except (KeyError, TypeError):
        raise UserError(f"{path}: is not what `shardyard validate --output` writes") from None


def _from_csv(path: Path) -> list[Compared]:
    kinds = {field.name: str(field.type) for field in fields(Compared)}
    try:
        lines = list(csv.DictReader(load_text(path).splitlines()))
        return [Compared(**{name: _value(kinds[name], text) for name, text in line.items() if name in kinds}) for line in lines]
    except (KeyError, TypeError, ValueError, csv.Error):
        raise UserError(f"{path}: is not a table of `shardyard validate --csv`") from None


def _value(kind: str, text: str) -> Any:
    """A cell as a field of that type."""
    if not text and "None" in kind:
        return None
    base = kind.split(" ")[0]
    return text == "True" if base == "bool" else {"int": int, "float": float, "str": str}[base](text)


def as_csv(rows: Sequence[Compared]) -> str:
    """A line per row, with the names of `Compared.to_dict()`."""
    text = io.StringIO()
    records = [row.to_dict() for row in rows]
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
