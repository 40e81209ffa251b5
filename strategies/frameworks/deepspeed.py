"""DeepSpeed: `ds_config.json`. Keys and defaults: deepspeed.ai/docs/config-json and deepspeed/runtime/zero/config.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.frameworks import Found, Framework, Keys, Told, Written, frameworks
from topologies.reading import UserError, load_yaml

if TYPE_CHECKING:
    from strategies.job import Job

STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
_BATCH = {
    "microbatch": "train_micro_batch_size_per_gpu", "accumulation": "gradient_accumulation_steps",
    "global_batch": "train_batch_size",
}  # fmt: skip
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
_ZERO3 = (
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "zero_hpz_partition_size",
)  # fmt: skip
_QUANTISED = ("zero_quantized_weights", "zero_quantized_gradients")
_PLACES = {None: None, "none": None, "cpu": "cpu", "nvme": "nvme"}
_TYPES = {None: "same", "fp32": "fp32", "bf16": "same", "fp16": "same"}


def _read(path: Path) -> Found:
    keys = Keys(load_yaml(path), str(path))
    plan = _read_batch(keys)
    bf16, fp16 = keys.section("bf16").flag("enabled", False), keys.section("fp16").flag("enabled", False)
    plan["precision"] = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    plan["gradients"] = keys.section("data_types").choice("grad_accum_dtype", _TYPES)
    plan |= read_zero(keys.section("zero_optimization"))
    if tp := keys.section("tensor_parallel").optional("autotp_size"):
        plan["tp"] = tp
    if (cp := keys.optional("sequence_parallel_size")) and cp > 1:
        plan |= {"cp": cp, "cp_method": "ulysses"}
    return Found(str(path), plan, ignored=keys.ignored)


def _read_batch(keys: Keys) -> dict[str, Any]:
    """Two of three numbers; the third follows from the number of GPUs."""
    for name in _BATCH.values():
        if keys.value(name) == "auto":
            raise UserError(f"{keys.where}: {name}=auto is filled in by the trainer; give its value")
    batch = {field: value for field, name in _BATCH.items() if (value := keys.optional(name)) is not None}
    if "microbatch" not in batch:
        raise UserError(f"{keys.where}: field '{_BATCH['microbatch']}' is required: the number of GPUs is not in this file")
    return batch


def read_zero(zero: Keys) -> dict[str, Any]:
    """Fields of the plan in the section `zero_optimization`."""
    hook = zero.choice("stage", STAGES, 0)
    plan: dict[str, Any] = {"data_parallel": hook}
    if hook == "ddp":
        return plan
    plan["overlap"] = zero.flag("overlap_comm", hook == "zero3")
    names = _ZERO3 if hook == "zero3" else _BUCKETS
    limits: dict[str, Any] = {name: _elements(zero, name) for name in names if zero.value(name) is not None}
    if hook == "zero3":
        limits |= {name: True for name in _QUANTISED if zero.flag(name, False)}
    plan["deepspeed"] = limits
    offload = {"optimizer": zero.section("offload_optimizer").choice("device", _PLACES)}
    if hook == "zero3":
        offload["parameters"] = zero.section("offload_param").choice("device", _PLACES)
    if any(offload.values()):
        plan["offload"] = offload
    return plan


def _elements(zero: Keys, key: str) -> int:
    """A number of elements; 5e8 is a text to YAML."""
    value = zero.value(key)
    try:
        elements = int(float(value))
    except (TypeError, ValueError):
        elements = -1
    if isinstance(value, bool) or elements < 0:
        raise UserError(f"{zero.where}: zero_optimization.{key}={value!r} must be a number of elements")
    return elements


def _write(job: Job) -> Written:
    told, plan = Told(job), job.resolve()
    hook = told("data_parallel", only=tuple(STAGES.values()))
    precision = told("precision", only=("bf16", "fp16", "fp32"))
    stage = next((stage for stage, name in STAGES.items() if name == hook), 0)
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": job.plan.microbatch,
        "gradient_accumulation_steps": plan.microbatches,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "zero_optimization": {"stage": stage},
    }
    if told("gradients") == "fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if stage:
        limits, offload, bucket = told("deepspeed"), told("offload"), told("bucket")
        sizes = (
            limits.model_dump(exclude_unset=True)
            if limits
            else {"reduce_bucket_size": round(bucket / job.plan.bytes_per_gradient)}
        )
        config["zero_optimization"] |= {"overlap_comm": told("overlap")} | sizes
        for name, place in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
            if offload and getattr(offload, place):
                config["zero_optimization"][name] = {"device": getattr(offload, place)}
    if told("tp") > 1:
        config["tensor_parallel"] = {"autotp_size": job.plan.tp}
    if told("cp_method", only=("ulysses",)) == "ulysses" and told("cp") > 1:
        config["sequence_parallel_size"] = job.plan.cp
    launch = f"deepspeed --num_nodes {job.cluster.nodes} --num_gpus {job.cluster.node.gpus} train.py --deepspeed_config FILE"
    return Written(json.dumps(config, indent=2) + "\n", launch, told.rest)


frameworks("deepspeed")(Framework("ds_config.json", _read, _write))
