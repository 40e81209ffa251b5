"""The report: complete, self-contained, safe, repeatable."""

from __future__ import annotations

import base64
import csv
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from reports.figures.breakdown import breakdown
from reports.figures.comparison import comparison
from reports.page.page import DATA, Picture, Report, Section, Sheet, _card, write_report
from reports.page.rendering import row
from sim.analysis.summary import summarise
from sim.timeline import Timeline
from topologies.reading import UserError

PICTURES = ("breakdown.png", "memory.png", "gantt.png", "memory_over_time.png", "traffic.png")


class Links(HTMLParser):
    """Everything that a browser would fetch or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.targets += [(tag, value or "") for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


@pytest.fixture(scope="session")
def folder(timeline: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("report") / "new"
    job = {"model": "<script>alert(1)</script>", "cluster": "1 × DGX & co", "plan": {"tp": 2}, "command": 'shardyard "x"'}
    written = write_report(where, Report(timeline, summarise(timeline), job))
    assert [path.name for path in written] == ["report.html", *PICTURES, *DATA]
    return where


def test_everything_is_there_and_nothing_else(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(("report.html", *PICTURES, *DATA))
    assert (folder / "report.html").stat().st_size < 1_000_000


def test_the_page_fetches_nothing(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    links = Links(text)
    assert "default-src 'none'" in text  # nor would a browser let it
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[^\"]*", "", text))
    for tag, where in links.targets:
        if where.startswith("#"):
            continue
        assert where.startswith("data:image/png;base64,") if tag == "img" else (folder / where).is_file()


def test_colours_are_explained_once(folder: Path, timeline: Timeline) -> None:
    """By the page's legend: in its figures there is none, in the files beside it there is."""
    text = (folder / "report.html").read_text(encoding="utf-8")
    key = text.partition('<section class="key"')[2].partition("</section>")[0]
    summary = summarise(timeline)
    assert {"forward", "backward", "tp communication"} <= set(re.findall(r"</i>([^<]*)<", key))
    for kind, size in summary.worst.kinds.items():
        assert (f"</i>{kind}<" in key) == (size > 0)
    assert 'class="legend"' not in text
    shown = [base64.b64decode(picture) for picture in re.findall(r"base64,([^\"]*)", text)]
    assert [(folder / name).read_bytes() in shown for name in PICTURES] == [False, False, False, False, True]


def test_a_figure_without_its_legend_is_smaller_by_it(timeline: Timeline, tmp_path: Path) -> None:
    data = {"a": summarise(timeline)}
    with (
        Image.open(breakdown(data, tmp_path / "with.png")) as image,
        Image.open(breakdown(data, tmp_path / "without.png", legend=False)) as other,
    ):
        assert other.width == image.width
        assert image.height - 100 < other.height < image.height - 20


