"""Settings of training frameworks are read as plans and written from them; what is not used or not said is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardyard
from shardyard import read_job
from strategies.frameworks.export import export
from strategies.frameworks.settings import ReadSettings, frameworks
from strategies.job import Job
from topologies.reading import UserError

DATA = Path(__file__).parents[2] / "data/frameworks"
EXAMPLES = Path(__file__).parents[3] / "examples"


def read(name: str, file: str, **given: object) -> Job:
    return read_job(**{"cluster": "dgx-a100", f"from_{name}": DATA / file, **given})


def test_a_script_of_megatron_is_a_job() -> None:
    """GPT-3 (Brown et al. 2020, table 2.1) with 96 layers in 16 · 2 virtual stages of 3."""
    job = read("megatron", "gpt3_175b.sh")
    assert round(job.model.parameters / 1e9) == 175
    assert job.model.padded_vocabulary == 51200  # 50257 up to a multiple of 128 · 8, as Narayanan et al. 2021 have it
    assert job.cluster.gpus == 128
    plan = job.resolve()
    assert (job.plan.tp, job.plan.pp, plan.dp, plan.chunks, plan.microbatches) == (8, 16, 1, 2, 1536)
    assert (job.plan.schedule, job.plan.precision, job.plan.overlap) == ("interleaved", "fp16", False)
    assert "--lr" in job.remarks[0]
    assert "--num-layers," not in job.remarks[0]


def test_deepspeed() -> None:
    job = read("deepspeed", "ds_config.json", model="llama-3.1-8b", nodes=2, plan={"sequence": 4096})
    assert (job.plan.data_parallel, job.plan.overlap, job.plan.precision) == ("zero2", True, "bf16")
    assert job.plan.deepspeed.reduce_bucket_size == 2e8
    assert job.resolve().microbatches == 256 // 16 // 4  # train_batch_size = micro batch · accumulation · GPUs
    assert job.plan.sequence == 4096
    ignored = "wall_clock_breakdown, zero_optimization.contiguous_gradients"
    assert ignored in job.remarks[0]


@pytest.mark.parametrize(
    ("said", "together"),
    [
        ({}, True),
        ({"use_multi_rank_bucket_allreduce": False}, False),
        ({"use_multi_rank_bucket_allreduce": False, "reduce_scatter": False}, True),
        ({"reduce_scatter": True}, True),
    ],
)
def test_deepspeed_reduces_to_owners_where_both_of_its_flags_say_so(
    tmp_path: Path, said: dict[str, bool], together: bool
) -> None:
    """deepspeed/runtime/zero/stage_1_and_2.py, average_tensor."""
    file = tmp_path / "ds_config.json"
    zero = {"stage": 2, **said}
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {"enabled": True}}))
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"sequence": 4096}, from_deepspeed=file)
    assert job.plan.deepspeed.use_multi_rank_bucket_allreduce == together
    assert not any("reduce_scatter" in note or "use_multi" in note for note in job.notes)


def test_deepspeed_parts_no_activations_on_one_tensor_rank(tmp_path: Path) -> None:
    """partition_activations stands in many files that have no tensor parallelism, where parts of one rank are the whole."""
    file = tmp_path / "ds_config.json"
    data = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2},
        "activation_checkpointing": {"partition_activations": True},
    }
    given = {"model": "llama-2-7b", "cluster": "dgx-a100", "plan": {"sequence": 2048}, "from_deepspeed": file}
    file.write_text(json.dumps(data))
    job = read_job(**given)
    assert (job.plan.recompute, job.plan.deepspeed.partition_activations) == ("full", False)
    assert any("recomputes all layers; --set plan.recompute=none" in remark for remark in job.remarks)
    assert any("among tp ranks, of which the file has one" in remark for remark in job.remarks)
    file.write_text(json.dumps(data | {"tensor_parallel": {"autotp_size": 2}}))
    assert read_job(**given).plan.deepspeed.partition_activations


def test_accelerate() -> None:
    job = read("accelerate", "fsdp.yaml", model="llama-3.1-8b")
    assert (job.plan.data_parallel, job.plan.shard, job.cluster.nodes) == ("zero3", 8, 2)
    assert job.resolve().replicas == 2
    assert "for 16 GPUs" in read("accelerate", "fsdp.yaml", model="llama-3.1-8b", nodes=4).remarks[1]


def test_torchtitan() -> None:
    job = read("torchtitan", "train.toml", model="llama-3.1-8b", nodes=2)
    assert (job.plan.data_parallel, job.plan.dp, job.plan.shard, job.plan.tp) == ("zero3", 8, 4, 2)
    assert (job.plan.sequence_parallel, job.plan.recompute, job.plan.gradients) == (True, "full", "fp32")
    assert job.plan.kernels == "torch"


@pytest.mark.parametrize(
    ("name", "text", "kernels", "recompute"),
    [
        ("torchtitan", "", "torch", ("full", "every", 2)),  # its default is each second layer
        ("torchtitan", "[compile]\nenable = true", "compiled", ("full", "every", 2)),
        ("torchtitan", "[activation_checkpoint]\nselective_ac_option = 'op'", "torch", ("operators", None, None)),
        ("accelerate", "mixed_precision: bf16", "torch", ("none", None, None)),
        ("accelerate", "dynamo_config: {dynamo_backend: INDUCTOR}", "compiled", ("none", None, None)),
        ("accelerate", "distributed_type: MEGATRON_LM", "megatron", ("none", None, None)),
    ],
)
def test_kernels_are_those_of_the_framework(name: str, text: str, kernels: str, recompute: object, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("[training]\nlocal_batch_size = 1\nseq_len = 1024\n" + text if name == "torchtitan" else text)
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", **{f"from_{name}": file})
    assert job.plan.kernels == kernels
    assert (job.plan.recompute, job.plan.recompute_method, job.plan.recompute_layers) == recompute
    assert not any("kernels=compiled in place of" in remark for remark in job.remarks)


PLANS = [
    ("megatron", dict(tp=8, pp=2, sequence_parallel=True, data_parallel="zero1", gradients="fp32", recompute="full")),
    ("megatron", dict(tp=4, pp=4, schedule="interleaved", chunks=2, precision="fp16", overlap=False)),
    (
        "megatron",
        dict(
            tp=4,
            sequence_parallel=True,
            overlap_tp="pieces",
            recompute="full",
            recompute_method="block",
            recompute_layers=3,
            gradients="fp32",
        ),
    ),
    ("megatron", dict(tp=4, cp=2, cp_method="ulysses", gradients="fp32", order="tp-cp-ep-pp-dp")),
    ("megatron", dict(tp=8, pp=4, layers_per_stage=[7, 9, 9, 7], gradients="fp32")),
    ("megatron", dict(tp=8, gradients="fp32", deterministic=True, check_gradients=False, average_in_collective=True)),
    ("megatron", dict(tp=8, gradients="fp32", data_parallel="zero1", pad_buckets_for_high_nccl_busbw=True)),
    ("megatron", dict(tp=8, gradients="fp32", data_parallel="zero1", overlap_param_gather=True)),
    ("megatron", dict(tp=8, gradients="fp32", loss="operators")),
    ("megatron", dict(tp=8, gradients="fp32", recompute="selective", recompute_modules=["layernorm", "mlp"])),
    ("megatron", dict(gradients="fp32", data_parallel="zero1", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")),
    ("megatron", dict(tp=8, gradients="fp32", optimizer="momentum")),
    ("megatron", dict(tp=8, gradients="fp32", optimizer="sgd")),
    ("deepspeed", dict(data_parallel="zero1", overlap=False, optimizer="sgd", fused_optimizer=False)),
    ("deepspeed", dict(data_parallel="zero1", overlap=False, optimizer="momentum", fused_optimizer=False)),
    ("deepspeed", dict(data_parallel="zero1", overlap=False, fused_optimizer=False)),
    ("torchtitan", dict(data_parallel="zero3", gradients="fp32", kernels="torch", fused_optimizer=False)),
    ("torchtitan", dict(data_parallel="zero3", kernels="torch", master_weights=False)),
    ("deepspeed", dict(data_parallel="zero3", gradients="fp32", accumulation=4)),
    ("deepspeed", dict(data_parallel="zero3", recompute="full", deepspeed={"cpu_checkpointing": True})),
    ("deepspeed", dict(data_parallel="zero3", offload={"optimizer": "nvme", "parameters": "cpu"})),
    ("deepspeed", dict(data_parallel="zero3", deepspeed={"stage3_prefetch_bucket_size": 0, "zero_quantized_weights": True})),
    ("deepspeed", dict(data_parallel="zero1", tp=2, cp=2, cp_method="ulysses", overlap=False)),
    (
        "torchtitan",
        dict(
            data_parallel="zero3",
            shard=8,
            tp=2,
            sequence_parallel=True,
            overlap_tp="none",
            gradients="fp32",
            recompute="operators",
            kernels="compiled",
        ),
    ),
    (
        "torchtitan",
        dict(
            data_parallel="zero3",
            tp=2,
            sequence_parallel=True,
            overlap_tp="pieces",
            gradients="fp32",
            kernels="compiled",
            fp8={"scaling": "rowwise"},
        ),
    ),
    ("torchtitan", dict(data_parallel="zero3", gradients="fp32", kernels="compiled", fp8={"gather": True})),
    ("torchtitan", dict(data_parallel="zero3", gradients="fp32", kernels="compiled", fp8={"scaling": "mxfp8"})),
    ("megatron", dict(tp=4, data_parallel="zero1", gradients="fp32", fp8={"scaling": "blockwise", "gather": True})),
    ("megatron", dict(tp=4, gradients="fp32", fp8={"scaling": "delayed"})),
    (
        "torchtitan",
        dict(pp=2, data_parallel="zero3", reshard=False, accumulation=8, gradients="fp32", kernels="torch"),
    ),
    ("torchtitan", dict(pp=4, schedule="zb-v", accumulation=8, gradients="fp32", kernels="torch")),
    (
        "torchtitan",
        dict(
            data_parallel="zero3",
            recompute="full",
            recompute_method="every",
            recompute_layers=2,
            gradients="fp32",
            kernels="torch",
            offload=dict(optimizer="cpu", parameters="cpu"),
        ),
    ),
    (
        "accelerate",
        dict(
            data_parallel="zero3",
            shard=8,
            reshard=False,
            gradient_sync="last",
            reshard_after_backward=True,
            tp=2,
            overlap_tp="none",
            recompute="full",
            kernels="torch",
        ),
    ),
    ("accelerate", dict(data_parallel="zero3", kernels="compiled", offload=dict(optimizer="cpu", parameters="cpu"))),
    ("accelerate", dict(data_parallel="zero2", deepspeed={}, overlap=False, accumulation=2, kernels="torch")),
    ("accelerate", dict(tp=2, pp=2, accumulation=2, sequence_parallel=True)),
]


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_what_was_written_reads_as_the_same_plan(name: str, plan: dict[str, object], tmp_path: Path) -> None:
    own = {"attention": "sdpa", "complex_rotary": True, "repeated_keys": True} if name == "torchtitan" else {}
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=4, plan={"auto": False, "sequence": 8192, **own, **plan})
    exported = export(name, job)
    file = tmp_path / exported.file
    file.write_text(exported.text)
    outside = {"sequence": 8192, "accumulation": job.resolve().microbatches} if name in ("deepspeed", "accelerate") else {}
    again = read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=4, plan=outside, **{f"from_{name}": file})
    batch = {"accumulation", "global_batch", "dp", "shard", "bucket"} | ({"deepspeed"} if "deepspeed" not in plan else set())
    assert again.plan.model_dump(exclude=batch) == job.plan.model_dump(exclude=batch)
    said, meant = again.resolve(), job.resolve()
    assert (said.dp, said.shards, said.microbatches, said.global_batch) == (
        meant.dp,
        meant.shards,
        meant.microbatches,
        meant.global_batch,
    )


def test_what_cannot_be_said_is_listed_with_what_is_done_instead() -> None:
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"pp": 2, "schedule": "zb-h1", "data_parallel": "zero1"})
    assert "schedule=zb-h1: it has 1f1b" in export("megatron", job).unexpressed
    assert "kernels=megatron: it has compiled" in export("torchtitan", job).unexpressed
    (script,) = [line for line in export("deepspeed", job).unexpressed if "training script" in line]
    assert "pp=2, schedule=zb-h1" in script


@pytest.mark.parametrize("example", ["llama-3.1-70b", "mixtral-8x7b", "hybrids/gpt3-175b", "layers/fp8"])
def test_megatron_says_all_of_a_plan_of_its_own(example: str) -> None:
    job = read_job(EXAMPLES / f"{example}.yaml")
    assert [line for line in export("megatron", job).unexpressed if "data, tokenizer" not in line] == []


@pytest.mark.parametrize("ends", [("embedding",), ("embedding", "loss")])
def test_megatron_says_which_ends_of_a_pipeline_count_as_layers(ends: tuple[str, ...], tmp_path: Path) -> None:
    plan = {"pp": 2} | {f"{end}_as_layer": True for end in ends}
    layers = {"model.layers": 32 - len(ends)}
    text = export("megatron", read_job(model="llama-3.1-8b", cluster="dgx-h100", plan=plan, overrides=layers)).text
    assert [line.strip(" \\") for line in text.splitlines() if "account" in line] == [
        f"--account-for-{end}-in-pipeline-split" for end in ends
    ]
    script = tmp_path / "pretrain.sh"
    script.write_text(text)
    again = read_job(model="llama-3.1-8b", cluster="dgx-h100", from_megatron=script, overrides=layers)
    assert [end for end in ("embedding", "loss") if getattr(again.plan, f"{end}_as_layer")] == list(ends)
    assert (
        again.resolve().layers == read_job(model="llama-3.1-8b", cluster="dgx-h100", plan=plan, overrides=layers).resolve().layers
    )


def test_megatrons_expert_parallel_ranks_are_tp_and_dp_ranks_where_experts_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "pretrain.sh"
    file.write_text(
        "pretrain_gpt.py --tensor-model-parallel-size 2 --expert-model-parallel-size 32 --sequence-parallel "
        "--expert-tensor-parallel-size 1 --micro-batch-size 1 --global-batch-size 16\n"
    )
    job = read_job(model="deepseek-v3", cluster="dgx-h100", nodes=4, from_megatron=file)
    assert (job.resolve().dp, job.plan.ep, job.resolve().expert_copies) == (16, 32, 1)
    exported = export("megatron", job)
    assert "    --expert-model-parallel-size 32 \\" in exported.text.splitlines()
    assert not any("ep" in line.partition("=")[0] for line in exported.unexpressed)


def test_megatron_says_latent_attention_and_dense_layers_before_experts() -> None:
    """DeepSeek-V3's (arXiv:2412.19437): 61 layers, the first 3 dense, queries of rank 1536, keys and values of 512."""
    exported = export("megatron", read_job(EXAMPLES / "hybrids/deepseek-v3.yaml"))
    lines = exported.text.replace(" \\", "").splitlines()
    for flag in ("--q-lora-rank 1536", "--kv-lora-rank 512", '--moe-layer-freq "([0]*3+[1]*58)"', "--multi-latent-attention"):
        assert f"    {flag}" in lines
    assert not any(line.startswith("model.") for line in exported.unexpressed)


