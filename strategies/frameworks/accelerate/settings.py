"""Hugging Face accelerate: the YAML of `accelerate config`. Keys: huggingface.co/docs/accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.frameworks.deepspeed.settings import PLACES, STAGES, by_default
from strategies.frameworks.settings import EVERYTHING, Framework, Keys, ReadSettings, WrittenSettings, frameworks, of_pytorch
from topologies.documents.syntaxes import dump_yaml
from topologies.reading import UserError, load_yaml

if TYPE_CHECKING:
    from strategies.job import Job
    from strategies.plan.plan import Plan

_FSDP: dict[Any, tuple[bool | None, bool]] = {  # of FSDP 1: reshard (None: nothing is sharded); whether copies stay inside a node
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "NO_SHARD": (None, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
_FSDP |= dict(enumerate(list(_FSDP.values()), 1))  # also by number
_PRECISION = {"bf16": "bf16", "fp16": "fp16", "no": "fp32", None: "fp32"}
_MEGATRON = {
    "tp": "tp_degree",
    "pp": "pp_degree",
    "accumulation": "num_micro_batches",
    "ep": "expert_model_parallel_size",
    "cp": "context_parallel_size",
}
_FILE = "deepspeed_config_file"
_OFFLOAD = {"optimizer": "offload_optimizer_device", "parameters": "offload_param_device"}
# Weights stay fp32 under autocast, and so are their gradients (accelerator.py, prepare_model); DeepSpeed adds up those of bf16 in
# fp32 without ZeRO (deepspeed/runtime/engine.py, get_data_types).
_WIDE = {(kind, precision) for kind in (None, "NO", "MULTI_CPU", "MULTI_GPU") for precision in ("bf16", "fp16")}
_WIDE |= {("DEEPSPEED", "bf16")}
_MESH = {"tp": "tp_size", "cp": "cp_size"}
OFFLOADED = "fsdp_offload_params: gradients of every microbatch are reduced; accelerate keeps whole ones until the last (no_sync)"


def _read(path: Path) -> ReadSettings:
    keys = Keys(load_yaml(path), str(path))
    if keys.value("distributed_type") == "DEEPSPEED" and (file := keys.section("deepspeed_config").value(_FILE)):
        return _of_deepspeed(path.parent / str(file), keys)
    for said in ("compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"):
        keys.value(said)  # how it is started, not how it trains
    nodes, gpus = keys.optional("num_machines", 1) or 1, keys.optional("num_processes")
    plan: dict[str, Any] = {"precision": keys.choice("mixed_precision", _PRECISION)}
    kinds = {
        "NO": _alone,
        "MULTI_CPU": _alone,
        "MULTI_GPU": _alone,
        "FSDP": _read_fsdp,
        "DEEPSPEED": _read_deepspeed,
        "MEGATRON_LM": _read_megatron,
    }
    plan |= keys.choice("distributed_type", kinds, "NO")(keys, (gpus or nodes) // nodes)
    plan |= _read_mesh(keys.section("parallelism_config"), plan)
    if plan["data_parallel"] == "ddp" and (keys.value("distributed_type"), plan["precision"]) in _WIDE:
        plan["gradients"] = "fp32"
    compiled = keys.section("dynamo_config").value("dynamo_backend", "NO") != "NO"
    remarks: tuple[str, ...] = ()
    if keys.value("distributed_type") != "MEGATRON_LM":
        plan, remarks = of_pytorch(plan, compiled)
    if plan["data_parallel"] == "zero3" and "deepspeed" not in plan and "offload" in plan:
        remarks += (OFFLOADED,)
    return ReadSettings(str(path), plan, {}, nodes, gpus, keys.ignored, remarks)


def _of_deepspeed(file: Path, keys: Keys) -> ReadSettings:
    """Where DeepSpeed has a file of its own, which says everything but the number of GPUs."""
    settings = frameworks["deepspeed"].read(file)
    return replace(settings, nodes=keys.optional("num_machines"), gpus=keys.optional("num_processes"))


def _alone(keys: Keys, gpus_per_node: int) -> dict[str, Any]:
    return {"data_parallel": "ddp"}


def _read_fsdp(keys: Keys, gpus_per_node: int) -> dict[str, Any]:
    fsdp = keys.section("fsdp_config")
    checkpoint = fsdp.flag("fsdp_activation_checkpointing", False)
    plan: dict[str, Any] = {"recompute": "full" if checkpoint else "none"}
    if fsdp.flag("fsdp_offload_params", False) or fsdp.flag("fsdp_cpu_offload", False):
        plan["offload"] = EVERYTHING.model_dump(exclude_unset=True)
    if fsdp.value("fsdp_version", 1) == 2:
        return plan | _sharded(fsdp.flag("fsdp_reshard_after_forward", True), plan, version=2)
    reshard, hybrid = fsdp.choice("fsdp_sharding_strategy", _FSDP, "FULL_SHARD")
    if reshard is None:
        return plan | {"data_parallel": "ddp"}
    flat = {"framework": {"flat_parameters": True}}  # FSDP1's
    return plan | _sharded(reshard, plan, version=1) | flat | ({"shard": gpus_per_node} if hybrid else {})


def _sharded(reshard: bool, plan: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Fields of a plan by FSDP. Of accumulated microbatches accelerate has the last one reduced (accelerator.py, accumulate and
    no_sync, with FSDP2 since 1.11), until which whole gradients stay; parameters are released after every backward pass, but by
    FSDP1 only where forward passes release them, too (torch 2.13, _should_free_in_backward in fsdp/_runtime_utils.py).
    """
    fields: dict[str, Any] = {"data_parallel": "zero3", "reshard": reshard}
    if "offload" in plan:
        return fields
    return fields | {"gradient_sync": "last"} | ({"reshard_after_backward": True} if reshard or version == 2 else {})


