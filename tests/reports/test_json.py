"""Commands that look things up say the same as data, with stable keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import shardyard


def data(*arguments: str) -> Any:
    result = CliRunner().invoke(shardyard.main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_names() -> None:
    assert "h100-sxm" in data("list", "gpus")["gpus"]
    assert {"models", "clusters", "schedules"} <= data("list").keys()


def test_ranks_are_numbered_by_node() -> None:
    """Two nodes of four GPUs, two GPUs per process: a world of 4."""
    table = data("ranks", "--nodes", "2", "--gpus", "4", "--gpus-per-process", "2")
    assert table["world_size"] == 4
    assert table["ranks"][3] == {"rank": 3, "node": 1, "local_rank": 1, "gpus": [2, 3]}


def test_a_schedule_is_rows_of_passes(tmp_path: Path) -> None:
    file = tmp_path / "gpipe.csv"
    answer = data("schedule", "gpipe", "--pp", "2", "--microbatches", "2", "--csv", str(file))
    assert answer["ranks"] == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    assert file.read_text().splitlines()[0] == "0F0,0F1,0B0,0B1"


def test_a_cluster_has_links_in_bytes_per_second() -> None:
    """A DGX H100: 8 NICs of 400 Gb/s, NVLink of 450 GB/s each way (NVIDIA's data sheet)."""
    answer = data("topology", "dgx-h100", "--nodes", "2")
    assert (answer["gpus"], answer["nics_per_node"], answer["nic"]) == (16, 8, pytest.approx(50e9))
    assert {link["kind"]: link["capacity"] for link in answer["links"]}["nvlink"] == pytest.approx(450e9)
    assert answer["nics_of_gpu"] == [[rail] for rail in range(8)]


def test_settings_and_what_they_do_not_say() -> None:
    job = ("--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--set", "plan.schedule=gpipe", "--set", "plan.pp=2")
    answer = data("export", *job, "--to", "megatron")
    assert answer["file"] == "pretrain.sh"
    assert "--num-layers 32" in answer["text"]
    assert "schedule=gpipe: it has 1f1b" in answer["unexpressed"]


def test_an_explanation() -> None:
    assert data("explain", "mfu")["text"].startswith("MFU")
