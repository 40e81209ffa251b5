"""ZeRO-1, 2 and 3 by DeepSpeed itself, where it is installed: what one process computes, and the bytes that are simulated."""

from __future__ import annotations

from typing import Any

import pytest

from calibration.validate import validate
from tests.calibration.execute.test_execute import FLAT, SHORT, job

SMALL = {"reduce_bucket_size": 8192, "allgather_bucket_size": 8192}
GATHERED = {"reduce_bucket_size": 100_000, "stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize(
    ("stage", "model", "options", "clipped"),
    [("zero1", SHORT, {}, False), ("zero2", FLAT, SMALL, True), ("zero3", SHORT, GATHERED, False)],
)
def test_deepspeed_computes_what_one_process_does_and_sends_what_is_simulated(
    stage: str, model: dict[str, Any], options: dict[str, int], clipped: bool
) -> None:
    pytest.importorskip("deepspeed")
    plan = {"data_parallel": stage, "deepspeed": options, "accumulation": 2, "kernels": "torch", "clip_gradients": clipped}
    (validated,) = validate([job(f"{stage} by DeepSpeed", 2, model, **plan)], seconds=0)  # raises for other losses and updates
    assert validated.execution.compared["update"] < 1e-5
    volumes = [(row.of, row.predicted, row.measured) for row in validated.rows if row.what == "volume"]
    assert volumes == [("dp", pytest.approx(sent, abs=0.5), sent) for _, _, sent in volumes]