def _read_deepspeed(keys: Keys, gpus_per_node: int) -> dict[str, Any]:
    """DeepSpeed's engine, of whose options the file has but few (DeepSpeedPlugin in accelerate/utils/dataclasses.py)."""
    section = keys.section("deepspeed_config")
    hook = section.choice("zero_stage", STAGES, 2)
    plan: dict[str, Any] = {"data_parallel": hook} | by_default(hook)
    if steps := section.optional("gradient_accumulation_steps"):
        plan["accumulation"] = steps
    places = {field: section.choice(name, PLACES) for field, name in _OFFLOAD.items()}
    if hook != "zero3":
        del places["parameters"]  # DeepSpeed, too, takes no notice of it
    return plan | ({"offload": places} if any(places.values()) else {})


def _read_megatron(keys: Keys, gpus_per_node: int) -> dict[str, Any]:
    section = keys.section("megatron_lm_config")
    degrees = {field: section.optional(f"megatron_lm_{name}") for field, name in _MEGATRON.items()}
    plan: dict[str, Any] = {field: degree for field, degree in degrees.items() if degree is not None}
    plan["sequence_parallel"] = section.flag("megatron_lm_sequence_parallelism", False)
    plan["data_parallel"] = "zero1" if section.flag("megatron_lm_use_distributed_optimizer", False) else "ddp"
    granularity = section.choice("megatron_lm_recompute_granularity", {None: "none", "full": "full", "selective": "selective"})
    plan["recompute"] = "selective" if section.flag("megatron_lm_recompute_activations", False) else granularity
    return plan