def test_what_the_user_wrote_is_escaped(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 2
    assert "1 × DGX &amp; co" in text


def test_the_page_says_verdict_figures_volumes_and_provenance(folder: Path, timeline: Timeline) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    words = [
        "per step",
        'class="cards"',
        'alt="Where',
        'alt="Peak',
        'alt="One step',
        "in Ψ",
        "<summary>Inputs and",
        "trace.json.gz",
    ]
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert f"profile {timeline.op_costs.prices.profile.name}" in text


def test_the_contents_lead_to_every_heading_in_order(large: Path) -> None:
    text = large.read_text(encoding="utf-8")
    names = re.findall(r'<li><a href="#([^"]+)">', text)
    assert names == re.findall(r'<(?:h2|details) id="([^"]+)"', text)
    assert len(set(names)) == len(names) > 6


@pytest.mark.parametrize(
    ("value", "number", "below"),
    [
        ("61.8 of 84.9 GB", "61.8 GB", "of 84.9 GB"),
        ("16.4 s (14.8 s–18.1 s)", "16.4 s", "14.8 s–18.1 s"),
        ("$154 k at $3.90/h", "$154 k", "at $3.90/h"),
        ("450 k", "450 k", ""),
    ],
)
def test_a_card_has_its_number_and_the_rest_below(value: str, number: str, below: str) -> None:
    assert _card("step", value)[1:3] == (number, below)


def test_rows_of_cards_are_filled(large: Path) -> None:
    """As many in each row as can be: never one alone below full rows."""
    text = large.read_text(encoding="utf-8")
    assert (text.count('<div class="card"'), "--row: 5" in text) == (10, True)
    assert [row(cards) for cards in (5, 6, 7, 11, 13)] == [5, 6, 4, 6, 5]


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
        write_report(tmp_path / name, Report(timeline, summary, {"model": "m"}), ("png", "svg"))
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    assert (tmp_path / "a/gantt.svg").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_failure_leaves_the_old_report_whole(timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summarise(timeline)
    before = {path.name: path.read_bytes() for path in write_report(tmp_path, Report(timeline, summary, {"model": "old"}))}

    def fail(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("reports.page.page.page", fail)
    with pytest.raises(KeyboardInterrupt):
        write_report(tmp_path, Report(timeline, summary, {"model": "new"}))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_is_one_line(timeline: Timeline, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file: the report cannot be written: File exists$"):
        write_report(tmp_path / "file", Report(timeline, summarise(timeline), {}))


SHEET = Sheet(
    ("plan", "step", "fits"), [*([f"tp={n}", n % 7 + 0.25, n % 2 == 0] for n in range(1000)), ["</script><b>", None, True]]
)


@pytest.fixture(scope="session")
def large(timeline: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with runs side by side and a table of 1,001 plans."""
    runs = {"one": summarise(timeline), "other": summarise(timeline)}
    section = Section("Plans", (Picture("runs", "Runs", comparison, runs),), ("1,001 plans",), SHEET)
    report = Report(timeline, summarise(timeline), {"model": "m"}, runs=runs, sections=(section,))
    return write_report(tmp_path_factory.mktemp("large"), report)[0]


def test_a_page_of_a_thousand_plans_stays_below_a_megabyte(large: Path) -> None:
    text = large.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    assert "</script><b>" not in text
    assert text.count("<tr><td>tp=") == 20  # without scripts the first can be read
    assert not re.search(r"https?:|@import|url\(", re.sub(r"base64,[^\"]*", "", text))


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def browse(page: Path, state: str = "") -> tuple[list[list[str]], str]:
    """What a real browser makes of the page: the rows of the table of plans, and what it complained of."""
    profile = page.parent / "profile"
    asked = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=5000",
        "--dump-dom",
        f"{page.as_uri()}{state}",
    ]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    body = done.stdout.split('class="sheet"')[1].split("<tbody>")[1].split("</tbody>")[0]
    rows = [re.findall(r"<td>(.*?)</td>", line) for line in body.split("<tr>")[1:]]
    return rows, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_sorts_and_filters_without_complaint(large: Path) -> None:
    every, complaints = browse(large)
    assert (len(every), complaints) == (1001, "")
    assert every[-1] == ["&lt;/script&gt;&lt;b&gt;", "", "true"]
    rows, complaints = browse(large, "#sort=step&order=descending&filter=fits%3Dtrue+step%3E3")
    assert complaints == ""
    assert len(rows) == sum(step is not None and step > 3 and fits for _, step, fits in SHEET.rows)
    steps = [float(row[1]) for row in rows]
    assert steps == sorted(steps, reverse=True)
    assert [row[0] for row in browse(large, "#filter=tp%3D77")[0]] == [f"tp={n}" for n in (77, *range(770, 780))]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_keyboard_sorts(large: Path) -> None:
    """Each column's name can be reached by Tab; Enter and the space bar sort by it."""
    press = "for (const key of ['Enter', ' ']) head.dispatchEvent(new KeyboardEvent('keydown', {key}));"
    script = f"<script>const head = document.querySelectorAll('.sheet th')[1]; head.focus(); {press}</script></body>"
    pressed = large.with_name("pressed.html")
    pressed.write_text(large.read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8")
    rows, complaints = browse(pressed)
    steps = [float(row[1]) for row in rows if row[1]]
    assert complaints == ""
    assert steps == sorted(steps, reverse=True)  # twice: descending
    assert rows[-1][1] == ""  # what has no number comes last
