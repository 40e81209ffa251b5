"""A schedule as rows of cells, for people and as the CSV of PyTorch's pipelining."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from strategies.schedules import actions, schedules
from topologies.documents.writing import write_whole
from topologies.reading import UserError

CELLS = 200_000  # passes of a schedule that is written out


def cells(name: str, pp: int | None, microbatches: int | None, chunks: int | None) -> tuple[list[list[str]], tuple[str, ...]]:
    """(rows of a schedule as cells, notes). A file says its own sizes; others are asked for. Raises UserError."""
    schedule = schedules[name]
    ranks = _size("pp", pp, schedule.ranks, name)
    count = _size("microbatches", microbatches, schedule.microbatches, name)
    if schedule.chunks is None and chunks == 1:
        raise UserError(f"--chunks 1: schedule {name} takes 2 or more")
    virtual = _size("chunks", chunks or (schedule.chunks or 2), schedule.chunks, name)
    if ranks * count * virtual > CELLS:
        raise UserError(f"schedule {name}: pp·microbatches·chunks = {ranks}·{count}·{virtual} are more than {CELLS:,} passes")
    rows = []
    for rank in range(ranks):
        order = actions(name, rank, ranks, count, virtual)
        each = [f"{schedule.stage(rank, ranks, action.chunk)}{action.kind}{action.microbatch}" for action in order]
        rows.append(
            [
                f"({cell};{each[number + 1]})OVERLAP_F_B" if order[number].beside else cell
                for number, cell in enumerate(each)
                if not (number and order[number - 1].beside)
            ]
        )
    return rows, schedule.notes


def _size(option: str, asked: int | None, written: int | None, name: str) -> int:
    if asked is None and written is None:
        raise UserError(f"--{option}: is required for schedule {name}")
    if written is not None and asked not in (None, written):
        raise UserError(f"--{option} {asked}: schedule {name} is for {written}")
    return asked or written or 1


def write_schedule(rows: Sequence[Sequence[str]], path: Path, name: str = "") -> Path:
    """Write the cells of a schedule as CSV; the path. Raises UserError for what PyTorch's form cannot say."""
    if name and schedules[name].copies > 1:
        raise UserError(f"--csv: schedule {name} has two copies of each stage, for which PyTorch's form has no words")
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_whole(path, text.getvalue())
    return path


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """The cells in columns, a line per rank."""
    width = max(len(cell) for row in rows for cell in row)
    digits = len(str(len(rows) - 1))
    return "\n".join(
        f"rank {rank:<{digits}}  " + " ".join(f"{cell:<{width}}" for cell in row).rstrip() for rank, row in enumerate(rows)
    )