def test_a_plan_that_a_framework_would_refuse_is_refused() -> None:
    """Ring attention is in no ds_config.json: without it, 8 GPUs are 4 replicas, which one sequence does not feed."""
    plan = {"tp": 2, "sequence_parallel": True, "cp": 4, "global_batch": 1, "sequence": 8192}
    with pytest.raises(UserError, match="deepspeed cannot run this plan: .*global_batch=1 is not a multiple"):
        export("deepspeed", read_job(model="llama-3.1-8b", cluster="dgx-h100", plan=plan))


def test_a_file_that_is_gone_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> ReadSettings:
        raise UserError(f"{file}: --num-layers 2.5: must be a whole number")

    monkeypatch.setitem(frameworks._things, "megatron", replace(frameworks["megatron"], read=refuse))
    with pytest.raises(UserError, match=r"^megatron cannot run this plan: [\w.-]+: --num-layers 2\.5: must be"):
        export("megatron", read_job(EXAMPLES / "llama-3.1-70b.yaml"))


SCRIPT = """
export HIDDEN=${HIDDEN:-1024}
NODES=${SLURM_NNODES:-"2"}
DISTRIBUTED_ARGS=(--nnodes $NODES --nproc_per_node 8)
MODEL_ARGS=(
    --num-layers 8   # of them all
    --hidden-size ${HIDDEN} --num-attention-heads ${HEADS:-16} --seq-length 2048
    --attention-backend unfused
)
OTHER_ARGS="
    --swiglu \\
    --num-query-groups 4 --group-query-attention
"
if [[ "$TYPE" == "fp8" ]]; then
    FP8_ARGS+=("--fp8-format hybrid" "--fp8-param-gather")
fi
TRAINING_ARGS=(
    --bf16 --grad-reduce-in-bf16 --use-distributed-optimizer
    # --use-tp-pp-dp-mapping
    --micro-batch-size 2 --global-batch-size 64 --sequence-parallel --clip-grad 0.0
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]}
"""


