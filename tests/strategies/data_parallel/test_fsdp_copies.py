"""What PyTorch's FSDP does between collectives and tensors, and an optimizer an operator at a time."""

from __future__ import annotations

from typing import Any

import pytest

from sim.program import WRAPPER_COPY, Block, Kernel
from strategies.lowering.lower import lower
from strategies.lowering.optimizer_step import passes_of
from strategies.plan.plan import Plan
from strategies.read_job import read_job
from topologies.reading import UserError


def job(**plan: Any) -> Any:
    given = {"data_parallel": "zero3", "kernels": "torch", "sequence": 2048, "accumulation": 1, **plan}
    return read_job(None, {"plan": given}, model="llama-3.1-8b", cluster="dgx-h100", nodes=1)


def copied(**plan: Any) -> float:
    """Bytes per parameter and microbatch that pass through memory around collectives."""
    asked = job(**plan)
    blocks = [op.work for op in lower(asked.model, asked.resolve()).cohorts[0].ops if isinstance(op.work, Block)]
    kernels = [item for block in blocks for run in block.runs for item in run.items if isinstance(item, Kernel)]
    return sum(kernel.bytes for kernel in kernels if kernel.variant == WRAPPER_COPY) / asked.model.parameters


def test_fsdp2_copies_what_it_gathered_and_gradients() -> None:
    """Forward and backward gather: 2 read, 2 written each; gradients: 2 read, 4 written in fp32."""
    assert copied(gradients="fp32") == pytest.approx(2 * (2 + 2) + (2 + 4))
    assert copied(gradients="fp32", reshard=False) == pytest.approx((2 + 2) + (2 + 4))
    assert copied() == pytest.approx(2 * (2 + 2) + (2 + 2))


def test_fsdp1_joins_casts_and_divides_gradients() -> None:
    assert copied(gradients="fp32", flat_parameters=True) == pytest.approx((2 + 2) + (2 + 4) + (4 + 4))
    assert copied(flat_parameters=True) == pytest.approx((2 + 2) + (2 + 2))


def test_ddp_copies_gradients_to_its_buckets_or_divides_them_there() -> None:
    """Read and written once in the last microbatch; the way back is a pass of the update."""
    ways = copied(data_parallel="ddp"), copied(data_parallel="ddp", gradient_as_bucket_view=True)
    assert ways == pytest.approx((2 + 2, 2 + 2))
    assert copied(data_parallel="ddp", accumulation=3) == pytest.approx(2 + 2)


def test_other_implementations_do_not() -> None:
    assert copied(kernels="megatron") == copied(deepspeed={}) == copied(data_parallel="zero1") == 0


def test_profiles_that_measured_collectives_with_copies_do_not_pay_twice(toy_prices: Any) -> None:
    copy = Kernel("memory", "gathered parameters", "forward", 0.0, 1e9, variant=WRAPPER_COPY)
    assert toy_prices().seconds(copy) > 0
    assert toy_prices(wrapping={"dp/all_gather": {"fixed": "1 us"}}).seconds(copy) == 0


def test_flat_parameters_are_pytorch_s() -> None:
    with pytest.raises(UserError, match="flat_parameters=true contradicts data_parallel=ddp"):
        job(data_parallel="ddp", flat_parameters=True).resolve()


def test_an_operator_at_a_time_passes_over_memory_more_often() -> None:
    """Adam: 22 numbers read or written where one pass has 7 (gradient, parameter and two states both ways)."""
    fused, many = (
        sum(moved for _, moved in passes_of(Plan(precision="fp32", clip_gradients=False, fused_optimizer=fused, kernels="torch")))
        for fused in (True, False)
    )
    assert (fused, many) == (7 * 4, 22 * 4)


def test_copies_of_gathered_parameters_belong_to_the_pass_that_they_are_made_for(toy_job) -> None:
    """Gathered for both passes, they are copied out in both; kept from the forward pass on, in that alone."""

    def moved(reshard: bool) -> dict[str, float]:
        job = toy_job(2, model={"tied": False}, data_parallel="zero3", kernels="torch", reshard=reshard)
        result = {"forward": 0.0, "backward": 0.0}
        for op in lower(job.model, job.resolve()).cohorts[0].ops:
            for times, item in op.work.items() if isinstance(op.work, Block) else ():
                if item.label == "gathered parameters" and isinstance(item, Kernel):
                    result[item.phase] += times * item.bytes
        return result

    both, once = moved(True), moved(False)
    assert both["forward"] == both["backward"] == once["forward"] > 0
    assert once["backward"] == 0


def test_gathered_parameters_are_copied_before_they_are_used(toy_job) -> None:
    job = toy_job(2, model={"tied": False}, data_parallel="zero3", kernels="torch")
    blocks = [op.work for op in lower(job.model, job.resolve()).cohorts[0].ops if isinstance(op.work, Block)]
    labels = [[getattr(item, "label", "") for _, item in block.items()] for block in blocks]
    copied = [names.index("gathered parameters") for names in labels if "gathered parameters" in names]
    assert copied == [0] * 2 * 6  # forward and backward of the embedding, four layers and the head
