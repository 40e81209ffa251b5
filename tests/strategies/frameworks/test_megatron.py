"""Megatron-LM's arguments, one by one, against the plans and models that its arguments.py describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strategies.frameworks.settings import ReadSettings, frameworks
from strategies.read_job import read_job
from topologies.reading import UserError

SIZES = "--num-layers 12 --hidden-size 768 --num-attention-heads 12"
BATCH = "--micro-batch-size 2 --global-batch-size 64 --seq-length 1024"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def reading(flags: str = "", start: str = "torchrun pretrain_gpt.py") -> ReadSettings:
        script = tmp_path / "pretrain.sh"
        script.write_text(f"{start} {SIZES} {BATCH} {flags}\n")
        return frameworks["megatron"].read(script)

    return reading


def written(changes: dict[str, Any] | None = None, **plan: Any) -> list[str]:
    """Arguments that are written for 2 nodes of 8 GPUs, each with its value."""
    given = {"auto": False, "global_batch": 64, "sequence": 4096} | plan
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=2, plan=given, overrides=changes or {})
    lines = frameworks["megatron"].write(job).text.split(" \\\n    ")
    return [line.strip() for line in lines[1:]]


def test_copies_of_the_distributed_optimizer(read: Any) -> None:
    """--num-distributed-optimizer-instances: dp = 32 / 2 ranks in 4 instances of 4, whose shards are summed; written again."""
    start, flags = "torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py", "--tensor-model-parallel-size 2"
    copies = " --use-distributed-optimizer --num-distributed-optimizer-instances 4"
    assert read(flags + copies, start).plan["shard"] == 4
    assert "shard" not in read(flags + " --num-distributed-optimizer-instances 4", start).plan  # of DDP
    for given, message in ((copies.replace(" 4", " 3"), "=3 does not divide dp=16"), (copies, "=4 needs --nnodes and --nproc")):
        with pytest.raises(UserError, match=message):
            read(flags + given, start if "3" in given else "torchrun pretrain_gpt.py")
    assert "--num-distributed-optimizer-instances 2" in written(data_parallel="zero1", shard=8)
    assert not [line for line in written(data_parallel="zero1") if "instances" in line]


def test_pytorch_s_fsdp_in_megatron(read: Any) -> None:
    plan = read("--use-torch-fsdp2").plan
    assert (plan["data_parallel"], plan["reshard"]) == ("zero3", True)
    assert read("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward").plan["reshard"] is False


def test_defaults(read: Any) -> None:
    settings = read()
    assert settings.plan == {
        "microbatch": 2,
        "global_batch": 64,
        "sequence": 1024,
        "precision": "fp32",
        "data_parallel": "ddp",
        "overlap": False,
        "overlap_p2p": True,
        "sequence_parallel": False,
        "attention": "flash",
        "clip_gradients": True,
        "optimizer": "adam",
        "order": "tp-cp-ep-dp-pp",
        "loss": "operators",
        "recompute": "none",
    }
    assert settings.model == {
        "name": "megatron",
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "context": 1024,
        "vocabulary": 50257,
        "gated": False,
        "tied": True,
        "norm": "layernorm",
        "positions": "learned",
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
        "dropout": True,
        "attention_dropout": True,
        "vocabulary_multiple": 128,
    }
    assert (settings.nodes, settings.gpus) == (None, None)


def test_numbers_of_nodes_and_gpus(read: Any) -> None:
    settings = read(start="torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py")
    assert (settings.nodes, settings.gpus) == (4, 32)
    assert read(start="torchrun --nproc-per-node 8 pretrain_gpt.py").gpus is None


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ("--bf16", {"precision": "bf16", "gradients": "fp32"}),  # Megatron-LM sums bf16 gradients in fp32
        ("--bf16 --grad-reduce-in-bf16", {"precision": "bf16", "gradients": None}),
        ("--fp16", {"precision": "fp16", "gradients": None}),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", {"precision": "fp16", "gradients": "fp32"}),
        ("--bf16 --ddp-bucket-size 1000", {"bucket": "4000 B"}),
        ("--fp16 --ddp-bucket-size 1000", {"bucket": "2000 B"}),
        ("--use-distributed-optimizer", {"data_parallel": "zero1"}),
        ("--data-parallel-sharding-strategy optim_grads", {"data_parallel": "zero2"}),
        ("--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer", {"data_parallel": "zero3"}),
        ("--overlap-grad-reduce", {"overlap": True}),
        ("--no-overlap-p2p-communication", {"overlap_p2p": False}),
        ("--use-tp-pp-dp-mapping", {"order": "tp-cp-ep-pp-dp"}),
        ("--tensor-model-parallel-size 2 --sequence-parallel", {"tp": 2, "sequence_parallel": True}),
        ("--tensor-model-parallel-size 1 --sequence-parallel", {"tp": 1, "sequence_parallel": False}),
        ("--tensor-model-parallel-size 2 --tp-comm-overlap", {"tp": 2, "overlap_tp": "pieces"}),
        ("--tensor-model-parallel-size 1 --tp-comm-overlap", {"overlap_tp": None}),
        ("--context-parallel-size 2 --cp-comm-type a2a", {"cp": 2, "cp_method": "ulysses"}),
        ("--context-parallel-size 2 --cp-comm-type all_gather", {"cp": 2, "cp_method": "all_gather"}),
        ("--context-parallel-size 1", {"cp": 1, "cp_method": None}),
        ("--attention-backend unfused", {"attention": "materialised"}),
        ("--clip-grad 0", {"clip_gradients": False}),
        ("--clip-grad 0.5", {"clip_gradients": True}),
        ("--optimizer sgd", {"optimizer": "momentum"}),
        ("--optimizer sgd --sgd-momentum 0", {"optimizer": "sgd"}),
        ("--sgd-momentum 0", {"optimizer": "adam"}),
        ("--cross-entropy-loss-fusion", {"loss": None}),
        ("--deterministic-mode", {"loss": None, "deterministic": True}),
        ("--fp8-format hybrid", {"fp8": {"scaling": "delayed", "gather": False}}),
        (
            "--fp8-format hybrid --tp-only-amax-red",
            {"fp8": {"scaling": "delayed", "gather": False, "amax_reduction": "tp"}},
        ),
        (
            "--fp8-format hybrid --fp8-dot-product-attention",
            {"fp8": {"scaling": "delayed", "gather": False, "attention": True}},
        ),
        (
            "--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
            {"fp8": {"scaling": "delayed", "gather": False, "layers_at_start_in_bf16": 1, "layers_at_end_in_bf16": 2}},
        ),
        ("--fp8-format hybrid --num-layers-at-end-in-bf16 2", {"fp8": {"scaling": "delayed", "gather": False}}),
        (
            "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
            {"fp8": {"scaling": "blockwise", "gather": True}},
        ),
        ("--fp4-format e2m1 --fp4-param-gather", {"fp8": {"scaling": "nvfp4", "gather": True}}),
        (
            "--fp4-format e2m1 --fp8-dot-product-attention",
            {"fp8": {"scaling": "nvfp4", "gather": False, "attention": True}},
        ),
        ("--no-gradient-accumulation-fusion", {"accumulation_fusion": False}),
        ("--no-check-for-nan-in-loss-and-grad", {"framework": {"check_gradients": False}}),
        ("--ddp-average-in-collective", {"framework": {"average_in_collective": True}}),
        (
            "--use-distributed-optimizer --ddp-pad-buckets-for-high-nccl-busbw",
            {"framework": {"pad_buckets_for_high_nccl_busbw": True}},
        ),
        (
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            {"framework": {"overlap_param_gather": True}},
        ),
        ("--moe-router-fusion", {"framework": {"router_fusion": True}}),
        ("--cuda-graph-impl full_iteration", {"framework": {"cuda_graph": True}}),
        ("--cuda-graph-impl transformer_engine", {"framework": None}),  # of parts of layers
        ("--ddp-pad-buckets-for-high-nccl-busbw", {"framework": None}),  # which pads nothing without that optimizer
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16", {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp32"}),
        ("--exp-avg-dtype bf16", {"exp_avg_dtype": None}),  # which the flag turns on
        ("--expert-tensor-parallel-size 1", {"expert_tp": 1}),
        # megatron/training/arguments.py: --moe-token-dispatcher-type has the default allgather
        ("--num-experts 8 --expert-model-parallel-size 4", {"token_dispatcher": "allgather"}),
        ("--num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel", {"token_dispatcher": "allgather"}),
        ("--num-experts 8", {"token_dispatcher": None}),
        ("--num-experts 8 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall", {"token_dispatcher": None}),
        ("--moe-expert-capacity-factor 1.25", {"capacity_factor": 1.25, "pad_to_capacity": None}),
        ("--moe-pad-expert-input-to-capacity", {"pad_to_capacity": True}),
    ],
)
def test_arguments_of_a_plan(read: Any, flags: str, plan: dict[str, Any]) -> None:
    fields = read(flags).plan
    assert {name: fields.get(name) for name in plan} == plan


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ("--recompute-activations", {"recompute": "selective"}),
        ("--recompute-granularity full", {"recompute": "full"}),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", {"recompute": "full"}),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2},
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            {"recompute": "full", "recompute_method": "block", "recompute_layers": 1},
        ),
        ("--recompute-granularity selective --recompute-modules core_attn", {"recompute": "selective"}),
        (
            "--recompute-granularity selective --recompute-modules moe-act mlp",
            {"recompute": "selective", "recompute_modules": ["moe_act", "mlp"]},
        ),
        ("--recompute-granularity full --recompute-modules mlp", {"recompute": "full"}),
    ],
)
def test_recomputation(read: Any, flags: str, plan: dict[str, Any]) -> None:
    assert {name: value for name, value in read(flags).plan.items() if name.startswith("recompute")} == plan


def test_activations_of_some_layers_on_the_cpus(read: Any) -> None:
    assert read("--cpu-offloading-num-layers 3").plan["offload_activations"] == 3
    assert "offload_activations" not in read("--cpu-offloading-num-layers 0").plan
    assert "offload_activations" not in read("").plan


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ("--num-virtual-stages-per-pipeline-rank 3", {"schedule": "interleaved", "chunks": 3}),
        ("--num-virtual-stages-per-pipeline-rank 1", {}),
        ("--num-layers-per-virtual-pipeline-stage 1", {"schedule": "interleaved", "chunks": 3}),  # 12 layers over 4 stages
        ("--num-layers-per-virtual-pipeline-stage 3", {}),
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4", {"layers_per_stage": [2, 3, 3, 4]}),
        ("--decoder-first-pipeline-num-layers 3", {"layers_per_stage": [3, 3, 3, 3]}),
        ("--decoder-last-pipeline-num-layers 0", {}),
        ("--account-for-embedding-in-pipeline-split", {"embedding_as_layer": True}),
        ("--account-for-loss-in-pipeline-split", {"loss_as_layer": True}),
    ],
)
def test_layers_over_four_stages(read: Any, flags: str, plan: dict[str, Any]) -> None:
    fields = read(f"--pipeline-model-parallel-size 4 {flags}").plan
    names = ("schedule", "chunks", "layers_per_stage", "embedding_as_layer", "loss_as_layer")
    assert {name: fields[name] for name in names if name in fields} == plan


def test_the_ends_of_a_pipeline_count_when_layers_are_dealt_out(read: Any) -> None:
    """14 layers with the ends are 7 for each of 2 stages: 7 chunks of one."""
    ends = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    each = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
    assert read(f"{ends} {each} 1").plan["chunks"] == 7
    with pytest.raises(UserError, match="2 stages · 2 do not divide num-layers=12 and 2 ends"):
        read(f"{ends} {each} 2")
    with pytest.raises(UserError, match="2 stages · 5 do not divide num-layers=12$"):
        read(f"{each} 5")


@pytest.mark.parametrize(
    "flags",
    [
        "--decoder-first-pipeline-num-layers 1",  # 11 layers over 3
        "--decoder-first-pipeline-num-layers 3 --num-virtual-stages-per-pipeline-rank 2",
    ],
)
def test_layers_that_do_not_spread_are_refused(read: Any, flags: str) -> None:
    with pytest.raises(UserError, match="do not spread evenly over 4 stages"):
        read(f"--pipeline-model-parallel-size 4 {flags}")


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        ("--disable-bias-linear", {"attention_bias": False, "output_bias": False, "mlp_bias": False}),
        ("--disable-bias-linear --add-qkv-bias", {"attention_bias": True, "output_bias": False, "mlp_bias": False}),
        ("--swiglu --normalization RMSNorm", {"gated": True, "norm": "rmsnorm"}),
        ("--untie-embeddings-and-output-weights", {"tied": False}),
        ("--position-embedding-type rope --qk-layernorm", {"positions": "rotary", "qk_norm": True}),
        ("--hidden-dropout 0 --attention-dropout 0.0", {"dropout": False, "attention_dropout": False}),
        ("--vocab-size 1000 --make-vocab-size-divisible-by 64", {"vocabulary": 1000, "vocabulary_multiple": 64}),
        ("--tensor-model-parallel-size 4", {"vocabulary_multiple": 512}),
        ("--group-query-attention --num-query-groups 4", {"kv_heads": 4}),
        ("--num-query-groups 4", {"kv_heads": None}),
        ("--max-position-embeddings 4096", {"context": 4096}),
        ("--num-experts 8", {"experts": dict(experts=8, chosen=2, ffn=3072, first_dense=0, router_bias=False)}),
        (
            "--num-experts 8 --moe-router-topk 4 --ffn-hidden-size 1000 --moe-router-enable-expert-bias",
            {"experts": dict(experts=8, chosen=4, ffn=1000, first_dense=0, router_bias=True)},
        ),
        (
            "--num-experts 8 --moe-ffn-hidden-size 500 --moe-shared-expert-intermediate-size 700 "
            '--moe-layer-freq "([0]*3+[1]*9)"',
            {"experts": dict(experts=8, chosen=2, ffn=500, shared=1, shared_ffn=700, first_dense=3, router_bias=False)},
        ),
        (
            "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 32 --kv-channels 64",
            {"latent": dict(kv_rank=16, nope_head_dim=32), "head_dim": None},
        ),
        ("--kv-channels 64", {"head_dim": 64, "latent": None}),
    ],
)
def test_arguments_of_a_model(read: Any, flags: str, model: dict[str, Any]) -> None:
    fields = read(flags).model
    assert {name: fields.get(name) for name in model} == model


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--clip-grad often", "--clip-grad='often' must be a number"),
        ('--num-experts 8 --moe-layer-freq "([1]*3+[0]*9)"', "only dense layers before all with experts"),
    ],
)
def test_wrong_values_are_named(read: Any, flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(flags)


@pytest.mark.parametrize(
    ("plan", "there", "absent"),
    [
        ({}, ["--bf16", "--grad-reduce-in-bf16", "--overlap-grad-reduce", "--hidden-dropout 0"], ["--use-distributed-optimizer"]),
        ({"gradients": "fp32"}, ["--bf16"], ["--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"]),
        ({"precision": "fp16", "gradients": "fp32"}, ["--fp16", "--accumulate-allreduce-grads-in-fp32"], ["--bf16"]),
        ({"data_parallel": "zero1"}, ["--use-distributed-optimizer"], ["--use-megatron-fsdp", "--overlap-param-gather"]),
        ({"data_parallel": "zero1", "overlap_param_gather": True}, ["--overlap-param-gather"], []),
        ({"router_fusion": True}, ["--moe-router-fusion"], ["--cuda-graph-impl full_iteration"]),
        ({"cuda_graph": True}, ["--cuda-graph-impl full_iteration"], []),
        ({"data_parallel": "zero2"}, ["--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads"], []),
        ({"data_parallel": "zero1", "bucket": "4 MB", "gradients": "fp32"}, ["--ddp-bucket-size 1000000"], []),
        ({"data_parallel": "zero3"}, ["--data-parallel-sharding-strategy optim_grads_params"], ["--ddp-bucket-size 1000000"]),
        ({"cp": 2, "cp_method": "ulysses"}, ["--cp-comm-type a2a", "--context-parallel-size 2"], []),
        ({"attention": "materialised"}, ["--attention-backend unfused"], ["--cp-comm-type p2p"]),
        ({"dropout": True}, ["--hidden-dropout 0.1", "--attention-dropout 0.1"], []),
        ({"optimizer": "sgd"}, ["--optimizer sgd", "--sgd-momentum 0"], ["--cpu-offloading-num-layers 2"]),
        ({"offload_activations": 2, "kernels": "megatron"}, ["--cpu-offloading-num-layers 2"], []),
        ({"optimizer": "momentum"}, ["--optimizer sgd"], ["--sgd-momentum 0"]),
        ({"clip_gradients": False}, ["--clip-grad 0"], []),
        ({"deterministic": True}, ["--deterministic-mode"], ["--cross-entropy-loss-fusion"]),
        ({"loss": "operators"}, [], ["--cross-entropy-loss-fusion"]),
        ({"order": "tp-cp-ep-pp-dp", "overlap_p2p": False}, ["--use-tp-pp-dp-mapping", "--no-overlap-p2p-communication"], []),
        ({"recompute": "full"}, ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"], []),
        ({"recompute": "selective"}, ["--recompute-granularity selective"], ["--recompute-method uniform"]),
        (
            {"pp": 4, "accumulation": 8, "global_batch": None, "layers_per_stage": [6, 9, 9, 8]},
            ["--decoder-first-pipeline-num-layers 6", "--decoder-last-pipeline-num-layers 8"],
            [],
        ),
        ({"pp": 4}, ["--pipeline-model-parallel-size 4"], ["--decoder-first-pipeline-num-layers 8"]),
        (
            {"pp": 2, "schedule": "interleaved", "chunks": 4},
            ["--num-virtual-stages-per-pipeline-rank 4"],
            ["--decoder-first-pipeline-num-layers 4"],
        ),
        (
            {"exp_avg_dtype": "bf16", "data_parallel": "zero1"},
            ["--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype fp32"],
            [],
        ),
        ({"accumulation_fusion": False}, ["--no-gradient-accumulation-fusion"], ["--use-precision-aware-optimizer"]),
        (
            {"fp8": {"scaling": "delayed", "layers_at_end_in_bf16": 2}},
            ["--first-last-layers-bf16", "--num-layers-at-start-in-bf16 0", "--num-layers-at-end-in-bf16 2"],
            [],
        ),
        ({"fp8": {"scaling": "delayed", "attention": True}}, ["--fp8-dot-product-attention"], ["--fp8-param-gather"]),
        ({"fp8": {"scaling": "delayed", "amax_reduction": "tp"}}, ["--tp-only-amax-red"], []),
        ({"fp8": {"scaling": "delayed"}}, ["--fp8-recipe delayed"], ["--tp-only-amax-red"]),
        ({"fp8": {"scaling": "blockwise"}}, ["--fp8-format hybrid", "--fp8-recipe blockwise"], ["--fp8-param-gather"]),
    ],
)
def test_what_is_written(plan: dict[str, Any], there: list[str], absent: list[str]) -> None:
    lines = written(**plan)
    assert [flag for flag in there if flag not in lines] == []
    assert [flag for flag in absent if flag in lines] == []


def test_what_is_written_of_the_model() -> None:
    """Llama-3.1 8B: 128,256 words, 8 key-value heads, no biases."""
    lines = written()
    for flag in (
        "--num-layers 32",
        "--hidden-size 4096",
        "--ffn-hidden-size 14336",
        "--num-attention-heads 32",
        "--kv-channels 128",
        "--vocab-size 128256",
        "--group-query-attention",
        "--num-query-groups 8",
        "--position-embedding-type rope",
        "--normalization RMSNorm",
        "--swiglu",
        "--untie-embeddings-and-output-weights",
        "--disable-bias-linear",
    ):
        assert flag in lines
    assert not {"--add-qkv-bias", "--qk-layernorm", "--multi-latent-attention"} & set(lines)
    assert "--max-position-embeddings 131072" in lines
    assert "--group-query-attention" not in written({"model.kv_heads": 32})
    assert "--add-qkv-bias" in written({"model.attention_bias": True})


def test_layers_of_virtual_stages_mean_nothing_where_layers_are_not_said(tmp_path: Path) -> None:
    """The number of chunks is that of layers divided by these and the ranks; a script may leave the model to a checkpoint."""
    script = tmp_path / "pretrain.sh"
    flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3"
    script.write_text(f"torchrun pretrain_gpt.py {BATCH} --hidden-size 768 --num-attention-heads 12 {flags}\n")
    assert not {"schedule", "chunks"} & frameworks["megatron"].read(script).plan.keys()
    script.write_text(f"torchrun pretrain_gpt.py {BATCH} {SIZES} {flags}\n")
    plan = frameworks["megatron"].read(script).plan
    assert (plan["schedule"], plan["chunks"]) == ("interleaved", 12 // 2 // 3)


@pytest.mark.parametrize("change", [{"model.qk_norm": "whole"}, {"model.positions": "alibi"}])
def test_models_without_arguments_are_not_written(change: dict[str, Any]) -> None:
    (field, value) = next(iter(change.items()))
    with pytest.raises(UserError, match=f"{field.removeprefix('model.')}={value}.* have no arguments of Megatron-LM"):
        written([f"{field}={value}"])
