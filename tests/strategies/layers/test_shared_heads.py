"""More tensor parallel ranks than key-value heads: Megatron-Core shares out the matrix and gathers its results."""

from __future__ import annotations

from typing import Any

import pytest

from sim.analysis.volume import volumes
from sim.engine.player import run
from sim.program import Block, Kernel
from strategies.lowering.lower import lower
from topologies.reading import UserError

NO_BIAS = {"attention_bias": False, "output_bias": False, "mlp_bias": False}
LLAMA: dict[str, Any] = {"kv_heads": 2, "gated": True, "norm": "rmsnorm", "positions": "rotary", "tied": False} | NO_BIAS


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_results_of_the_matrix_are_gathered_and_their_gradients_scattered(toy_job, toy_prices, parallel, recompute) -> None:
    """8 ranks and 2 key-value heads of 8 features: 32 tokens of (8 + 2 · 2) · 8 features in bf16 are gathered by 7/8 of them in
    every forward pass of a layer, and reduce-scattered backward, besides what 8 key-value heads need.
    """

    def sent(heads: int) -> float:
        job = toy_job(8, model=LLAMA | {"kv_heads": heads}, tp=8, sequence_parallel=parallel, recompute=recompute)
        timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
        return volumes(timeline)[0]["tp"][0]

    passes = 3 if recompute == "full" else 2
    assert sent(2) - sent(8) == 4 * passes * 7 / 8 * 32 * (8 + 2 * 2) * 8 * 2


def test_no_parameter_is_there_twice(toy_job) -> None:
    """What a rank has more than 1/8 of the model are norms; it multiplies by 1/8 of (8 + 2 · 2) · 8 columns, and attends with a
    query head and a key-value head.
    """
    job = toy_job(8, model=LLAMA, tp=8)
    (cohort,) = lower(job.model, job.resolve()).cohorts
    kernels = [item for op in cohort.ops if isinstance(op.work, Block) for _, item in op.work.items() if isinstance(item, Kernel)]
    assert {item.shape for item in kernels if item.label == "qkv" and item.phase == "forward"} == {(1, 32, 12, 64)}
    assert {item.shape for item in kernels if item.kind == "attention_forward"} == {(1, 1, 1, 32, 32, 8, 1)}
    norms = 2 * 64 * 4 + 64
    assert dict(cohort.resident)["parameter"] == 2 * ((job.model.parameters - norms) / 8 + norms)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"kernels": "torch"}, "tp=8 exceeds 2 key-value heads: with kernels=torch each rank needs one of its own"),
        ({"kernels": "compiled"}, "with kernels=compiled each rank needs one"),
        ({"kernels": "apex"}, "with kernels=apex each rank needs one"),
        ({"model": LLAMA | {"hidden": 96, "heads": 24, "kv_heads": 3}}, "tp=8 exceeds 3 key-value heads, and does not divide"),
    ],
)
def test_who_cannot_share_out_a_head(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(8, **{"model": LLAMA, "tp": 8} | plan).resolve()
