"""Every example job can be read, resolved and lowered; what it shows is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardyard import read_job, simulate, summarise
from strategies.lowering.lower import lower

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    "name", sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("**/*.yaml") if path.parent.name != "clusters")
)
def test_every_example_is_a_job(name: str) -> None:
    job = read_job(EXAMPLES / name)
    plan = job.resolve()
    if plan.global_batch <= 1024:
        assert lower(job.model, plan).cohorts


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("layers/async-tp.yaml", {"plan.overlap_tp": "none"}),
        ("layers/fp8.yaml", {"plan.fp8": None}),
        ("schedules/interleaved-overlapped.yaml", {"plan.schedule": "interleaved"}),
        ("schedules/chimera.yaml", {"plan.schedule": "1f1b", "plan.chunks": None}),
    ],
)
def test_what_an_example_shows_makes_its_step_shorter(name: str, without: dict) -> None:
    assert simulate(read_job(EXAMPLES / name)).step < simulate(read_job(EXAMPLES / name, without)).step


def test_a_slow_gpu_and_a_slow_nic_are_waited_for() -> None:
    shorter = {"plan.global_batch": 32}  # a quarter of its microbatches
    slow = simulate(read_job(EXAMPLES / "slow-gpu.yaml", shorter))
    usual = simulate(read_job(EXAMPLES / "llama-3.1-70b.yaml", shorter))
    alone = simulate(read_job(EXAMPLES / "slow-gpu.yaml", shorter, effects=["gpu 37: speed 0.9"]))
    assert usual.step < alone.step <= slow.step


@pytest.mark.parametrize(
    ("name", "batch", "changes"),
    [
        # DeepSeek-V3 ran in 80 GB (arXiv:2412.19437) as it is described, and not without what its report says of memory
        ("deepseek-v3", 4096, {"plan.recompute": "none", "plan.recompute_modules": None}),
        ("deepseek-v3", 4096, {"plan.fp8.gather": False}),
        # Llama-3 405B with nothing recomputed (arXiv:2407.21783, section 3.3.2), its first and last stage a layer shorter
        ("llama-3.1-405b", 2048, {"plan.data_parallel": "zero1", "plan.gradient_sync": None}),
    ],
)
def test_what_was_trained_fits_as_it_was_trained(name: str, batch: int, changes: dict) -> None:
    own = {"plan.global_batch": batch}
    ran, other = (summarise(simulate(read_job(EXAMPLES / f"hybrids/{name}.yaml", own | more))) for more in ({}, changes))
    assert ran.fits
    assert not other.fits
