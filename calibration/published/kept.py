"""Rows that were compared, kept in a file as they are done: a run that is interrupted goes on with the others.

A line of JSON per row (JSONL), with the hash of its job and the version of prices and code, without which it counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from calibration.published import Row
from calibration.published.comparison import Compared, compared
from strategies.planner.search.evaluate import version_of
from strategies.planner.search.results import append_line, lines_of_json
from topologies.documents.writing import WriteError
from topologies.reading import UserError

Key = tuple[str, str, str]  # name of the row, hash of it and its job, version


def resumed(rows: Iterable[Row], path: Path) -> Iterator[Compared]:
    """Each row with its prediction, those of which `path` has none played and added to it, in order. Raises UserError."""
    asked = list(rows)
    keys = [_key(row) for row in asked]
    known = _read(path)
    missing = compared([row for row, key in zip(asked, keys, strict=True) if key not in known])
    for key in keys:
        result = known.get(key) if key else None
        if result is None:
            result = next(missing)
            if key:
                _keep(path, key, result)
        yield result


def _keep(path: Path, key: Key, result: Compared) -> None:
    try:
        append_line(path, {"hash": key[1], "version": key[2], "compared": asdict(result)})
    except OSError as error:
        raise WriteError(path, error.strerror or str(error)) from None


def _key(row: Row) -> Key | None:
    """None of a row that is no job."""
    try:
        job = row.job()
        known = json.dumps([job.hash, row.where, row.model, row.note, *row.measured.values()])
        return row.name, hashlib.sha256(known.encode()).hexdigest()[:12], version_of(job)
    except UserError:
        return None


def _read(path: Path) -> dict[Key, Compared]:
    """The rows of a file, which need not exist."""
    if not path.exists():
        return {}
    rows = {}
    for _, line in lines_of_json(path, f"--results {path}"):
        try:
            result = Compared(**line["compared"])
            rows[result.row, line["hash"], line["version"]] = result
        except (KeyError, TypeError):
            raise UserError(f"--results {path}: is not what `shardyard validate --published --results` writes") from None
    return rows
