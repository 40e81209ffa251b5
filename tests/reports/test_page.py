"""The report: complete, self-contained, safe, repeatable."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from reports import page
from reports.page import FILES, write_report
from sim.summary import summarise
from sim.timeline import Timeline
from topologies.reading import UserError


class Links(HTMLParser):
    """Everything that a browser would fetch or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [(tag, value or "") for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


@pytest.fixture(scope="session")
def folder(timeline: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("report") / "new"
    job = {"model": "<script>alert(1)</script>", "cluster": "1 × DGX & co", "plan": {"tp": 2}, "command": 'shardyard "x"'}
    assert write_report(where, timeline, summarise(timeline), job) == [where / name for name in FILES]
    return where


def test_everything_is_there_and_nothing_else(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert (folder / "report.html").stat().st_size < 1_000_000


def test_the_page_fetches_nothing_and_runs_nothing(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    links = Links(text)
    assert "script" not in links.tags
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[^\"]*", "", text))
    for tag, where in links.found:
        assert where.startswith("data:image/png;base64,") if tag == "img" else (folder / where).is_file()


def test_what_the_user_wrote_is_escaped(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "<script>" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 2
    assert "1 × DGX &amp; co" in text


def test_the_page_says_verdict_figures_volumes_and_provenance(folder: Path, timeline: Timeline) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    words = ["per step", 'class="cards"', 'alt="Where', 'alt="Peak', 'alt="One step', "in Ψ", "Inputs and", "trace.json.gz"]
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert f"profile {timeline.pricing.prices.profile.name}" in text


def test_tables_beside_the_page_are_complete(folder: Path, timeline: Timeline) -> None:
    with open(folder / "timeline.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(1 for _ in timeline.rows())
    assert max(float(row["end"]) for row in rows) == timeline.step
    data: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert data["step_seconds"] == timeline.step
    assert data["job"]["plan"] == {"tp": 2}
    assert set(data) == {*summarise(timeline).to_dict(), "job"}


def test_the_same_inputs_give_the_same_bytes(timeline: Timeline, tmp_path: Path) -> None:
    summary = summarise(timeline)
    for name in ("a", "b"):
        write_report(tmp_path / name, timeline, summary, {"model": "m"})
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in FILES)


def test_a_failure_leaves_the_old_report_whole(timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summarise(timeline)
    before = {path.name: path.read_bytes() for path in write_report(tmp_path, timeline, summary, {"model": "old"})}

    def fail(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(page, "page", fail)
    with pytest.raises(KeyboardInterrupt):
        write_report(tmp_path, timeline, summary, {"model": "new"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_is_one_line(timeline: Timeline, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file: the report cannot be written: File exists$"):
        write_report(tmp_path / "file", timeline, summarise(timeline), {})
