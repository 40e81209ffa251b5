"""`shardyard report`: the whole page, and its parts on request."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import shardyard
from reports.page.trust import measured
from reports.tables.published import from_file

SMALL = [
    "--model",
    "gpt2-1.5b",
    "--set",
    "model.layers=4",
    "--cluster",
    "dgx-a100",
    "--nodes",
    "2",
    "--set",
    "plan.data_parallel=zero1",
    "--set",
    "plan.global_batch=64",
]
JOB = [*SMALL, "--workers", "1"]
ALL = ["--without", "runs", "--without", "clusters", "--without", "scaling", "--without", "sensitivity", "--without", "published"]


def report(folder: Path, *options: str) -> tuple[Result, str]:
    result = CliRunner().invoke(shardyard.main, ["report", *JOB, "--output", str(folder), *options])
    page = folder / "report.html"
    return result, page.read_text(encoding="utf-8") if page.exists() else ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    result, _ = report(folder, "--also", "plan.data_parallel=zero3", "--without", "published", "--search", "--set", "plan.tp=1")
    assert result.exit_code == 0, result.output
    return folder


def test_the_parts_come_in_the_order_of_the_questions(whole: Path) -> None:
    text = (whole / "report.html").read_text(encoding="utf-8")
    shown = [
        "per step",
        'class="cards"',
        'alt="Where',
        'alt="Peak',
        'alt="One step',
        'alt="What the fullest',
        'id="beside-other-runs"',
        'id="scaling"',
        'id="other-degrees',
        'id="what-limits-the-step"',
        'id="what-is-sent"',
        'id="how-far-to-trust-it-prices',
        'id="inputs-and-provenance"',
        'id="run-it"',
        'href="trace.json.gz"',
    ]
    places = [text.index(word) for word in shown]
    assert places == sorted(places)
    assert len(text.encode()) < 1_000_000
    assert not re.search(r"https?:|@import|url\(", re.sub(r"base64,[^\"]*", "", text))


def test_the_search_simulates_every_tp_pp_and_sharding(whole: Path) -> None:
    text = (whole / "report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="sheets">(.*?)</script>', text)[1])[0]  # type: ignore[index]
    tp, pp = (data["columns"].index(name) for name in ("tp", "pp"))
    known = {(row[tp], row[pp]) for row in data["rows"]}
    assert {(1, 1), (8, 1), (1, 4)} <= known
    best = data["rows"][0]
    rate = data["columns"].index("tokens/s/GPU")
    assert best[rate] == max(row[rate] for row in data["rows"] if row[-1] == "fits")


def test_files_to_run_it_are_what_export_writes(whole: Path) -> None:
    printed = CliRunner().invoke(shardyard.main, ["export", *SMALL, "--to", "deepspeed"]).output
    assert printed.startswith((whole / "ds_config.json").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("undrawn")
def test_parts_can_be_left_out(tmp_path: Path) -> None:
    result, text = report(tmp_path / "new", *ALL)
    assert result.exit_code == 0, result.output
    for word in ("Beside other runs", 'id="scaling"', "What limits", "published training runs"):
        assert word not in text
    assert "prices of profile" in text


@pytest.mark.usefixtures("undrawn")
def test_tables_of_plans_and_of_validation_are_shown(tmp_path: Path) -> None:
    plans, rows = tmp_path / "plans.jsonl", tmp_path / "rows.csv"
    space = tmp_path / "space.yaml"
    space.write_text("{plan.tp: [1, 2], plan.pp: [1, 2]}")
    search = ["plan", *JOB, "--space", str(space), "--top", "4", "--results", str(plans)]
    assert CliRunner().invoke(shardyard.main, search).exit_code == 0
    checked = ["validate", "--published", "--source", "megatron-ci-2025", "--csv", str(rows)]
    assert CliRunner().invoke(shardyard.main, checked).exit_code == 0
    result, text = report(tmp_path / "page", *ALL, "--results", str(plans), "--validation", str(rows))
    assert result.exit_code == 0, result.output
    assert f"{len(plans.read_text().splitlines())} plans: " in text
    assert "<td>megatron-ci-2025</td><td>5</td>" in text


def test_executed_jobs_are_read_back(tmp_path: Path) -> None:
    machine = {"ranks": 2, "machine": {"machine": "2 cores"}}
    steps = [
        {"job": "ddp", "what": "step", "of": "", "predicted": 0.9, "measured": 1.0, "error": -0.1},
        {"job": "ddp", "what": "volume", "of": "dp", "predicted": 8.0, "measured": 8.0, "error": 0.0},
    ]
    file = tmp_path / "here.json"
    file.write_text(json.dumps([{"job": "ddp", "profile": "cpu", "rows": steps, "execution": machine}]))
    (row,) = from_file(file)
    assert (row.source, row.gpus, row.error) == ("here", 2, pytest.approx(-0.1))
    assert [line[:2] for line in measured([row], "here").table.rows] == [["here", 1], ["all", 1]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--results", "no.jsonl"], "--results no.jsonl: no such file"),
        (["--validation", "no.csv"], "no.csv: "),
        (["--validation", __file__], "is not a table of `shardyard validate --csv`"),
        (["--also", "plan.tp=3"], "tp·pp"),
        (["--tokens", "0"], "--tokens=0: must be greater than 0"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path: Path, options: list[str], says: str) -> None:
    result, text = report(tmp_path / "page", *ALL, *options)
    assert result.exit_code == 2
    line = result.output.strip()
    assert line.startswith("error: ")
    assert says in line
    assert "\n" not in line
    assert text == ""


@pytest.mark.usefixtures("undrawn")
def test_a_job_that_does_not_fit_has_a_page_and_exit_code_2(tmp_path: Path) -> None:
    result, text = report(tmp_path, *ALL, "--set", "plan.microbatch=512", "--set", "plan.global_batch=8192")
    assert result.exit_code == 2
    assert "out of memory on stage 0" in text


def test_other_clusters_stand_by_their_cost_and_what_does_not_fit_last(whole: Path) -> None:
    text = (whole / "report.html").read_text(encoding="utf-8")
    part = text.split("The same plan on other clusters</h2>")[1].split("</table>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in part.split("<tr>")[1:]]
    rows = [row for row in rows if row]
    assert {"dgx-a100", "dgx-h100", "hgx-b200"} <= {row[0] for row in rows}
    assert {row[1] for row in rows} == {"16"}
    steps = {row[0]: float(row[2].split()[0]) for row in rows if row[2].endswith("ms")}
    assert steps["hgx-b200"] < steps["dgx-h100"] < steps["dgx-a100"]


def test_collectives_of_the_job_are_drawn_by_size(whole: Path) -> None:
    text = (whole / "report.html").read_text(encoding="utf-8")
    assert '<h2 id="collectives">' in text
    assert (whole / "busbw_0.png").stat().st_size > 1000


@pytest.mark.usefixtures("undrawn")
def test_a_search_that_is_out_of_time_says_what_it_left(tmp_path: Path) -> None:
    _, text = report(tmp_path / "page", *ALL, "--search", "--search-seconds", "0.001")
    assert re.search(r"\d+ more plans were not simulated: the 0.001 s of --search-seconds were over", text)


@pytest.mark.usefixtures("undrawn")
def test_the_same_job_gives_the_same_page_whoever_simulates_it(tmp_path: Path) -> None:
    """But for the order in which workers are done, which must not show."""
    for folder in ("a", "b"):
        workers = ["--workers", "1" if folder == "a" else "2"]
        done = CliRunner().invoke(
            shardyard.main, ["report", *SMALL, "--without", "published", "--output", str(tmp_path / folder), *workers]
        )
        assert done.exit_code == 0, done.output
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
