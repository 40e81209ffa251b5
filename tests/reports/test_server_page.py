"""The page of a job with parameter servers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardyard
from reports.formatting import count
from strategies.predict import predict
from strategies.read_job import read_job

JOB = ("--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--set", "plan.accumulation=1", "--set", "plan.sequence=512")
ASKED = ("server", *JOB, "--nodes", "2", "--servers", "2", "--staleness", "2", "--steps", "4")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("servers")
    assert CliRunner().invoke(shardyard.main, [*ASKED, "--report", str(folder)]).exit_code == 0
    return folder


def test_it_has_other_staleness_other_servers_and_all_reduce(page: Path) -> None:
    data = json.loads((page / "servers.json").read_text(encoding="utf-8"))
    assert list(data["by_staleness"]) == ["sync", "1", "4", "async", "2"]
    assert list(data["by_servers"]) == ["1", "2", "4", "8"]  # of the one node that has servers
    assert data["by_servers"]["2"] == data["by_staleness"]["2"] == data["answer"]
    text = (page / "report.html").read_text(encoding="utf-8")
    plan = {"accumulation": 1, "sequence": 512}
    reduced = predict(read_job(model="gpt2-1.5b", cluster="dgx-a100", plan=plan))  # eight GPUs of the other node
    assert f"By all-reduce (DDP) the workers&#39; 8 GPUs train {count(reduced.tokens_per_second)} tokens/s" in text


def test_it_fetches_nothing_and_repeats(page: Path, tmp_path: Path) -> None:
    text = re.sub(r"base64,[^\"]*", "", (page / "report.html").read_text(encoding="utf-8"))
    assert not re.search(r"https?:|@import|url\(|<script", text)
    CliRunner().invoke(shardyard.main, [*ASKED, "--report", str(tmp_path)])
    for file in page.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()


def test_a_folder_that_cannot_be_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(shardyard.main, [*ASKED, "--report", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "must name a folder" in result.output
