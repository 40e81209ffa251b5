"""A plan is completed, or refused with the formula and the numbers."""

from __future__ import annotations

import pytest

from reports.glossary import explain
from shardyard import read_job
from strategies.plan.plan import Plan
from topologies.reading import UserError, build

MISTAKES = [
    (dict(tp=4, pp=2, dp=3), 4, "tp·pp·dp = 4·2·3 = 24 ≠ 32 GPUs"),
    (dict(tp=3, pp=2), 8, "tp·pp = 3·2 = 6 does not divide 64 GPUs"),
    (dict(data_parallel="hsdp"), 1, "data_parallel='hsdp': is zero3 with shard"),
    (dict(tp=3), 3, "tp=3 does not divide 32 attention heads"),
    (dict(pp=64), 8, "pp=64 stages exceed 32 layers"),
    (dict(global_batch=33), 1, "global_batch=33 is not a multiple of dp·microbatch = 8·1; 32 and 40 are"),
    (dict(global_batch=32, accumulation=2, microbatch=1), 1, "global_batch=32 ≠ dp·microbatch·accumulation = 8·1·2 = 16"),
    (dict(sequence_parallel=True), 1, "sequence_parallel=true needs tp > 1"),
    (dict(pp=2, layers_per_stage=[16, 15]), 1, "2 stages and 31 layers ≠ pp=2, 32 layers"),
    (dict(tpp=2), 1, "unknown field 'tpp'; did you mean 'tp'?"),
    (dict(sync_norm=True, data_parallel="local_sgd", local_steps=2), 1, "sync_norm=true contradicts local_steps=2"),
    (dict(tp=0), 1, "tp=0: input should be greater than 0"),
    (dict(schedule="1f1d"), 1, "unknown schedule '1f1d'; did you mean '1f1b'?"),
    (dict(data_parallel="zero4"), 1, "unknown data_parallel 'zero4'"),
    (dict(bucket=25), 1, "needs a unit"),
    (dict(algorithm="rong"), 1, "'rong' is not an algorithm of any collective; did you mean 'ring'?"),
    (dict(algorithm="all_reduce/rong"), 1, "is not an algorithm of any collective; did you mean"),
    (dict(algorithm="ring/ll12"), 1, "unknown protocol 'll12'; did you mean 'll128'?"),
    (dict(shard=4), 1, "shard=4 contradicts data_parallel=ddp, which shards nothing"),
    (dict(blocking_launches=True), 1, "blocking_launches=true contradicts overlap=true"),
    (dict(blocking_launches=True, overlap=False, tp=2), 2, "blocking_launches=true contradicts overlap_tp=weight_gradient"),
    (dict(blocking_launches=True, overlap=False, data_parallel="zero3"), 1, "data_parallel=zero3 is not simulated"),
    (dict(shard=3, data_parallel="zero3"), 1, "shard=3 must be at least 2 and divide dp=8"),
    (dict(reshard=False, data_parallel="zero1"), 1, "reshard=false contradicts data_parallel=zero1"),
    (dict(order="tp-dp"), 1, "must name each of"),
    (dict(precision="int4"), 1, "precision='int4'"),
]


@pytest.mark.parametrize(("plan", "nodes", "message"), MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes_are_one_line_with_the_rule(plan, nodes, message) -> None:
    with pytest.raises(UserError) as caught:
        read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=nodes, plan={"auto": False} | plan).resolve()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("plan")


@pytest.mark.parametrize(("model", "tokens"), [("llama-3.1-8b", 8192), ("gpt3-175b", 2048)])
def test_a_sequence_is_the_models_context_but_no_more_than_8192_tokens_by_default(model, tokens) -> None:
    job = read_job(model=model, cluster="dgx-h100", plan={"auto": False, "kernels": "compiled"})
    assert job.resolve().sequence == tokens
    assert any("8,192 tokens by default, of the model's 131,072" in note for note in job.notes) == (model == "llama-3.1-8b")
    assert (
        read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"auto": False, "sequence": 131072}).resolve().sequence == 131072
    )


