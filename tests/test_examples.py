"""Every example job can be read, resolved and lowered; what it shows is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardyard import read_job, simulate
from strategies.lower import lower

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    "name", sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("**/*.yaml") if path.parent.name != "clusters")
)
def test_every_example_is_a_job(name: str) -> None:
    job = read_job(EXAMPLES / name)
    plan = job.resolve()
    if plan.global_batch <= 1024:
        assert lower(job.model, plan).cohorts


@pytest.mark.parametrize(("name", "without"), [
    ("layers/async-tp.yaml", {"plan.overlap_tp": "none"}),
    ("layers/fp8.yaml", {"plan.fp8": None}),
    ("schedules/interleaved-overlapped.yaml", {"plan.schedule": "interleaved"}),
    ("schedules/chimera.yaml", {"plan.schedule": "1f1b", "plan.chunks": None}),
])  # fmt: skip
def test_what_an_example_shows_makes_its_step_shorter(name: str, without: dict) -> None:
    assert simulate(read_job(EXAMPLES / name)).step < simulate(read_job(EXAMPLES / name, without)).step
