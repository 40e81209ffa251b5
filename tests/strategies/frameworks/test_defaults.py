"""Every row of docs/defaults.md is what the code does; PyTorch's rows are what the installed torch does, too. Of frameworks whose
files are not read, what their defaults amount to is a plan.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from strategies.data_parallel import buckets
from strategies.frameworks import kernel_set
from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.frameworks.settings import frameworks
from strategies.read_job import read_job

PAGE = Path(__file__).parents[3] / "docs/defaults.md"
EVERY = [
    tuple(cell.strip() for cell in line.strip("|\n").split(" | "))
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| framework |")
]
ROWS, PLANS = ([row for row in EVERY if len(row) == cells] for cells in (4, 5))
SIZES = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --max-position-embeddings 1024"
EXPERTS = "--num-experts 8 --expert-model-parallel-size 2"
MICRO = json.dumps({"train_micro_batch_size_per_gpu": 1})
TYPES = {"same": "as the parameters", "fp32": "fp32"}


def megatron(flags: str = "") -> dict[str, Any]:
    """The plan and model of arguments that say nothing else."""
    settings = _read("megatron", f"torchrun pretrain_gpt.py {SIZES} --micro-batch-size 1 --seq-length 1024 {flags}\n", ".sh")
    return {**settings.plan, "model": settings.model}


def deepspeed(stage: int, **sections: Any) -> dict[str, Any]:
    data = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    return _read("deepspeed", json.dumps(data | sections), ".json").plan


def accelerate(kind: str, **sections: Any) -> dict[str, Any]:
    return _read("accelerate", yaml.safe_dump({"distributed_type": kind} | sections), ".yaml").plan


def torchtitan(parallel: str = "", **sections: str) -> dict[str, Any]:
    text = f"[training]\nlocal_batch_size = 4\nseq_len = 2048\n[parallelism]\n{parallel}\n"
    text += "".join(f"[{name}]\n{section}\n" for name, section in sections.items())
    return _read("torchtitan", text, ".toml").plan


def _read(name: str, text: str, suffix: str) -> Any:
    file = PLACE[0] / f"settings{suffix}"
    file.write_text(text)
    return frameworks[name].read(file)


PLACE: list[Path] = []


@pytest.fixture(autouse=True)
def _place(tmp_path: Path) -> None:
    PLACE[:] = [tmp_path]


def yes(value: object) -> str:
    return str(bool(value)).lower()


def default(function: Callable[..., Any], name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def mib(size: float) -> str:
    return f"{size / 2**20:g} MiB"


def number(value: float) -> str:
    return f"{value:.0e}".replace("e+0", "e")


def plan_of(**plan: Any) -> Any:
    return read_job(
        model="llama-3.1-8b", cluster="dgx-h100", plan={"auto": False, "global_batch": 8, "sequence": 4096} | plan
    ).plan


def bucket_of_megatron() -> str:
    """Of 8 and of 100 ranks."""
    bucket = kernel_set("megatron").bucket
    assert (bucket(True, True, 8), bucket(True, True, 100)) == (40e6, 100e6)
    return "max(40e6, 1e6·dp) parameters"


TORCH = kernel_set("torch")
LIMITS = DeepSpeed()
CODE: dict[tuple[str, str], Callable[[], str]] = {
    ("PyTorch DDP", "bucket_cap_mb"): lambda: mib(buckets.PYTORCH),
    ("PyTorch DDP", "first bucket"): lambda: mib(buckets.FIRST),
    ("PyTorch DDP", "gradient_as_bucket_view"): lambda: yes(TORCH.bucket_views),
    ("PyTorch DDP", "broadcast_buffers"): lambda: yes(TORCH.broadcast_buffers),
    ("PyTorch FSDP2", "reshard_after_forward"): lambda: yes(plan_of(data_parallel="zero3", kernels="torch").reshard),
    ("PyTorch FSDP2", "reduce_dtype"): lambda: {"same": "as the gradients"}[plan_of(data_parallel="zero3").gradients],
    ("PyTorch FSDP2", "backward prefetch"): lambda: "one unit ahead" if TORCH.prefetches_backward else "none",
    ("PyTorch FSDP1", "backward_prefetch"): lambda: "one unit ahead" if TORCH.prefetches_backward else "none",
    ("PyTorch FSDP1", "sharding_strategy"): lambda: accelerate("FSDP")["data_parallel"],
    ("PyTorch optimizer", "set_to_none"): lambda: yes(TORCH.frees_gradients),
    ("PyTorch optimizer", "fused"): lambda: yes(torchtitan(optimizer="implementation = 'foreach'")["fused_optimizer"]),
    ("PyTorch checkpoint", "early_stop"): lambda: yes(plan_of(recompute="full", kernels="torch").stops_early),
    ("Megatron-LM", "ddp-bucket-size"): bucket_of_megatron,
    ("Megatron-LM", "buckets without overlap"): lambda: (
        "one" if math.isinf(kernel_set("megatron").bucket(False, True, 8)) else ""
    ),
    ("Megatron-LM", "overlap-grad-reduce"): lambda: yes(megatron()["overlap"]),
    ("Megatron-LM", "use-distributed-optimizer"): lambda: yes(megatron()["data_parallel"] != "ddp"),
    ("Megatron-LM", "num-distributed-optimizer-instances"): lambda: str(
        megatron("--use-distributed-optimizer").get("replicas", 1)
    ),
    ("Megatron-LM", "exp-avg-dtype"): lambda: megatron("--use-precision-aware-optimizer").get("exp_avg_dtype", "fp32"),
    ("Megatron-LM", "gradients with bf16"): lambda: TYPES[megatron("--bf16").get("gradients", "same")],
    ("Megatron-LM", "gradients with fp16"): lambda: TYPES[megatron("--fp16").get("gradients", "same")],
    ("Megatron-LM", "check-for-nan-in-loss-and-grad"): lambda: yes(kernel_set("megatron").options.check_gradients),
    ("Megatron-LM", "ddp-average-in-collective"): lambda: yes(kernel_set("megatron").options.average_in_collective),
    ("Megatron-LM", "ddp-pad-buckets-for-high-nccl-busbw"): lambda: yes(
        kernel_set("megatron").options.pad_buckets_for_high_nccl_busbw
    ),
    ("Megatron-LM", "overlap-param-gather"): lambda: yes(kernel_set("megatron").overlap_param_gather),
    ("Megatron-LM", "cuda-graph-impl"): lambda: {False: "none", True: "full_iteration"}[kernel_set("megatron").graphed],
    ("Megatron-LM", "gradient-accumulation-fusion"): lambda: yes(
        megatron().get("accumulation_fusion", kernel_set("megatron").accumulates_in_products)
    ),
    ("Megatron-LM", "cross-entropy-loss-fusion"): lambda: yes(megatron().get("loss") != "operators"),
    ("Megatron-LM", "recompute-granularity"): lambda: megatron()["recompute"],
    ("Megatron-LM", "recompute-modules"): lambda: (
        "core_attn" if "recompute_modules" not in megatron("--recompute-granularity selective") else ""
    ),
    ("Megatron-LM", "recompute-num-layers"): lambda: str(
        megatron("--recompute-granularity full --recompute-method uniform").get("recompute_layers", 1)
    ),
    ("Megatron-LM", "attention-backend"): lambda: megatron()["attention"],
    ("Megatron-LM", "bias, activation, dropout and rotary fusions"): lambda: yes(not kernel_set("megatron").eager),
    ("Megatron-LM", "masked-softmax-fusion"): lambda: yes(kernel_set("megatron").softmax_rows > 1),
    ("Megatron-LM", "sequence-parallel"): lambda: yes(megatron("--tensor-model-parallel-size 2")["sequence_parallel"]),
    ("Megatron-LM", "tp-comm-overlap"): lambda: yes(megatron("--tensor-model-parallel-size 2").get("overlap_tp") == "pieces"),
    ("Megatron-LM", "cp-comm-type"): lambda: megatron("--context-parallel-size 2").get("cp_method", "ring"),
    ("Megatron-LM", "moe-token-dispatcher-type"): lambda: megatron(EXPERTS)["token_dispatcher"],
    ("Megatron-LM", "moe-router-topk"): lambda: str(megatron(EXPERTS)["model"]["experts"]["chosen"]),
    ("Megatron-LM", "overlap of p2p, interleaved"): lambda: yes(megatron()["overlap_p2p"]),
    ("Megatron-LM", "fp8-recipe"): lambda: megatron("--fp8-format hybrid")["fp8"]["scaling"],
    ("Megatron-LM", "fp8-param-gather"): lambda: yes(megatron("--fp8-format hybrid")["fp8"]["gather"]),
    ("Megatron-LM", "fp8-dot-product-attention"): lambda: yes(megatron("--fp8-format hybrid")["fp8"].get("attention", False)),
    ("Megatron-LM", "tp-only-amax-red"): lambda: yes(megatron("--fp8-format hybrid")["fp8"].get("amax_reduction", "all") == "tp"),
    ("Megatron-LM", "hidden-dropout"): lambda: "0.1" if megatron()["model"]["dropout"] else "0",
    ("Megatron-LM", "attention-dropout"): lambda: "0.1" if megatron()["model"]["attention_dropout"] else "0",
    ("Megatron-LM", "clip-grad"): lambda: "1.0" if megatron()["clip_gradients"] else "0",
    ("Megatron-LM", "optimizer"): lambda: megatron()["optimizer"],
    ("Megatron-LM", "make-vocab-size-divisible-by"): lambda: str(megatron()["model"]["vocabulary_multiple"]),
    ("DeepSpeed", "stage"): lambda: _read("deepspeed", MICRO, ".json").plan["data_parallel"],
    ("DeepSpeed", "bf16.enabled, fp16.enabled"): lambda: _read("deepspeed", MICRO, ".json").plan["precision"],
    ("DeepSpeed", "gradient_clipping, ZeRO or 16 bits"): lambda: (
        "0, and the norm is taken all the same" if all(deepspeed(stage)["clip_gradients"] for stage in range(4)) else "0"
    ),
    ("DeepSpeed", "gradient_clipping, fp32 without ZeRO"): lambda: (
        "1" if _read("deepspeed", MICRO, ".json").plan["clip_gradients"] else "0"
    ),
    ("DeepSpeed", "optimizer.params.torch_adam"): lambda: (
        "false, one fused kernel" if plan_of(**deepspeed(2, optimizer={"type": "Adam"})).fused_optimizer else "true"
    ),
    ("DeepSpeed", "reduce_scatter"): lambda: yes(
        deepspeed(1, zero_optimization={"stage": 1, "use_multi_rank_bucket_allreduce": False})["deepspeed"]
    ),
    ("DeepSpeed", "offload_optimizer.device"): lambda: deepspeed(3).get("offload", "none"),
    ("DeepSpeed", "partition_activations"): lambda: yes(LIMITS.partition_activations),
    **{
        ("DeepSpeed", name): lambda name=name: number(getattr(LIMITS, name))  # type: ignore[misc]
        for name in DeepSpeed.model_fields
        if name.endswith(("_size", "_threshold", "_parameters", "_distance")) and not name.startswith("zero_")
    },
    ("DeepSpeed", "use_multi_rank_bucket_allreduce"): lambda: yes(LIMITS.use_multi_rank_bucket_allreduce),
    ("DeepSpeed", "zero_hpz_partition_size"): lambda: str(LIMITS.zero_hpz_partition_size),
    ("DeepSpeed", "zero_quantized_weights"): lambda: yes(LIMITS.zero_quantized_weights),
    ("DeepSpeed", "zero_quantized_gradients"): lambda: yes(LIMITS.zero_quantized_gradients),
    ("DeepSpeed", "overlap_comm, stages 1 and 2"): lambda: yes(deepspeed(1)["overlap"] or deepspeed(2)["overlap"]),
    ("DeepSpeed", "overlap_comm, stage 3"): lambda: yes(deepspeed(3)["overlap"]),
    ("DeepSpeed", "grad_accum_dtype, bf16 with ZeRO"): lambda: TYPES[deepspeed(1)["gradients"]],
    ("DeepSpeed", "grad_accum_dtype, bf16 without ZeRO"): lambda: TYPES[deepspeed(0)["gradients"]],
    ("accelerate", "mixed_precision"): lambda: accelerate("MULTI_GPU")["precision"],
    ("accelerate", "fsdp_version"): lambda: "FSDP1" if accelerate("FSDP")["framework"]["flat_parameters"] else "FSDP2",
    ("accelerate", "fsdp_sharding_strategy"): lambda: accelerate("FSDP")["data_parallel"],
    ("accelerate", "fsdp_activation_checkpointing"): lambda: yes(accelerate("FSDP")["recompute"] != "none"),
    ("accelerate", "fsdp_reshard_after_forward, version 2"): lambda: yes(
        accelerate("FSDP", fsdp_config={"fsdp_version": 2})["reshard"]
    ),
    ("accelerate", "accumulated gradients, FSDP"): lambda: {"last": "reduced in the last microbatch"}[
        accelerate("FSDP")["gradient_sync"]
    ],
    ("accelerate", "zero_stage"): lambda: accelerate("DEEPSPEED")["data_parallel"],
    ("torchtitan", "mixed_precision_param"): lambda: torchtitan()["precision"],
    ("torchtitan", "mixed_precision_reduce"): lambda: torchtitan()["gradients"],
    ("torchtitan", "training.dtype"): lambda: "fp32" if torchtitan().get("master_weights", True) else "16 bits",
    ("torchtitan", "max_norm"): lambda: "1.0" if plan_of(**torchtitan()).clip_gradients else "0",
    ("torchtitan", "bucket of DDP"): lambda: torchtitan("data_parallel_shard_degree = 1")["bucket"],
    ("torchtitan", "fsdp_reshard_after_forward"): lambda: yes(torchtitan()["reshard"]),
    ("torchtitan", "fsdp_reshard_after_forward, pp 2"): lambda: yes(torchtitan("pipeline_parallel_degree = 2")["reshard"]),
    ("torchtitan", "norm and head after the forward pass"): lambda: (
        "kept" if torchtitan()["framework"]["keep_last_unit"] else "released"
    ),
    ("torchtitan", "pipeline_parallel_schedule"): lambda: torchtitan("pipeline_parallel_degree = 2")["schedule"].lower(),
    ("torchtitan", "pipeline_parallel_microbatch_size"): lambda: str(torchtitan("pipeline_parallel_degree = 2")["microbatch"]),
    ("torchtitan", "enable_async_tensor_parallel"): lambda: yes(
        torchtitan("tensor_parallel_degree = 2")["overlap_tp"] == "pieces"
    ),
    ("torchtitan", "enable_fsdp_float8_all_gather"): lambda: yes(torchtitan(model="converters = ['float8']")["fp8"]["gather"]),
    ("torchtitan", "activation_checkpoint"): lambda: {("full", "every", 2): "every second layer"}[
        tuple(torchtitan()[name] for name in ("recompute", "recompute_method", "recompute_layers"))
    ],
    ("torchtitan", "optimizer.implementation"): lambda: "fused" if torchtitan()["fused_optimizer"] else "foreach",
    ("torchtitan", "compile.enable"): lambda: yes(torchtitan()["kernels"] == "compiled"),
}
INSTALLED: dict[tuple[str, str], Callable[[], str]] = {
    ("PyTorch DDP", "bucket_cap_mb"): lambda: mib((default(DistributedDataParallel, "bucket_cap_mb") or 25) * 2**20),
    ("PyTorch DDP", "first bucket"): lambda: mib(dist._DEFAULT_FIRST_BUCKET_BYTES),
    ("PyTorch DDP", "gradient_as_bucket_view"): lambda: yes(default(DistributedDataParallel, "gradient_as_bucket_view")),
    ("PyTorch DDP", "broadcast_buffers"): lambda: yes(default(DistributedDataParallel, "broadcast_buffers") in (None, True)),
    ("PyTorch FSDP2", "reshard_after_forward"): lambda: yes(default(fully_shard, "reshard_after_forward") in (None, True)),
    ("PyTorch FSDP2", "reduce_dtype"): lambda: {None: "as the gradients"}[MixedPrecisionPolicy().reduce_dtype],
    ("PyTorch FSDP1", "backward_prefetch"): lambda: {"BACKWARD_PRE": "one unit ahead"}[
        default(FullyShardedDataParallel.__init__, "backward_prefetch").name
    ],
    ("PyTorch optimizer", "set_to_none"): lambda: yes(default(Optimizer.zero_grad, "set_to_none")),
    ("PyTorch optimizer", "fused"): lambda: yes(default(AdamW.__init__, "fused")),
    ("PyTorch checkpoint", "early_stop"): lambda: yes(default(checkpoint, "early_stop")),
}


def test_the_table_is_complete() -> None:
    """One row for each comparison, and a source in each."""
    assert [(framework, setting) for framework, setting, _, _ in ROWS] == list(CODE)
    assert all(source for *_, source in ROWS)


@pytest.mark.parametrize(("framework", "setting", "value", "source"), ROWS, ids=lambda cell: cell[:40])
def test_what_the_code_does(framework: str, setting: str, value: str, source: str) -> None:
    assert CODE[framework, setting]() == value
    assert INSTALLED.get((framework, setting), lambda: value)() == value


@pytest.mark.parametrize("framework", dict.fromkeys(framework for framework, *_ in PLANS))
def test_defaults_of_frameworks_without_a_reader_are_a_plan(framework: str) -> None:
    """All of one together; none of its fields is said in two ways."""
    plan: dict[str, Any] = {}
    for fields in (yaml.safe_load(row[3].strip("`")) for row in PLANS if row[0] == framework):
        for name, value in fields.items():
            assert isinstance(value, dict) or name not in plan
            plan[name] = {**plan.get(name, {}), **value} if isinstance(value, dict) else value
    assert plan
    batch = {"global_batch": None} if "accumulation" in plan else {}
    kernels = "torch" if framework.startswith(("Hugging", "Lightning", "Composer")) else "megatron"
    assert plan_of(kernels=kernels, **batch, **plan)
