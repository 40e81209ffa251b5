"""Plans that are refused, each with its one line, and plans that are not.

Rows of tests/data/refusals.jsonl: [model, GPUs of a node, whether nodes have CPUs, plan, what is said or null].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard import UserError, read_job
from tests.random_jobs import CPU, MODELS

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "refusals.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("model", "gpus", "cpus", "plan", "text"), ROWS, ids=lambda value: "")
def test_refusals(model: str, gpus: int, cpus: bool, plan: dict[str, Any], text: str | None) -> None:
    node = {"gpus": gpus, "nics": gpus} | ({"cpu": CPU} if cpus else {})
    job = {"model": next(each for each in MODELS if each["name"] == model), "nodes": 2, "plan": plan}
    job |= {"cluster": {"based_on": "dgx-h100", "node": node}}
    if text is None:
        read_job(None, {}, **job).resolve()
        return
    with pytest.raises(UserError) as refused:
        read_job(None, {}, **job).resolve()
    assert str(refused.value) == text
