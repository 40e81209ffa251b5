"""Tables of results: keyed by hash and version, resumed, cut off, on a full disk."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sim.pricing import shipped
from strategies.planner.search import results as tables
from strategies.planner.search import search as module
from strategies.planner.search.evaluate import evaluate, version_of
from strategies.planner.search.results import Results
from tests.strategies.planner.conftest import find, read
from topologies.reading import UserError


def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = str(tmp_path / "found.jsonl"), []

    def interrupted(job: Any) -> dict[str, Any]:
        asked.append(job.hash)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return evaluate(job)

    monkeypatch.setattr(module, "evaluate", interrupted)
    first = find(results=Results(file), top=4)
    assert first.interrupted == "interrupted"
    assert len(Path(file).read_text().splitlines()) == first.counts["simulated"] > 0
    second = find(results=Results(file), top=4)
    assert second.counts["known"] == first.counts["simulated"]
    assert [row["hash"] for row in second.rows] == [row["hash"] for row in find(top=4).rows]


@pytest.mark.parametrize("name", ["found.csv", "found.jsonl"])
def test_results_are_a_table_keyed_by_hash(tmp_path: Path, name: str) -> None:
    file = str(tmp_path / name)
    answer = find(results=Results(file))
    again = find(results=Results(file))
    assert again.counts["simulated"] == 0
    assert again.best is not None
    assert answer.best is not None
    assert {k: again.best[k] for k in ("hash", "step", "changes")} == {k: answer.best[k] for k in ("hash", "step", "changes")}


@pytest.mark.parametrize("name", ["found.csv", "found.jsonl"])
def test_results_by_other_prices_or_code_are_set_aside(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / name)
    answer = find(results=Results(file))
    monkeypatch.setattr(module, "version_of", lambda job: "another")
    again = find(results=Results(file))
    assert again.counts["set aside"] == again.counts["simulated"] == answer.counts["simulated"]


def test_a_version_is_of_the_profiles_contents(tmp_path: Path) -> None:
    text = (Path(shipped.__file__).parent / "profiles/h100.yaml").read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    first = version_of(read({"profile": str(file)}))
    assert first == version_of(read({"profile": str(file)}))
    assert "launch: " in text
    file.write_text(re.sub(r"^launch: .*$", "launch: 99 us", text, flags=re.MULTILINE))
    assert version_of(read({"profile": str(file)})) != first


ROW = {
    "hash": "1" * 12,
    "version": "2" * 12,
    "changes": {"plan.tp": 2},
    "step": 1.0,
    "error": None,
    "fits": True,
    "gpus": 8,
    "tokens_per_second": 8.0,
    "tokens_per_second_per_gpu": 1.0,
    "mfu": 0.4,
    "memory": 1e9,
    "bubble": 0.0,
    "exposed": 0.1,
}


def test_a_row_that_was_cut_off_is_left_out_and_the_next_one_kept(tmp_path: Path) -> None:
    """Wherever it was cut: after its first character, or behind a brace that looks like its end."""
    file = tmp_path / "found.jsonl"
    row = ROW | {"changes": {"plan.offload": {"optimizer": "cpu"}}}
    whole, third = json.dumps(row), json.dumps(row | {"hash": "3" * 12})
    for cut in range(len(third)):
        file.write_text(f"{whole}\n{third[:cut]}")
        Results(str(file)).add(row | {"hash": "4" * 12})
        assert list(Results(str(file)).rows) == ["1" * 12, "4" * 12]
    for wrong in ("and other words", third.replace("1.0", "NaN"), third.replace('"error": null', '"hash": "5"')):
        file.write_text(f"{whole}\n{wrong}\n{third}\n")
        with pytest.raises(UserError, match=r"found\.jsonl: is not a table of results: line 2"):
            Results(str(file))


def test_a_full_disk_keeps_the_rows_that_are_there(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    file = tmp_path / "found.jsonl"
    results = Results(str(file))
    results.add(ROW)
    with full_disk(300), pytest.raises(UserError, match=r"found\.jsonl: cannot be written: File too large; 1 rows are kept"):
        results.add(ROW | {"hash": "2" * 12})
    Results(str(file)).add(ROW | {"hash": "4" * 12})
    assert list(Results(str(file)).rows) == ["1" * 12, "4" * 12]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_that_is_written_at_the_end_replaces_the_old_one_whole(
    suffix: str, tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    file = tmp_path / f"found{suffix}"
    results = Results(str(file))
    results.add(ROW)
    results.close()
    old = file.read_bytes()
    results.add(ROW | {"hash": "3" * 12})
    with full_disk(50), pytest.raises(UserError, match="cannot be written: File too large"):
        results.close()
    assert [file.read_bytes()] == [file.read_bytes() for file in tmp_path.iterdir()] == [old]
    results.close()
    assert list(Results(str(file)).rows) == ["1" * 12, "3" * 12]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_of_a_table_are_the_fields_of_a_row(suffix: str, tmp_path: Path) -> None:
    """And no number of a row besides."""
    pandas = pytest.importorskip("pandas")
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / f"table{suffix}"
    results = Results(str(file))
    results.add(ROW)
    results.close()
    names = list(pandas.read_csv(file)) if suffix == ".csv" else parquet.read_schema(file).names
    assert names == list(ROW)


def test_a_parquet_file_is_read_only_where_pyarrow_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.parquet"
    file.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"Parquet needs the package pyarrow"):
        Results(str(file))


def test_a_table_of_the_largest_size_is_read_and_a_larger_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.csv"
    find(results=Results(str(file)))
    monkeypatch.setattr(tables, "MOST", 2**20)
    file.write_bytes(file.read_bytes().ljust(2**20, b"\n"))
    assert Results(str(file)).rows
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(UserError, match=r"found\.csv: is not a table of results \(ValueError\)"):
        Results(str(file))


def test_a_whole_line_that_is_no_row_is_a_mistake_and_a_cut_one_is_not(tmp_path: Path) -> None:
    row = json.dumps({"hash": "1", "changes": {}, "error": "no"})
    assert tables._cut_off(row[:9])
    assert not tables._cut_off(row)
    assert not tables._cut_off("another" + row[:9])
