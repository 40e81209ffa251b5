"""Published measurements of checkpoints and stragglers that no part of the program was fitted to."""

from __future__ import annotations

import pytest

from shardyard import predict, read_job
from strategies.resilience.checkpoint_size import checkpoint_size
from strategies.resilience.save_costs import save_costs
from topologies.storage import load_storage


def test_a_load_of_405b_lies_between_reading_once_and_reading_for_every_replica() -> None:
    """ByteCheckpoint, 405B on 8,960 GPUs: saved in 51.06 s, loaded in 129.49 s (arXiv 2407.20143, table 8). The save gives what
    its storage writes in all: at that rate every replica for itself reads for longer than published, and each state once takes
    less. The plan is assumed: tp = 8, pp = 16, dp = 70, a distributed optimizer.
    """
    job = read_job(
        {
            "model": "llama-3.1-405b",
            "cluster": "dgx-h100",
            "nodes": 1120,
            "plan": {"tp": 8, "pp": 16, "sequence_parallel": True, "data_parallel": "zero1", "global_batch": 1120},
        }
    )
    size = checkpoint_size(job)
    rate = f"{size.total / 51.06 / 1e9:.3f} GB/s"
    storage = load_storage({"write": rate, "read": rate}, "")
    assert save_costs(job, size, storage).write == pytest.approx(51.06, rel=1e-4)
    assert save_costs(job, size, storage, parallel_load=True).read < 129.49 < save_costs(job, size, storage).read


def test_a_machine_that_is_a_tenth_slower_costs_what_megascale_gained_without() -> None:
    """MegaScale, 175B on 12,288 GPUs: half a percent of the machines were about 10 % slower, and leaving them out gained 0.7 % of
    MFU (arXiv 2402.15627). One such machine costs a point here, not the tenth that a job without slack would lose.
    """
    plan = {
        "tp": 8,
        "pp": 8,
        "schedule": "interleaved",
        "chunks": 6,
        "data_parallel": "zero1",
        "global_batch": 6144,
        "sequence_parallel": True,
    }
    fields = {"model": "gpt3-175b", "cluster": "dgx-a100", "nodes": 1536, "plan": plan}
    alike, slow = predict(read_job(fields)), predict(read_job(fields, effects=["node 5: speed 0.909"]))
    assert alike.mfu == pytest.approx(0.552, abs=0.03)
    assert alike.mfu - slow.mfu == pytest.approx(0.007, abs=0.004)