def test_a_script_with_defaults_branches_and_quoted_flags(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    job = read_job(cluster="dgx-h100", from_megatron=file)
    assert (job.cluster.nodes, job.model.hidden, job.model.heads) == (2, 1024, 16)
    assert (job.model.gated, job.model.kv_heads) == (True, 4)
    assert (job.plan.microbatch, job.plan.global_batch, job.plan.sequence) == (2, 64, 2048)
    assert (job.plan.gradients, job.plan.attention, job.plan.clip_gradients) == ("same", "materialised", False)
    assert job.plan.fp8 is not None
    assert job.plan.fp8.gather
    assert not job.plan.sequence_parallel  # Megatron-LM turns it off where tp=1
    assert job.plan.order == "tp-cp-ep-dp-pp"
    assert job.remarks == ()


def test_what_a_trainer_fills_in_has_defaults_and_is_told(tmp_path: Path) -> None:
    """As Hugging Face's Trainer takes it: https://huggingface.co/docs/transformers/deepspeed."""
    file = tmp_path / "ds.json"
    file.write_text("""{"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu"}}}""")
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", from_deepspeed=file)
    assert (job.plan.data_parallel, job.plan.precision, job.plan.microbatch) == ("zero3", "bf16", 1)
    (remark,) = job.remarks
    for said in ("bf16.enabled", "zero_optimization.reduce_bucket_size", "--set plan.microbatch=…"):
        assert said in remark


@pytest.mark.parametrize(
    ("section", "optimizer", "states"),
    [
        ({"type": "AdamW", "params": {"lr": 1e-4}}, ("adam", True), 12),
        ({"type": "Adam", "params": {"torch_adam": True}}, ("adam", False), 12),
        ({"type": "SGD"}, ("sgd", False), 4),
        ({"type": "SGD", "params": {"momentum": 0.9, "lr": "auto"}}, ("momentum", False), 8),
    ],
)
def test_deepspeeds_optimizer_is_the_one_that_is_priced(
    section: dict[str, object], optimizer: object, states: int, tmp_path: Path
) -> None:
    """fp32 masters, and two states per parameter of Adam, one of SGD with momentum, none of SGD; torch.optim's are not fused."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": section}))
    plan = read_job(model="gpt2-1.5b", cluster="dgx-h100", from_deepspeed=file).plan
    assert ((plan.optimizer, plan.fused_optimizer), plan.bytes_of_states["optimizer"]) == (optimizer, states)


def test_accelerate_offloads_with_deepspeed(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    section = "{zero_stage: 2, offload_optimizer_device: cpu, offload_param_device: cpu, gradient_accumulation_steps: 2}"
    file.write_text(f"distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {section}\ntpu_env: []\n")
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", from_accelerate=file)
    assert job.plan.offload is not None
    assert (job.plan.offload.optimizer, job.plan.offload.parameters) == ("cpu", None)  # stage 2 keeps parameters
    assert job.remarks == ()


def test_accelerate_names_a_file_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "steps_per_print": 1}'
    )
    file = tmp_path / "accelerate.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 16\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", from_accelerate=file)
    assert (job.plan.data_parallel, job.plan.microbatch, job.cluster.gpus) == ("zero1", 2, 16)
    assert "steps_per_print" in job.remarks[0]


def test_torchtitan_of_early_2025(tmp_path: Path) -> None:
    """Its batch_size, training.compile and [float8] have other names since."""
    file = tmp_path / "train.toml"
    training = "[training]\nbatch_size = 2\nseq_len = 4096\ncompile = true\n"
    file.write_text(f'[model]\nconverters = "float8"\n{training}[float8]\nenable_fsdp_float8_all_gather = true\n')
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", from_torchtitan=file)
    assert (job.plan.microbatch, job.plan.kernels) == (2, "compiled")
    assert job.plan.fp8 is not None
    assert job.plan.fp8.gather


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("deepspeed", '{"train_batch_size": "auto"}', "'train_micro_batch_size_per_gpu' is required"),
        (
            "megatron",
            "pretrain.py --moe-layer-freq ([0]+[1]*3+[0]) --num-layers 4 --hidden-size 8 --num-attention-heads 1 --num-experts 2",
            "only dense layers before all with experts",
        ),
        ("deepspeed", '{"train_batch_size": 8}', "'train_micro_batch_size_per_gpu' is required"),
        ("deepspeed", '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 4}}', "stage=4 is not known"),
        (
            "deepspeed",
            '{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "OneBitAdam"}}',
            "optimizer.type='OneBitAdam' has no price: Adam, AdamW, Lamb, Lion, Muon and SGD have",
        ),
        (
            "torchtitan",
            "[training]\nlocal_batch_size = 1\nseq_len = 1\n[optimizer]\nname = 'Muon'",
            "optimizer.name='Muon' is not known",
        ),
        ("torchtitan", "[training\n", "not valid TOML"),
        ("torchtitan", "[training]\nseq_len = 1\n", "'local_batch_size' is required"),
        ("accelerate", "distributed_type: TPU", "distributed_type='TPU' is not known"),
        ("megatron", "pretrain.py --micro-batch-size $SIZE", "micro-batch-size='$SIZE' must be a whole number"),
    ],
)
def test_mistakes_are_one_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text(text)
    with pytest.raises(UserError, match=r"settings: ") as error:
        read_job(model="llama-3.1-8b", cluster="dgx-h100", **{f"from_{name}": file})
    assert says in str(error.value)


def test_the_command_prints_settings_alone_on_standard_output(tmp_path: Path) -> None:
    asked = ["export", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--set", "plan.pp=2", "--to", "deepspeed"]
    result = CliRunner().invoke(shardyard.main, asked)
    assert result.stdout.startswith("{")
    assert "# not expressed: to be said in the training script: sequence=8192, pp=2" in result.stderr
    file = tmp_path / "ds.json"
    assert CliRunner().invoke(shardyard.main, [*asked, "--output", str(file)]).exit_code == 0
    assert file.read_text() == result.stdout