def test_fsdp_is_another_name_of_zero3() -> None:
    assert Plan(data_parallel="fsdp") == Plan(data_parallel="zero3")
    assert "explain zero3" in explain("fsdp")


def test_layers_are_placed_not_floored() -> None:
    """Llama 3 405B: 126 layers over 16 stages, one fewer on the first and the last (arXiv:2407.21783, section 3.3.2)."""
    job = read_job(model="llama-3.1-405b", cluster="dgx-h100", nodes=2048, plan=dict(tp=8, pp=16))
    assert job.resolve().layers == (7, *[8] * 14, 7)


@pytest.mark.parametrize(("layers", "pp"), [(126, 16), (96, 8), (7, 3), (5, 5), (80, 12)])
def test_every_layer_is_on_one_stage(layers, pp) -> None:
    job = read_job(
        model="llama-3.1-8b", cluster="dgx-h100", nodes=pp, plan=dict(tp=8, pp=pp), overrides=[f"model.layers={layers}"]
    )
    placed = job.resolve().layers
    assert sum(placed) == layers
    assert max(placed) - min(placed) <= 1


def test_defaults_follow_from_the_cluster() -> None:
    plan = read_job(
        model="llama-3.1-8b", cluster="dgx-h100", nodes=4, plan=dict(tp=4, pp=2, global_batch=64, microbatch=2)
    ).resolve()
    assert (plan.dp, plan.microbatches, plan.sequence) == (4, 8, 8192)


def test_zero3_recomputes_layer_by_layer() -> None:
    """It gathers one layer at a time: uniform recomputation of two at once is refused, of one at a time not."""
    for number in (1, 2):
        plan = dict(data_parallel="zero3", recompute="full", recompute_method="uniform", recompute_layers=number)
        job = read_job(model="llama-3.1-8b", cluster="dgx-h100", plan=plan)
        if number == 1:
            assert job.resolve().recompute_layers == 1
        else:
            with pytest.raises(UserError, match="which gathers one layer at a time"):
                job.resolve()


def test_states_are_sixteen_bytes_per_parameter() -> None:
    """Mixed precision Adam: 2 + 2 + 12 (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1)."""
    states = Plan().bytes_of_states
    assert states == {"parameter": 2, "gradient": 2, "optimizer": 12}
    table = {0.32e9: 5.12e9, 17.2e9: 275.2e9, 175e9: 2800e9}  # BERT-large, Turing-NLG, GPT-3
    for parameters, size in table.items():
        assert sum(states.values()) * parameters == pytest.approx(size)


def test_units_at_the_door() -> None:
    assert build(Plan, {"bucket": "25 MiB"}, "plan").bucket == 25 * 2**20
    assert build(Plan, {"bucket": "25 MB"}, "plan").bucket == 25e6


def test_steps_of_up_to_600_000_passes_are_played() -> None:
    """Of two stages 300,000 microbatches, and no more."""
    for batch in (300_000, 300_001):
        job = read_job(model="llama-3.1-8b", cluster="dgx-a100", plan={"pp": 2, "tp": 4, "global_batch": batch})
        if batch > 300_000:
            with pytest.raises(UserError, match=r"microbatches·pp = 300001·2 passes in a step are too many to play"):
                job.resolve()
        else:
            assert job.resolve().microbatches == batch


def test_options_beside_options_that_were_read_before_are_added_to_them():
    before = Plan.model_validate({"kernels": "torch", "set_to_none": False})
    plan = Plan.model_validate({"kernels": "torch", "framework": before.framework, "gradient_as_bucket_view": True})
    said = dict(plan.options)
    assert (said["set_to_none"], said["gradient_as_bucket_view"]) == (False, True)


@pytest.mark.parametrize(("said", "meant"), [("bfloat16", "bf16"), ("BF16", "bf16"), ("half", "fp16"), ("Float32", "fp32")])
def test_pytorch_s_names_of_types_are_understood(said: str, meant: str) -> None:
    assert Plan.model_validate({"precision": said}).precision == meant


def test_a_precision_that_is_no_text_is_refused() -> None:
    with pytest.raises(UserError, match="plan: precision=16: input should be"):
        build(Plan, {"precision": 16}, "plan")
