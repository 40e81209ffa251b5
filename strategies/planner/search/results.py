"""The table of a search: one row per simulated job, keyed by its hash, kept whatever happens so that a search can go on later.

A row's "version" says by which prices and code it was made. JSONL grows row by row; CSV and Parquet are written whole when the
search ends or is interrupted.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from topologies.documents.syntaxes import MalformedError, parse_json
from topologies.documents.writing import WriteError, whole_file
from topologies.reading import UserError, lines_of, parse_line, shown

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".csv", ".parquet")
MOST = 128 * 2**20  # bytes of a table, some 200,000 rows
NUMBERS = ("gpus", "tokens_per_second", "tokens_per_second_per_gpu", "mfu", "memory", "bubble", "exposed")  # of a simulated plan
POSITIVE = ("step", "gpus", "tokens_per_second", "tokens_per_second_per_gpu")
FIRST = '{"hash"'  # of every row


class Results:
    """Rows by hash; `path` is where they are kept (None: nowhere)."""

    def __init__(self, path: str | None = None) -> None:
        self.path = Path(path) if path else None
        self.rows: dict[str, Row] = {}
        if self.path is None:
            return
        try:
            there = bool(self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except (OSError, ValueError) as error:  # longer than the system allows, or with a NUL
            raise UserError(f"--results {path}: {getattr(error, 'strerror', None) or error}") from None
        if self.path.suffix not in SUFFIXES or not self.path.parent.is_dir():
            raise UserError(f"--results {path}: must be a file in a folder that exists, and end in {', '.join(SUFFIXES)}")
        if there:
            self.rows = {row["hash"]: row for row in self._read()}

    def add(self, row: Row) -> None:
        """Keep a row."""
        if self.path is not None and self.path.suffix == ".jsonl":
            try:
                append_line(self.path, row)
            except OSError as error:
                raise WriteError(self.path, f"{error.strerror or error}; {len(self.rows)} rows are kept") from None
        self.rows[row["hash"]] = row

    def close(self) -> None:
        """Write what is not written yet: whole or not at all."""
        if self.path is None or self.path.suffix == ".jsonl" or not self.rows:
            return
        import pandas as pd

        frame = pd.DataFrame([row | {"changes": json.dumps(row["changes"])} for row in self.rows.values()])
        if self.path.suffix == ".parquet":
            _parquet()
        with whole_file(self.path) as file:
            if self.path.suffix == ".csv":
                frame.to_csv(file, index=False)
            else:
                frame.to_parquet(file, index=False)

    def _read(self) -> list[Row]:
        assert self.path is not None
        try:
            if self.path.suffix == ".jsonl":
                return list(self._lines(self.path))
            if self.path.stat().st_size > MOST:
                raise ValueError(f"larger than {MOST // 2**20} MiB")
            import pandas as pd

            if self.path.suffix == ".parquet":
                _parquet()
            texts = {"hash": str, "version": str}  # which may be digits alone
            frame = pd.read_csv(self.path, dtype=texts) if self.path.suffix == ".csv" else pd.read_parquet(self.path)
            if missing := sorted({"hash", "changes", "step", "error"} - set(frame.columns)):
                raise MalformedError(f"no column '{missing[0]}'")
            rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
            return [_checked({str(k): v for k, v in row.items()} | {"changes": parse_json(row["changes"])}) for row in rows]
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, OSError, OverflowError) as error:
            why = str(error) if isinstance(error, MalformedError) else type(error).__name__
            raise UserError(f"--results {self.path}: is not a table of results ({why})") from None

    def _lines(self, path: Path) -> Iterator[Row]:
        """The rows of a table of JSON; one whose end is missing is left out."""
        where = f"--results {path}: is not a table of results"
        for number, row in lines_of_json(path, where):
            try:
                yield _checked(row)
            except MalformedError as error:
                raise UserError(f"{where}: line {number}: {error}") from None


def lines_of_json(path: Path, where: str) -> Iterator[tuple[int, Row]]:
    """Numbers and rows of a file that `append_line` wrote; a last one whose end is missing is left out. Raises UserError."""
    for number, line in lines_of(path, MOST):
        line = line.rstrip("\r\n")
        if not line:
            continue
        try:
            row = parse_line(line, f"{where}: line {number}")
        except UserError:
            if not _cut_off(line):
                raise
            continue
        yield number, row


def append_line(path: Path, row: Row) -> None:
    """A line of JSON more; on a line of its own where the last one was cut off."""
    with path.open("a+b") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: others may add rows, too
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        whole = file.read(1) in (b"", b"\n")
        file.write((b"" if whole else b"\n") + json.dumps(row).encode() + b"\n")


def _cut_off(line: str) -> bool:
    """Whether it is the beginning of a row, whose writer was ended or had no room left."""
    try:
        json.loads(line)
    except (ValueError, RecursionError) as error:
        return line.startswith(FIRST[: len(line)]) and isinstance(error, json.JSONDecodeError)
    return False


def _checked(row: Any) -> Row:
    """A row that has what a search and a page need of it. Raises MalformedError that names the field."""
    for field, kinds in (("hash", str), ("changes", dict), ("error", str | None)):
        if field not in row or not isinstance(row[field], kinds):
            raise MalformedError(f"{field}={shown(row.get(field))}: is not what `shardyard plan --results` writes")
    if row["error"] is None:
        for field in ("step", *NUMBERS):
            value = row.get(field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise MalformedError(f"{field}={shown(value)}: must be a number, and not negative")
            if not value and field in POSITIVE:
                raise MalformedError(f"{field}={shown(value)}: must be greater than 0")
        if not isinstance(row.get("fits"), bool):
            raise MalformedError(f"fits={shown(row.get('fits'))}: must be true or false")
    elif row.get("step") is not None:
        raise MalformedError(f"step={shown(row['step'])} contradicts error={shown(row['error'])}")
    checked: Row = {"version": None, "step": None} | row
    return checked


def _parquet() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(
            "--results: Parquet needs the package pyarrow: pip install 'shardyard[parquet]', or name a .csv"
        ) from None
