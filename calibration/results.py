"""The table of a search: one row per simulated job, keyed by its hash, kept whatever happens so that a search can go on later.

A row's "version" says by which prices and code it was made. JSONL grows row by row; CSV and Parquet are written whole when the
search ends or is interrupted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from topologies.reading import UserError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".csv", ".parquet")


class Results:
    """Rows by hash; `path` is where they are kept (None: nowhere)."""

    def __init__(self, path: str | None = None) -> None:
        self.path = Path(path) if path else None
        self.rows: dict[str, Row] = {}
        if self.path is None:
            return
        if self.path.suffix not in SUFFIXES or not self.path.parent.is_dir():
            raise UserError(f"--results {path}: must be a file in a folder that exists, and end in {', '.join(SUFFIXES)}")
        if self.path.exists():
            self.rows = {row["hash"]: row for row in self._read()}

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows[row["hash"]] = row
        if self.path is not None and self.path.suffix == ".jsonl":
            with self.path.open("a+b") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                whole = file.read(1) in (b"", b"\n")  # otherwise the last row was cut off
                file.write(b"" if whole else b"\n")
                file.write(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        """Write what is not written yet: whole or not at all."""
        if self.path is None or self.path.suffix == ".jsonl" or not self.rows:
            return
        import pandas as pd

        frame = pd.DataFrame([row | {"changes": json.dumps(row["changes"])} for row in self.rows.values()])
        new = self.path.with_name(f".{self.path.name}.new")
        if self.path.suffix == ".csv":
            frame.to_csv(new, index=False)
        else:
            _parquet()
            frame.to_parquet(new, index=False)
        os.replace(new, self.path)

    def _read(self) -> list[Row]:
        assert self.path is not None
        try:
            if self.path.suffix == ".jsonl":
                lines = self.path.read_text(encoding="utf-8").splitlines()
                return [_checked(json.loads(line)) for line in lines if line and not _cut_off(line)]
            import pandas as pd

            if self.path.suffix == ".parquet":
                _parquet()
            texts = {"hash": str, "version": str}  # which may be digits alone
            frame = pd.read_csv(self.path, dtype=texts) if self.path.suffix == ".csv" else pd.read_parquet(self.path)
            rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
            return [_checked({str(k): v for k, v in row.items()} | {"changes": json.loads(row["changes"])}) for row in rows]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(f"--results {self.path}: is not a table of results ({type(error).__name__})") from None


def _cut_off(line: str) -> bool:
    """Whether a row's end is missing."""
    return line.startswith('{"hash"') and not line.endswith("}")


def _checked(row: Any) -> Row:
    if not isinstance(row, dict) or not {"hash", "changes", "step", "error"} <= row.keys():
        raise ValueError("no result")
    return {"version": None} | row


def _parquet() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(
            "--results: Parquet needs the package pyarrow: pip install 'shardyard[parquet]', or name a .csv"
        ) from None
