"""What others call fields and values is understood, or answered with the right name."""

from __future__ import annotations

import pytest

from shardyard import UserError, read_job
from strategies.data_parallel import hooks
from strategies.models.fields import OTHER_NAMES
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.synonyms import FIELDS, HOOKS, SCHEDULES, UNLIKE
from strategies.schedules import schedules
from topologies.reading import build, folded


@pytest.mark.parametrize(
    ("field", "given", "meant"),
    [
        *(("data_parallel", name, "zero3") for name in ("FSDP", "fsdp2", "ZeRO3", "ZeRO-3", "zero_3", "Zero 3")),
        ("data_parallel", "DDP", "ddp"),
        ("schedule", "1F1B", "1f1b"),
        ("schedule", "GPipe", "gpipe"),
        ("schedule", "ZB-H1", "zb-h1"),
        ("schedule", "interleaved_1f1b", "interleaved"),
        ("schedule", "ScheduleZBVZeroBubble", "zb-v"),
        ("data_parallel", "zero_stage_2", "zero2"),
        ("data_parallel", "DistributedDataParallel", "ddp"),
        *(("precision", name, "bf16") for name in ("bfloat16", "BF16", "BFloat16")),
        ("precision", "half", "fp16"),
        ("precision", "float32", "fp32"),
        ("optimizer", "AdamW", "adam"),
        ("optimizer", "SGD", "sgd"),
    ],
)
def test_values_are_understood(field: str, given: str, meant: str) -> None:
    assert getattr(build(Plan, {field: given}, "plan"), field) == meant


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("tensor_parallel", "tp"),
        ("tensor-model-parallel-size", "tp"),
        ("micro_batch_size", "microbatch"),
        ("gradient_accumulation_steps", "accumulation"),
        ("seq_length", "sequence"),
        ("activation_checkpointing", "recompute"),
        ("sp", "sequence_parallel"),
    ],
)
def test_fields_are_answered_with_their_name(given: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"plan: unknown field '{given}'; here it is '{meant}'"):
        build(Plan, {given: 1}, "plan")


@pytest.mark.parametrize(
    ("field", "given", "rule"),
    [
        ("data_parallel", "HSDP", "is zero3 with shard"),
        ("data_parallel", "deepspeed", "deepspeed: {}"),
        ("data_parallel", "ZeRO", "zero1, zero2 or zero3"),
        ("precision", "fp8", "plan.fp8={}"),
        ("recompute", True, "must be one of none, selective, operators, full"),
    ],
)
def test_values_that_are_said_in_another_way_are_told(field: str, given: object, rule: str) -> None:
    with pytest.raises(UserError, match=f"plan: {field}=.*{rule}"):
        build(Plan, {field: given}, "plan")


def test_a_field_of_a_node_is_found_from_the_cluster() -> None:
    with pytest.raises(UserError, match="unknown field 'gpu'; here it is 'node.gpu'"):
        read_job(model="gpt2-1.5b", cluster="dgx-h100", overrides={"cluster.gpu": "h200-sxm"})


def test_a_name_that_is_part_of_one_means_it() -> None:
    """H200 looks more like gb200, and is h200-sxm."""
    with pytest.raises(UserError, match="unknown GPU 'H200'; did you mean 'h200-sxm'"):
        read_job(model="gpt2-1.5b", cluster="dgx-h100", overrides={"cluster.node.gpu": "H200"})


def test_what_is_meant_is_there() -> None:
    assert set(SCHEDULES.values()) <= set(schedules)
    assert set(HOOKS.values()) <= set(hooks)
    assert not {*HOOKS, *UNLIKE} & {folded(name) for name in hooks}
    assert not set(SCHEDULES) & {folded(name) for name in schedules}


def test_fields_of_a_model_too() -> None:
    with pytest.raises(UserError, match="unknown field 'num_attention_heads'; here it is 'heads'"):
        read_job(model="gpt2-1.5b", cluster="dgx-h100", overrides={"model.num_attention_heads": 8})


def test_hints_name_fields_and_no_field_is_a_hint() -> None:
    assert set(FIELDS.values()) <= set(Plan.model_fields)
    assert set(OTHER_NAMES.values()) <= set(Model.model_fields)
    assert not set(FIELDS) & set(Plan.model_fields)


def test_unknown_values_are_refused_with_what_there_is() -> None:
    with pytest.raises(UserError, match="unknown schedule 'gpip'; did you mean 'gpipe'"):
        build(Plan, {"schedule": "gpip"}, "plan")
    with pytest.raises(UserError, match="precision='int8'"):
        build(Plan, {"precision": "int8"}, "plan")
