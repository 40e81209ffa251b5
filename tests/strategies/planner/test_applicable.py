"""What of a job's plan does not apply to other degrees or another strategy is left out, and what matters is not."""

from __future__ import annotations

from typing import Any

import pytest

from shardyard import UserError, read_job
from strategies.planner.applicable import applicable, stated
from strategies.planner.arguments import as_arguments, differences, settings, stated_otherwise


def job(**plan: Any) -> Any:
    return read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=2, plan={"auto": False, "global_batch": 64} | plan)


def left_out(changes: dict[str, Any], **plan: Any) -> dict[str, Any]:
    return applicable(job(**plan), changes).dropped


def test_fields_are_left_out_where_they_break_a_rule() -> None:
    assert left_out({"tp": 4}, tp=2, sequence_parallel=True) == {}
    assert left_out({"tp": 1}, tp=2, sequence_parallel=True) == {"sequence_parallel": False}
    assert left_out({"data_parallel": "ddp"}, data_parallel="zero3", reshard=False) == {"reshard": True}


def test_without_a_pipeline_there_is_neither_schedule_nor_chunks() -> None:
    plan = {"pp": 2, "schedule": "interleaved", "chunks": 4}
    assert left_out({"pp": 1}, **plan) == {"schedule": "1f1b", "chunks": None}
    assert left_out({"pp": 4}, **plan) == {}
    assert left_out({"pp": 1, "schedule": "gpipe"}, **plan) == {"chunks": None}
    assert left_out({"pp": 1}) == {}


def test_of_a_group_of_fields_the_one_that_is_named_is_left_out() -> None:
    """PyTorch's FSDP gathers in fp8, DDP does not: scaling stays as it was said."""
    fp8 = {"scaling": "tensorwise", "gather": True}
    dropped = left_out({"data_parallel": "ddp"}, data_parallel="zero3", kernels="compiled", fp8=fp8)
    assert dropped.keys() == {"fp8"}
    assert dropped["fp8"].model_dump(exclude_unset=True) == {"scaling": "tensorwise"}


def test_of_options_of_a_framework_the_one_that_is_named_is_left_out() -> None:
    """FSDP1's flat parameters are nothing to DDP; how queries, keys and values are multiplied is the same with both."""
    plan = {"data_parallel": "zero3", "kernels": "torch", "flat_parameters": True, "joined_products": True}
    dropped = left_out({"data_parallel": "ddp"}, **plan)
    assert dropped.keys() == {"framework"}
    assert dropped["framework"].model_dump(exclude_unset=True) == {"joined_products": True}
    alone = left_out({"data_parallel": "ddp"}, **{name: value for name, value in plan.items() if name != "joined_products"})
    assert alone == {"framework": None}


def test_what_is_trained_and_what_the_change_says_is_never_left_out() -> None:
    with pytest.raises(UserError, match="3 does not divide"):
        applicable(job(), {"tp": 3})
    with pytest.raises(UserError, match="sequence_parallel=true needs tp > 1"):
        applicable(job(), {"tp": 1, "sequence_parallel": True})
    with pytest.raises(UserError, match="does not divide"):
        applicable(job(tp=8, pp=2), {"tp": 3, "pp": 1})


def test_what_a_plan_states_is_what_it_has_otherwise_than_by_default() -> None:
    assert stated(job().plan) == ("global_batch",)
    assert set(stated(job(tp=2, pp=1, schedule="1f1b", recompute="full").plan)) == {"tp", "recompute", "global_batch"}


def test_differences_are_fields_of_the_other_plan_and_its_nodes() -> None:
    own, other = job(tp=2), read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=4, plan={"global_batch": 64, "pp": 2})
    assert differences(own, other) == {"nodes": 4, "plan.tp": 1, "plan.pp": 2}
    assert differences(other, own) == {"nodes": 2, "plan.tp": 2, "plan.pp": 1}
    assert differences(own, own) == {}


def test_changes_that_a_job_has_already_need_not_be_said() -> None:
    changes = {"plan.tp": 2, "plan.pp": 2, "nodes": 2, "plan.shard": None, "model.layers": 4, "price": None}
    assert stated_otherwise(job(tp=2), changes) == {"plan.pp": 2, "model.layers": 4, "price": None}
    assert stated_otherwise(job(tp=2), {"plan.tp": None, "nodes": 3}) == {"plan.tp": None, "nodes": 3}


def test_changes_as_arguments_of_a_command() -> None:
    """A bucket of a number is bytes; what a shell would read is quoted."""
    changes = {"plan.tp": 4, "plan.bucket": 1048576.0, "plan.schedule": "a b"}
    assert settings({"plan.bucket": None})[0].startswith("plan.bucket=")
    assert settings(changes)[:2] == ["plan.tp=4", "plan.bucket=1048576.0 B"]
    assert as_arguments({"plan.tp": 4, "plan.bucket": 1048576.0}) == "--set plan.tp=4 --set 'plan.bucket=1048576.0 B'"
