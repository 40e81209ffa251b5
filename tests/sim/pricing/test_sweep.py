"""The collectives of a step, priced by size, are those that the step itself was charged for."""

from __future__ import annotations

import pytest

import shardyard
from sim.analysis.collective_sweep import lone, of_step
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from topologies.cluster_files import load_cluster


def played(**plan: object) -> shardyard.Timeline:
    return shardyard.simulate(
        shardyard.read_job(
            model="llama-3.1-8b", cluster="dgx-h100", nodes=2, overrides={"model.layers": 4}, plan={"sequence": 2048} | plan
        )
    )


def test_the_axes_that_send_most_are_swept_among_their_own_groups() -> None:
    timeline = played(tp=8, sequence_parallel=True, data_parallel="ddp", global_batch=32)
    first, second = of_step(timeline, [2.0**20, 2.0**30])
    assert [swept.where for swept in (first, second)] == ["tp, groups of 8 ranks", "dp, groups of 2 ranks"]
    assert second.operation == "all_reduce"
    assert [options[0].bytes for options in second.prices] == [2.0**20, 2.0**30]


def test_at_a_size_of_the_job_the_price_is_the_one_that_it_paid() -> None:
    timeline = played(data_parallel="ddp", global_batch=32)
    used = of_step(timeline, [1.0])[0].used
    ops = [(number, op.work) for number, op in timeline.ops(0) if op.stream == "dp"]
    assert ops
    paid = {work.bytes: timeline.cost[number].alone / work.repeat for number, work in ops}  # type: ignore[union-attr]
    swept = of_step(timeline, used)[0]
    assert {options[0].bytes: options[0].seconds for options in swept.prices} == pytest.approx(paid, rel=1e-6)


def test_one_gpu_has_no_collectives() -> None:
    alone = shardyard.read_job(
        model="gpt2-1.5b",
        cluster="dgx-h100",
        nodes=1,
        plan={"global_batch": 1},
        overrides={"model.layers": 2, "cluster.node.gpus": 1, "cluster.node.nics": 1},
    )
    assert of_step(shardyard.simulate(alone), [1e6]) == []


@pytest.mark.parametrize(
    ("operation", "ranks", "size", "said"),
    [
        ("all_reduce", 16, 2.0**20, []),
        ("all_reduce", 1024, 2.0**20, []),  # compared with published plots
        ("all_reduce", 1032, 2.0**20, ["all_reduce among more than 1,024 ranks"]),
        ("reduce_scatter", 16, 2.0**20, []),
        ("reduce_scatter", 24, 2.0**20, ["reduce_scatter among more than 16 ranks"]),
        ("all_gather", 16, 2.0**34, ["all_gather of more than 8 GiB"]),
    ],
)
def test_what_was_not_measured_is_said(operation: str, ranks: int, size: float, said: list[str]) -> None:
    cluster = load_cluster("dgx-h100", nodes=-(-ranks // 8))
    pricing, (work,) = lone(cluster.topology(), Prices(load_profile("h100"), cluster.node.gpu), operation, ranks, [size])
    pricing.collective(work, 0)
    assert [note.partition(" was not measured")[0] for note in pricing.notes] == said
