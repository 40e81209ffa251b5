"""Faults from outside: a full disk, signals, a parent that is killed. Nothing is half-written, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardyard

ROOT = Path(__file__).parents[1]
JOB = """
model: {name: small, hidden: 256, layers: 4, heads: 8, vocabulary: 1024, context: 256}
cluster: dgx-h100
plan: {pp: 2, accumulation: 4, data_parallel: zero1}
"""
SERVERS = ROOT / "examples/servers/parameter-server.yaml"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


WRITING = [
    "topology dgx-h100 --draw topology.svg",
    "topology dgx-h100 --draw topology.png",
    "schedule 1f1b --pp 8 --microbatches 64 --csv schedule.csv",
    "export job.yaml --to megatron --output megatron.sh",
    "simulate job.yaml --report report",
    "collective all_reduce --cluster dgx-h100 --sizes 1MiB:2MiB --plot plot.png",
    "collective all_reduce --cluster dgx-h100 --sizes 1MiB:2MiB --by-ranks ranks.svg",
    "whatif job.yaml --vary plan.accumulation=4,8 --workers 1 --plot curve.png",
    "sensitivity job.yaml --plot tornado.svg",
    "validate --published --source megatron-ci-2025 --csv rows.csv",
    "validate --published --source megatron-ci-2025 --plot published.png",
    f"server {SERVERS} --servers 2 --plot servers.png",
    f"server {SERVERS} --servers 2 --report servers",
]


@pytest.mark.parametrize("command", WRITING)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    command: str, here: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    with full_disk(300):
        result = CliRunner().invoke(shardyard.main, command.split())
    assert result.exit_code == 2
    assert [line for line in result.stderr.splitlines() if line.startswith("error: ")] == [result.stderr.splitlines()[-1]]
    assert "cannot be written: File too large" in result.stderr
    assert "wrote" not in result.output
    assert names(here) == ["job.yaml"]
