"""Settings of training frameworks are read as plans and written from them; what is not used or not said is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import shardyard
from shardyard import read_job
from strategies.frameworks import frameworks
from strategies.job import Job
from topologies.reading import UserError

DATA = Path(__file__).parents[1] / "data/frameworks"


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
    assert job.plan.reduce_bucket == 4e8  # 2e8 elements of 2 bytes
    assert job.resolve().microbatches == 256 // 16 // 4  # train_batch_size = micro batch · accumulation · GPUs
    assert job.plan.sequence == 4096
    ignored = "wall_clock_breakdown, zero_optimization.contiguous_gradients"
    assert ignored in job.remarks[0]


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
    ("deepspeed", dict(data_parallel="zero3", gradients="fp32", accumulation=4)),
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
        dict(pp=2, data_parallel="zero3", gradient_sync="last", reshard=False, accumulation=8, gradients="fp32", kernels="torch"),
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
        dict(data_parallel="zero3", shard=8, reshard=False, tp=2, overlap_tp="none", recompute="full", kernels="torch"),
    ),
    ("accelerate", dict(data_parallel="zero3", kernels="compiled", offload=dict(optimizer="cpu", parameters="cpu"))),
    ("accelerate", dict(data_parallel="zero2", accumulation=2, kernels="torch")),
    ("accelerate", dict(tp=2, pp=2, accumulation=2, sequence_parallel=True)),
]


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_what_was_written_reads_as_the_same_plan(name: str, plan: dict[str, object], tmp_path: Path) -> None:
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=4, plan={"sequence": 8192, **plan})
    framework = frameworks[name]
    file = tmp_path / framework.file
    file.write_text(framework.write(job).text)
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


def test_what_cannot_be_said_is_listed() -> None:
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"pp": 2, "schedule": "zb-h1", "data_parallel": "zero1"})
    unsaid = frameworks["megatron"].write(job).unexpressed
    assert "schedule=zb-h1" in unsaid
    assert {"pp=2", "schedule=zb-h1"} <= set(frameworks["deepspeed"].write(job).unexpressed)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("deepspeed", '{"train_batch_size": "auto"}', "train_batch_size=auto is filled in by the trainer"),
        ("deepspeed", '{"train_batch_size": 8}', "'train_micro_batch_size_per_gpu' is required"),
        ("deepspeed", '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 4}}', "stage=4 is not known"),
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
    assert "# not expressed: pp=2" in result.stderr
    file = tmp_path / "ds.json"
    assert CliRunner().invoke(shardyard.main, [*asked, "--output", str(file)]).exit_code == 0
    assert file.read_text() == result.stdout
