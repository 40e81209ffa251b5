"""What others call fields and values is understood, or answered with the right name."""

from __future__ import annotations

import pytest

from shardyard import UserError, read_job
from strategies.models.fields import OTHER_NAMES
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.synonyms import FIELDS
from topologies.reading import build


@pytest.mark.parametrize(
    ("field", "given", "meant"),
    [
        *(("data_parallel", name, "zero3") for name in ("FSDP", "fsdp2", "ZeRO3", "ZeRO-3", "zero_3", "Zero 3")),
        ("data_parallel", "DDP", "ddp"),
        ("schedule", "1F1B", "1f1b"),
        ("schedule", "GPipe", "gpipe"),
        ("schedule", "ZB-H1", "zb-h1"),
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
    ],
)
def test_fields_are_answered_with_their_name(given: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"plan: unknown field '{given}'; here it is '{meant}'"):
        build(Plan, {given: 1}, "plan")


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
