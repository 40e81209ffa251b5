"""`compare`, `advise` and `plan` draw what they compare and leave a page of the best."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

import shardyard
from reports.figures import Drawing

JOB = ("--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--nodes", "1")
SPACE = ("--vary", "plan.tp=1,2", "--vary", "plan.pp=1", "--vary", "plan.schedule=1f1b", "--vary", "plan.microbatch=4")
WAYS: dict[str, tuple[str, ...]] = {
    "compare": ("compare", *JOB, "--also", "plan.microbatch=2"),
    "advise": ("advise", *JOB),
    "plan": ("plan", *JOB, *SPACE, "--workers", "1"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_figure_and_a_page(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def draw(self: Drawing, data: Any, path: Path, legend: bool = True) -> Path:
        drawn.append(data)
        Image.new("1", (1, 1)).save(path)
        return path

    monkeypatch.setattr(Drawing, "__call__", draw)
    folder, figure = tmp_path / "page", tmp_path / "figure.png"
    result = CliRunner().invoke(shardyard.main, [*WAYS[way], "--plot", str(figure), "--report", str(folder)])
    assert result.exit_code == 0, result.output
    assert f"wrote {figure}" in result.output
    assert f"wrote {folder / 'report.html'} and " in result.output
    summary = json.loads((folder / "summary.json").read_text())
    page = (folder / "report.html").read_text()
    assert "Beside other runs" in page
    if way == "compare":
        assert "days of 10¹² tokens" in result.output
    else:
        arguments = page.split("s arguments: ")[1].split("<")[0].replace("&#39;", "'")
        again = CliRunner().invoke(shardyard.main, ["simulate", *JOB, *shlex.split(arguments), "--json"])
        assert json.loads(again.stdout)["step_seconds"] == summary["step_seconds"]


def test_another_file_than_a_picture_is_refused_before_any_work() -> None:
    for words in WAYS.values():
        result = CliRunner().invoke(shardyard.main, [*words, "--plot", "out.pdf"])
        assert result.exit_code == 2
        assert "must end in .png or .svg" in result.output
