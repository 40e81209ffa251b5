"""What `validate` and `sensitivity` show."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console, RenderableType

import shardyard
from calibration.published.comparison import Compared
from reports.figures.published import stated_and_held
from reports.tables.published import as_csv, overview
from reports.tables.sensitivity import table
from strategies.planner.sensitivity import PriceSwing

JOB = str(Path(__file__).parents[2] / "examples" / "llama-3.1-70b.yaml")


def row(name: str, step: float, predicted: float, **more: object) -> Compared:
    known = {"gpu": "a100", "gpus": 8, "strategy": "tp", "low": 0.9 * predicted, "high": 1.1 * predicted, "fits": True}
    return Compared(f"x/{name}", "x", "F", "t", "m", step=step, predicted_step=predicted, **known | more)  # type: ignore[arg-type]


ROWS = [
    row("1", 1.0, 1.05),
    row("2", 1.0, 0.8, gpus=512, memory=10e9, predicted_memory=9e9, memory_is="device"),
    Compared("x/3", "x", "F", "t", "m", reason="fp8 arithmetic"),
    row("4", 1.0, 1.0, ran_out_of_memory=True),
]


def shown(renderable: RenderableType) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_the_overview_counts_errors_memory_and_what_is_missing() -> None:
    text = " ".join(shown(overview(ROWS)).split())
    assert "4 published rows, 3 compared: step time off by 8.3 % (mean), 5.0 % (median); bias −5.0 %" in text
    assert "80 % intervals hold 66.7 %" in text
    assert "memory, x (device): 1 rows, off by 10.0 %, bias −10.0 %" in text
    assert "out of memory: 0 of 1 found; 0 of 2 that ran said not to fit" in text
    assert "1 x: fp8 arithmetic" in text


def test_the_csv_has_every_row() -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(ROWS))))
    assert [line["row"] for line in lines] == ["x/1", "x/2", "x/3", "x/4"]
    assert float(lines[1]["error"]) == pytest.approx(-0.2)
    assert lines[2]["reason"] == "fp8 arithmetic"


def test_error_bars_hold_what_they_hold() -> None:
    """±10 % at 80 %, so ±5.1 % at 50 %: steps that are 0 and 5 % off are inside of both, 8 % of the first, 20 % of none."""
    assert stated_and_held([*ROWS, row("5", 1.0, 1.08)]) == [(0.5, 0.5), (0.8, 0.75), (0.95, 0.75)]


def test_a_tornado_shows_the_change_both_ways() -> None:
    text = shown(table("job", 2.0, [PriceSwing("gemm", 1.1, 1.9, 2.1)]))
    assert "−5.00 %" in text
    assert "+5.00 %" in text


def test_sensitivity_of_a_job_as_json() -> None:
    result = CliRunner().invoke(shardyard.main, ["sensitivity", JOB, "--json", "--by", "0.2"])
    answer = json.loads(result.output)
    assert {"gemm", "attention", "bandwidth inside nodes"} <= {swing["name"] for swing in answer["effects"]}
    assert all(swing["low"] < answer["step_seconds"] < swing["high"] for swing in answer["effects"][:3])


def test_validate_compares_a_source_and_draws_it(tmp_path: Path) -> None:
    picture, lines = tmp_path / "p.png", tmp_path / "rows.csv"
    asked = ["validate", "--published", "--source", "megatron-ci-2025", "--plot", str(picture), "--csv", str(lines)]
    result = CliRunner().invoke(shardyard.main, asked)
    assert result.exit_code == 0, result.output
    assert "7 published rows, 5 compared" in result.output
    assert picture.stat().st_size > 10_000
    assert len(lines.read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rows"], "validate: 'rows' needs --published"),
        (["--published", "--source", "bloom"], "unknown source 'bloom'; did you mean"),
        (["--published", "--plot", "x.pdf"], "--plot x.pdf: must end in .png or .svg"),
    ],
)
def test_mistakes_are_one_line(options: list[str], says: str) -> None:
    result = CliRunner().invoke(shardyard.main, ["validate", *options])
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {says}")