def _read_mesh(mesh: Keys, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that repeat the name of their section. given: what the file says elsewhere."""
    settings = {field: value for field, name in _MESH.items() if (value := mesh.optional(f"parallelism_config_{name}"))}
    plan: dict[str, Any] = dict(settings) | ({"overlap_tp": "none"} if settings.get("tp", 1) > 1 else {})  # PyTorch's waits
    shard, copies = (mesh.optional(f"parallelism_config_dp_{name}_size") for name in ("shard", "replicate"))
    if shard and shard > 1:
        sharded = {} if given.get("data_parallel") == "zero3" else _sharded(True, given, version=2)
        plan |= sharded | {"dp": shard * (copies or 1)} | ({"shard": shard} if (copies or 1) > 1 else {})
    elif copies:
        plan |= {"data_parallel": "ddp", "dp": copies}
    ulysses = mesh.optional("parallelism_config_sp_size")
    if ulysses and ulysses > 1:
        if plan.get("cp", 1) > 1:
            raise UserError(f"{mesh.where}: parallelism_config_cp_size and parallelism_config_sp_size exclude each other")
        plan |= {"cp": ulysses, "cp_method": "ulysses"}
    return plan


def _write(job: Job) -> WrittenSettings:
    plan, own = job.resolve(), job.plan
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_machines": job.cluster.nodes,
        "num_processes": job.cluster.gpus,
        "mixed_precision": {"fp32": "no", "fp16": "fp16"}.get(own.precision, "bf16"),
    }
    if own.pp > 1:
        config |= {"distributed_type": "MEGATRON_LM", "megatron_lm_config": _megatron(own, plan.microbatches)}
    elif own.data_parallel == "zero3" and own.deepspeed is None:
        config |= {"distributed_type": "FSDP", "fsdp_config": _fsdp(own), "parallelism_config": _mesh(own, plan.dp)}
    elif own.data_parallel in ("zero1", "zero2", "zero3"):
        config |= {"distributed_type": "DEEPSPEED", "deepspeed_config": _deepspeed(own, plan.microbatches)}
    elif plan.dp == 1 and own.tp > 1:
        config["parallelism_config"] = _mesh(own, plan.dp)
    if config["distributed_type"] != "MEGATRON_LM" and own.kernels != "torch":
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return WrittenSettings(dump_yaml(config, sort_keys=False), "accelerate launch --config_file FILE train.py")


def _fsdp(plan: Plan) -> dict[str, Any]:
    offload = {"fsdp_offload_params": True} if plan.offload == EVERYTHING else {}
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.reshard,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": plan.recompute == "full",
        **offload,
    }


def _deepspeed(plan: Plan, microbatches: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"zero_stage": {name: stage for stage, name in STAGES.items()}[plan.data_parallel]}
    for field, name in _OFFLOAD.items():
        if plan.offload and getattr(plan.offload, field):
            settings[name] = getattr(plan.offload, field)
    return settings | {"gradient_accumulation_steps": microbatches}


def _megatron(plan: Plan, microbatches: int) -> dict[str, Any]:
    section = {f"megatron_lm_{name}": getattr(plan, field) for field, name in _MEGATRON.items() if field != "accumulation"}
    return section | {
        "megatron_lm_num_micro_batches": microbatches,
        "megatron_lm_sequence_parallelism": plan.sequence_parallel,
        "megatron_lm_use_distributed_optimizer": plan.data_parallel == "zero1",
        "megatron_lm_recompute_granularity": {"none": None}.get(plan.recompute, plan.recompute),
    }


def _mesh(plan: Plan, dp: int) -> dict[str, Any]:
    shard = plan.shard or dp
    mesh = {
        "parallelism_config_dp_replicate_size": dp // shard,
        "parallelism_config_dp_shard_size": shard,
        "parallelism_config_tp_size": plan.tp,
    }
    return mesh | {f"parallelism_config_{'sp' if plan.cp_method == 'ulysses' else 'cp'}_size": plan.cp}


_SCRIPT = ("microbatch", "accumulation", "sequence")
frameworks("accelerate")(
    Framework("accelerate.yaml", _read, _write, _SCRIPT, frozenset({"compute_environment", "distributed_type"}))
)
