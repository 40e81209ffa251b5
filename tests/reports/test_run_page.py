"""The page of a job over days: complete, self-contained, and its script's timeline is the run's own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import shardyard
from reports.figures.run_timeline import CAUSES, run_timeline
from reports.page.run_report import timeline
from sim.runs.record import Span
from sim.runs.replications import recorded
from sim.runs.run import Outcome
from sim.runs.segment import Pause, Segment
from strategies.resilience.compare_runs import scales
from strategies.resilience.run_spec import prepare

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "run-llama-3.1-405b.yaml"
SCRIPT = ROOT / "reports" / "page" / "templates" / "run_timeline.js"
NODE = shutil.which("node")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    job = shardyard.read_job(EXAMPLE, {"run.evaluation": "2 min", "run.evaluation_steps": 500})
    assert job.run is not None
    return recorded(prepare(job, job.run, days=30).spec)


def test_the_page_has_every_part_and_needs_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    path = folder / "report.html"
    job = tmp_path / "job.yaml"
    run = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["run"]
    plan = {"data_parallel": "zero1", "global_batch": 1024}
    job.write_text(json.dumps({"model": "gpt2-1.5b", "cluster": "dgx-a100", "nodes": 128, "plan": plan, "run": run}))
    words = ["run", str(job), "--days", "8", "--replications", "2", "--workers", "1", "--report", str(folder)]
    result = CliRunner().invoke(shardyard.main, words)
    assert result.exit_code == 0, result.output
    text = path.read_text(encoding="utf-8")
    plain = re.sub(r"base64,[^\"]*", "", text)
    assert not re.search(r"https?:|@import|url\(|src=\"[^d]", plain)
    for title in (
        "One run, as closely as you like",
        "Where the GPU-seconds go",
        "How often to save",
        "What to change first",
        "The training loop",
    ):
        assert re.search(f"<h2[^>]*>{title}", text)
    assert len(re.findall(r"<img alt=\"[^\"]+\" src=\"data:image/png;base64,", text)) == 5
    assert len(list(folder.glob("*.png"))) == 5
    data = json.loads(re.findall(r"<script type=\"application/json\" id=\"timeline\">(.*?)</script>", text, re.DOTALL)[0])
    assert data["seconds"] == 8 * 86400
    assert len(text) < 500_000
    CliRunner().invoke(shardyard.main, words)
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--report", "page", "--vary", "run.spares=0,1"), "--report is of the job alone"),
        (("--report", str(EXAMPLE)), f"--report '{EXAMPLE}': must name a folder, and no file"),
    ],
)
def test_pages_that_cannot_be_are_refused_first(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(shardyard.main, ["run", str(EXAMPLE), "--days", "5", *words])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(NODE is None, reason="no Node.js on this machine")
def test_the_script_draws_the_pieces_that_the_run_had(outcome: Outcome) -> None:
    """Around each of some times of the run, at a zoom where every save shows: the same pieces as by the run's own arithmetic."""
    data = timeline(outcome)
    views = [(at * outcome.seconds / 7, at * outcome.seconds / 7 + 7200.0) for at in range(1, 7)]
    drawing = f"{json.dumps(views)}.map(([a, b]) => pieces(data, a, b, 1200))"
    asked = f"const data = {json.dumps(data)}; console.log(JSON.stringify({drawing}))"
    done = subprocess.run([str(NODE), "-e", SCRIPT.read_text() + asked], capture_output=True, text=True, timeout=60, check=True)
    names = list(CAUSES)
    for (start, end), drawn in zip(views, json.loads(done.stdout), strict=True):
        own = [piece for span in outcome.timeline for piece in span.pieces(start, end) if piece[2] != "productive"]
        shown = [
            (max(left, start), min(right, end), names[cause]) for left, right, cause, _ in drawn if names[cause] != "productive"
        ]
        shown = sorted(piece for piece in shown if piece[1] - piece[0] > 1e-3)
        assert [cause for _, _, cause in shown] == [cause for _, _, cause in own]
        assert [left for left, _, _ in shown] == pytest.approx([left for left, _, _ in own], abs=2e-3)
        assert any(cause == "checkpoint save" for _, _, cause in own)


def test_a_row_of_the_overview_is_as_wide_as_its_part_of_the_run() -> None:
    """100 s of training and 60 s of detection: all eight rows of 20 s are full, and each second is as wide as any."""
    spans = (
        Span(0.0, 100.0, "productive", Segment(0, 1.0, (Pause(50, 0.0),)), 0.0, ("checkpoint save",)),
        Span(100.0, 160.0, "detection"),
    )
    outcome = Outcome(160.0, 100.0, dict.fromkeys(CAUSES, 0.0) | {"productive": 100.0}, {"gpu": 1}, 1, 0, 0, spans)
    overview, _ = run_timeline.draw(outcome).axes
    extents = [[path.get_extents() for path in each.get_paths()] for each in overview.collections]
    assert sum(box.width for boxes in extents for box in boxes) == pytest.approx(160.0 / 60, rel=1e-6)
    assert [len(boxes) for boxes in extents] == [1] * 8


def test_a_job_at_other_sizes_grows_as_a_whole() -> None:
    """128 nodes, batch 256, 2 spares, 4 free nodes: halves and doubles of all; an eighth of two spares is none."""
    sizes = {each["nodes"]: each for each in scales(shardyard.read_job(EXAMPLE))}
    assert sorted(sizes) == [16, 32, 64, 128, 256, 512, 1024]
    assert (sizes[256]["plan.global_batch"], sizes[256]["run.spares"], sizes[256]["run.pool"]) == (512, 4, 8)
    assert (sizes[16]["run.spares"], sizes[16]["plan.global_batch"]) == (0, 32)
    alone = {"nodes": 1, "plan.pp": 1, "plan.global_batch": 16}
    assert sorted(each["nodes"] for each in scales(shardyard.read_job(EXAMPLE, alone))) == [1, 2, 4, 8]
