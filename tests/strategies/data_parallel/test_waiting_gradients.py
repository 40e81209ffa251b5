"""Gradients that do not stay are not piled up behind a slow network: compute waits for the reduction before the last."""

from __future__ import annotations

import pytest

from shardyard import predict, read_job

SMALL = dict(name="small", hidden=512, layers=12, heads=8, vocabulary=1024, context=256, tied=False)


@pytest.mark.parametrize(("hook", "kind"), [("zero2", "gradient"), ("zero3", "temporary")])
def test_a_slow_network_costs_time_and_at_most_three_buckets(hook: str, kind: str) -> None:
    plan = dict(data_parallel=hook, bucket="12 MB", accumulation=4, gradients="fp32")
    answers = []
    for nic in ("400 Gb/s", "1 Gb/s"):
        job = read_job(model=SMALL, cluster={"based_on": "dgx-a100", "node": {"nic": nic}}, nodes=2, plan=plan)
        answers.append(predict(job))
    fast, slow = answers
    assert slow.step_seconds > 2 * fast.step_seconds
    layer = 4 * 12 * 512**2  # bytes of fp32 gradients: 12·h² parameters, about the bucket
    shard = 4 * job.model.parameters / 16 if hook == "zero2" else 0
    assert slow.memory[0].kinds[kind] < shard + 3.2 * layer
