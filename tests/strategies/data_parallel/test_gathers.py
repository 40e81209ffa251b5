"""What gathers of sharded parameters allocate is what their collectives bring, whatever the width of a parameter on its way."""

from __future__ import annotations

from typing import Any

import pytest

from sim.program import Block, Collective, Op
from strategies.lowering.lower import lower
from strategies.read_job import read_job
from topologies.reading import UserError

MIXTURE = {"experts": 8, "chosen": 2, "ffn": 512, "shared": 1, "first_dense": 1}
GATED = {"gated": True, "norm": "rmsnorm", "positions": "rotary", "tied": False}
MODEL = {"name": "m", "hidden": 512, "layers": 4, "heads": 8, "vocabulary": 32000, "context": 1024, "experts": MIXTURE} | GATED
FP8: dict[str, Any] = {"scaling": "tensorwise", "gather": True}


def gathers(**plan: Any) -> list[Op]:
    given = {"data_parallel": "zero3", "sequence": 1024, "accumulation": 1, **plan}
    job = read_job(model=MODEL, cluster="dgx-h100", nodes=1, plan=given)
    ops = lower(job.model, job.resolve()).cohorts[0].ops
    return [op for op in ops if isinstance(op.work, Collective) and op.work.operation == "all_gather" and op.work.axis == "dp"]


@pytest.mark.parametrize("kernels", ["megatron", "compiled"])
@pytest.mark.parametrize("plan", [{}, {"ep": 4}, {"fp8": FP8}, {"fp8": FP8, "ep": 4}], ids=str)
def test_gathered_bytes_are_those_of_the_collectives(kernels: str, plan: dict[str, Any]) -> None:
    """A layer's dense parameters and its experts may have different widths, and come by one collective each."""
    brought = allocated = 0.0
    for op in gathers(kernels=kernels, **plan):
        assert isinstance(op.work, Collective)
        brought += op.work.bytes * op.work.repeat
        allocated += sum(size for kind, size in op.allocate if kind == "temporary")
    assert allocated == pytest.approx(brought, rel=1e-12)


def test_of_matrices_in_fp8_half_of_the_bytes_are_gathered() -> None:
    """torchao's gathers: a matrix of a layer is one byte per parameter, a norm two; router and head stay as they are."""
    wide, narrow = (
        {op.work.width for op in gathers(kernels="compiled", ep=4, **more) if isinstance(op.work, Collective)}
        for more in ({}, {"fp8": FP8})
    )
    assert wide == {2.0}
    assert min(narrow) >= 1.0
    assert max(narrow) == 2.0
    assert len(narrow) > 2


@pytest.mark.parametrize("hook", ["zero1", "zero2"])
def test_a_single_copy_gathers_nothing_after_its_update(hook: str) -> None:
    assert gathers(data_parallel=hook, tp=8, sequence_parallel=True) == []
    assert gathers(data_parallel=hook, tp=4, sequence_parallel=True)


def test_kept_units_are_gathered_once(toy_job: Any) -> None:
    """Of six parts the root's two, and the last layer, stay from the forward to the backward pass, or the head does."""

    def moved(**plan: Any) -> tuple[int, list[str]]:
        job = toy_job(2, model={"tied": False}, data_parallel="zero3", kernels="torch", **plan)
        works = [op.work for op in lower(job.model, job.resolve()).cohorts[0].ops if not isinstance(op.work, Block)]
        names = [work.operation for work in works if isinstance(work, Collective) and work.axis == "dp"]
        return names.count("all_gather"), names[-2:]

    assert moved() == (12, ["reduce_scatter"] * 2)
    assert moved(keep_last_unit=True) == (11, ["reduce_scatter"] * 2)
    assert moved(root_unit=True)[0] == 10
    assert moved(root_unit=True, keep_last_unit=True)[0] == 9


def test_the_root_unit_is_gathered_before_all_and_reduced_after_all(toy_job: Any) -> None:
    job = toy_job(2, model={"tied": False}, data_parallel="zero3", kernels="torch", root_unit=True)
    ops = lower(job.model, job.resolve()).cohorts[0].ops
    order = [op.work.operation if isinstance(op.work, Collective) else op.work.name for op in ops]
    assert order[:3] == ["all_gather", "all_gather", "all_gather"]  # embedding, head and the first layer, ahead
    assert order[order.index("forward") - 3 : order.index("forward")] == ["all_gather"] * 3
    last = len(order) - order[::-1].index("backward")
    assert order[last : last + 2] == ["reduce_scatter"] * 2
    assert order[:last].count("reduce_scatter") == 4  # of the layers


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"root_unit": True, "data_parallel": "ddp"}, "root_unit=true contradicts data_parallel=ddp"),
        ({"keep_last_unit": True, "flat_parameters": True}, "keep_last_unit=true contradicts flat_parameters=true"),
        ({"root_unit": True, "pp": 2}, "root_unit=true contradicts pp=2"),
        ({"keep_last_unit": True, "reshard": False}, "keep_last_unit=true contradicts reshard=false"),
        ({"root_unit": True, "deepspeed": {}}, "root_unit=true contradicts data_parallel=zero3, deepspeed"),
    ],
)
def test_kept_units_are_fsdp2_s(plan: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        gathers(kernels="torch", **plan)
