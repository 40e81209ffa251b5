"""Hugging Face accelerate: the YAML of `accelerate config`. Keys: huggingface.co/docs/accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from strategies.frameworks import EVERYTHING, Found, Framework, Keys, Told, Written, frameworks, of_pytorch
from strategies.frameworks.deepspeed import STAGES
from topologies.reading import UserError, load_yaml

if TYPE_CHECKING:
    from strategies.job import Job

_FSDP: dict[Any, tuple[str, bool]] = {  # sharding strategies of FSDP 1; whether copies stay inside a node
    "FULL_SHARD": ("zero3", False), "SHARD_GRAD_OP": ("zero2", False), "NO_SHARD": ("ddp", False),
    "HYBRID_SHARD": ("zero3", True), "HYBRID_SHARD_ZERO2": ("zero2", True),
}  # fmt: skip
_FSDP |= dict(enumerate(list(_FSDP.values()), 1))  # the same by number
_PRECISION = {"bf16": "bf16", "fp16": "fp16", "no": "fp32", None: "fp32"}
_MEGATRON = {"tp": "tp_degree", "pp": "pp_degree", "accumulation": "num_micro_batches", "ep": "expert_model_parallel_size",
             "cp": "context_parallel_size"}  # fmt: skip
_MESH = {"tp": "tp_size", "cp": "cp_size"}


def _read(path: Path) -> Found:
    keys = Keys(load_yaml(path), str(path))
    for said in ("compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"):
        keys.value(said)  # how it is started, not how it trains
    nodes, gpus = keys.optional("num_machines", 1) or 1, keys.optional("num_processes")
    plan: dict[str, Any] = {"precision": keys.choice("mixed_precision", _PRECISION)}
    kinds = {"NO": _alone, "MULTI_CPU": _alone, "MULTI_GPU": _alone, "FSDP": _read_fsdp, "DEEPSPEED": _read_deepspeed,
             "MEGATRON_LM": _read_megatron}  # fmt: skip
    plan |= keys.choice("distributed_type", kinds, "NO")(keys, (gpus or nodes) // nodes)
    plan |= _read_mesh(keys.section("parallelism_config"))
    compiled = keys.section("dynamo_config").value("dynamo_backend", "NO") != "NO"
    remarks: tuple[str, ...] = ()
    if keys.value("distributed_type") != "MEGATRON_LM":
        plan, remarks = of_pytorch(plan, compiled)
    return Found(str(path), plan, {}, nodes, gpus, keys.ignored, remarks)


def _alone(keys: Keys, gpus_per_node: int) -> dict[str, Any]:
    return {"data_parallel": "ddp"}


def _read_fsdp(keys: Keys, gpus_per_node: int) -> dict[str, Any]:
    fsdp = keys.section("fsdp_config")
    checkpoint = fsdp.flag("fsdp_activation_checkpointing", False)
    plan: dict[str, Any] = {"recompute": "full" if checkpoint else "none"}
    if fsdp.flag("fsdp_offload_params", False) or fsdp.flag("fsdp_cpu_offload", False):
        plan["offload"] = EVERYTHING.model_dump(exclude_unset=True)
    if fsdp.value("fsdp_version", 1) == 2:
        return plan | {"data_parallel": "zero3", "reshard": fsdp.flag("fsdp_reshard_after_forward", True)}
    hook, hybrid = fsdp.choice("fsdp_sharding_strategy", _FSDP, "FULL_SHARD")
    return plan | {"data_parallel": hook} | ({"shard": gpus_per_node} if hybrid else {})


def _read_deepspeed(keys: Keys, gpus_per_node: int) -> dict[str, Any]:
    section = keys.section("deepspeed_config")
    if file := section.value("deepspeed_config_file"):
        path = Path(keys.where).parent / str(file)
        return frameworks["deepspeed"].read(path).plan
    plan: dict[str, Any] = {"data_parallel": section.choice("zero_stage", STAGES, 2)}
    if steps := section.optional("gradient_accumulation_steps"):
        plan["accumulation"] = steps
    return plan


def _read_megatron(keys: Keys, gpus_per_node: int) -> dict[str, Any]:
    section = keys.section("megatron_lm_config")
    found = {field: value for field, name in _MEGATRON.items() if (value := section.optional(f"megatron_lm_{name}")) is not None}
    plan: dict[str, Any] = dict(found)
    plan["sequence_parallel"] = section.flag("megatron_lm_sequence_parallelism", False)
    plan["data_parallel"] = "zero1" if section.flag("megatron_lm_use_distributed_optimizer", False) else "ddp"
    granularity = section.choice("megatron_lm_recompute_granularity", {None: "none", "full": "full", "selective": "selective"})
    plan["recompute"] = "selective" if section.flag("megatron_lm_recompute_activations", False) else granularity
    return plan


def _read_mesh(mesh: Keys) -> dict[str, Any]:
    """Keys that repeat the name of their section."""
    found = {field: value for field, name in _MESH.items() if (value := mesh.optional(f"parallelism_config_{name}"))}
    plan: dict[str, Any] = dict(found) | ({"overlap_tp": "none"} if found.get("tp", 1) > 1 else {})  # PyTorch's waits
    shard, copies = (mesh.optional(f"parallelism_config_dp_{name}_size") for name in ("shard", "replicate"))
    if shard and shard > 1:
        plan |= {"data_parallel": "zero3", "dp": shard * (copies or 1)} | ({"shard": shard} if (copies or 1) > 1 else {})
    elif copies:
        plan |= {"data_parallel": "ddp", "dp": copies}
    ulysses = mesh.optional("parallelism_config_sp_size")
    if ulysses and ulysses > 1:
        if plan.get("cp", 1) > 1:
            raise UserError(f"{mesh.where}: parallelism_config_cp_size and parallelism_config_sp_size exclude each other")
        plan |= {"cp": ulysses, "cp_method": "ulysses"}
    return plan


def _write(job: Job) -> Written:
    told, plan = Told(job), job.resolve()
    precision = told("precision", only=("bf16", "fp16", "fp32"))
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": job.cluster.nodes,
        "num_processes": job.cluster.gpus, "mixed_precision": {"fp32": "no"}.get(precision, precision),
    }  # fmt: skip
    hook = told("data_parallel", only=tuple(STAGES.values()))
    if job.plan.pp > 1:
        config |= {"distributed_type": "MEGATRON_LM", "megatron_lm_config": _megatron(told, plan.microbatches)}
    elif hook == "zero3":
        fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": told("reshard"),
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}  # fmt: skip
        config |= {"distributed_type": "FSDP", "fsdp_config": fsdp
                   | {"fsdp_activation_checkpointing": told("recompute", only=("none", "full")) == "full"}}  # fmt: skip
        if told("offload", only=(None, EVERYTHING)) is not None:
            config["fsdp_config"] |= {"fsdp_offload_params": True}
        config["parallelism_config"] = _mesh(told, plan.dp)
    elif hook in ("zero1", "zero2"):
        stage = next(stage for stage, name in STAGES.items() if name == hook)
        section = {"zero_stage": stage, "gradient_accumulation_steps": plan.microbatches}
        config |= {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    if config["distributed_type"] != "MEGATRON_LM" and told("kernels", only=("compiled", "torch")) == "compiled":
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    batch = f"{job.plan.microbatch} per process, {plan.microbatches} accumulated, {plan.global_batch} in all"
    script = f"batch: {batch}, sequences of {plan.sequence} tokens: set in the training script"
    text = yaml.safe_dump(config, sort_keys=False)
    return Written(text, "accelerate launch --config_file FILE train.py", (*told.rest, script))


def _megatron(told: Told, microbatches: int) -> dict[str, Any]:
    section = {f"megatron_lm_{name}": told(field) for field, name in _MEGATRON.items() if field != "accumulation"}
    return section | {
        "megatron_lm_num_micro_batches": microbatches,
        "megatron_lm_sequence_parallelism": told("sequence_parallel"),
        "megatron_lm_use_distributed_optimizer": told("data_parallel", only=("ddp", "zero1")) == "zero1",
        "megatron_lm_recompute_granularity": {"none": None}.get(told("recompute"), told("recompute")),
    }


def _mesh(told: Told, dp: int) -> dict[str, Any]:
    shard = told("shard") or dp
    told("overlap_tp", only=("none",))  # as PyTorch's is
    mesh = {"parallelism_config_dp_replicate_size": dp // shard, "parallelism_config_dp_shard_size": shard,
            "parallelism_config_tp_size": told("tp")}  # fmt: skip
    ulysses = told("cp_method") == "ulysses"
    return mesh | {f"parallelism_config_{'sp' if ulysses else 'cp'}_size": told("cp")}


frameworks("accelerate")(Framework("accelerate.yaml", _read, _write))
