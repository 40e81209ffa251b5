"""What is counted of a job whose samples are no tokens: images of a module, in every command, page and figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from reports.figures.completion import UNITS, completion
from reports.figures.efficiency import Scaling, Size, efficiency
from reports.figures.heatmap import Cell, Maps, heatmap
from shardyard import main
from strategies.read_job import read_job
from strategies.resilience.runs import run_days

pytest.importorskip("torch")
MODEL = ("--model", "examples/modules/lenet.py:lenet", "--input", "3x32x32")
IMAGES = (*MODEL, "--cluster", "dgx-a100", "--set", "plan.microbatch=64", "--set", "plan.data_parallel=ddp")


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", *IMAGES),
        ("advise", *IMAGES),
        ("whatif", *IMAGES, "--vary", "nodes=1,2"),
        ("plan", *IMAGES, "--workers", "1"),
        ("plan", *IMAGES, "--workers", "1", "--objective", "throughput"),
        ("run", *IMAGES, "--days", "1", "--no-advice"),
        ("buy", "1xdgx-a100", "vs", "1xdgx-h100", *MODEL, "--set", "plan.microbatch=64", "--workers", "1"),
        ("server", *IMAGES, "--nodes", "2", "--steps", "5"),
    ],
    ids=lambda command: command[0],
)
def test_no_command_counts_images_as_tokens(command: tuple[str, ...]) -> None:
    output = CliRunner().invoke(main, command).output
    assert "sample" in output
    assert "token" not in output


@pytest.mark.usefixtures("undrawn")
def test_pages_count_samples(tmp_path: Path) -> None:
    """Definitions of metrics and names of fields apart, which are what they are."""
    CliRunner().invoke(main, ("server", *IMAGES, "--nodes", "2", "--steps", "5", "--report", str(tmp_path / "server")))
    CliRunner().invoke(main, ("plan", *IMAGES, "--workers", "1", "--report", str(tmp_path / "plan")))
    for name in ("server", "plan"):
        page = (tmp_path / name / "report.html").read_text(encoding="utf-8")
        tables = " ".join(re.findall(r"<t[hd][^>]*>([^<]*)<", page))
        assert "samples/s" in tables
        assert "tokens/s" not in page


def test_figures_count_samples() -> None:
    sizes = Scaling({"weak": [Size(8, 100), Size(16, 90)]}, {}, "samples")
    assert "samples/s/GPU" in efficiency.draw(sizes).axes[0].get_ylabel()
    bar = heatmap.draw(Maps({"ddp": {(1, 1): Cell(1.0), (2, 1): Cell(2.0)}}, "samples")).axes[-1]
    assert bar.get_ylabel() == "samples/s/GPU"
    job = read_job(
        model="examples/modules/lenet.py:lenet", input="3x32x32", cluster="dgx-a100", plan={"microbatch": 64, "auto": False}
    )
    label = completion.draw(run_days(job, days=1.0, count=3)).axes[0].get_xlabel()
    assert label in {f"{size}samples" for _, size in UNITS}
