"""Rows that were compared are kept, and played again only where their job, their measurement or the code has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from calibration.published import Row, kept, published
from calibration.published.comparison import Compared, compare, compared
from topologies.reading import UserError

SMALL = ("vtrain-2024/0014", "vtrain-2024/0094")
ROWS = [row for row in published(("vtrain-2024", "nemo-longseq-2024")) if row.name in (*SMALL, "nemo-longseq-2024/0001")]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of rows as they are played."""
    names: list[str] = []

    def noticed(rows: Sequence[Row]):
        names.extend(row.name for row in rows)
        return compared(rows)

    monkeypatch.setattr(kept, "compared", noticed)
    return names


def test_rows_that_are_kept_are_not_played_again(tmp_path: Path, played: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    first = list(kept.resumed(ROWS[:2], path))
    assert first == [compare(row) for row in ROWS[:2]]
    assert list(kept.resumed(ROWS, path))[:2] == first
    assert played == [row.name for row in ROWS]
    played.clear()
    path.write_text(path.read_text()[:-40])  # ended while it wrote the last row
    assert list(kept.resumed(ROWS[:2], path)) == first
    assert played == [ROWS[1].name]


def test_what_was_measured_otherwise_counts_anew(tmp_path: Path, played: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    list(kept.resumed(ROWS[:1], path))
    longer = replace(ROWS[0], measured={**ROWS[0].measured, "step": 1e3})
    again: Compared = next(kept.resumed([longer], path))
    assert again.step == 1e3
    assert played == [ROWS[0].name] * 2


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"hash": "0", "version": "0", "compared": {"row": "a"}}\n')
    with pytest.raises(UserError, match=r"is not what `shardyard validate --published --results` writes"):
        list(kept.resumed(ROWS[:1], path))
