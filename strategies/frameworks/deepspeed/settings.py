"""DeepSpeed: `ds_config.json`. Keys and defaults: deepspeed.ai/docs/config-json and deepspeed/runtime/zero/config.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.frameworks.settings import Framework, Keys, ReadSettings, WrittenSettings, frameworks
from topologies.reading import UserError, load_yaml, shown

if TYPE_CHECKING:
    from strategies.job import Job
    from strategies.plan.plan import Plan

STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
_BATCH = {
    "microbatch": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
    "global_batch": "train_batch_size",
}
_SCRIPT = (
    "sequence",
    "pp",
    "schedule",
    "chunks",
    "layers_per_stage",
    "first_stage_layers",
    "last_stage_layers",
    "embedding_as_layer",
    "loss_as_layer",
    "ep",
    "recompute",
    "recompute_method",
    "recompute_layers",
    "sequence_parallel",
    "overlap_tp",
    "attention",
    "kernels",
    "expert_tp",
    "capacity_factor",
    "pad_to_capacity",
    "sync_norm",
)  # the file has batch, ZeRO and types; what else there is, the model's code does
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
_TOGETHER = "use_multi_rank_bucket_allreduce"
_ZERO3 = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "zero_hpz_partition_size",
)
_CHECKPOINTING = ("partition_activations", "cpu_checkpointing")
_QUANTISED = ("zero_quantized_weights", "zero_quantized_gradients")
PLACES = {None: None, "none": None, "cpu": "cpu", "nvme": "nvme"}
_OTHERS = {"lamb": "Lamb", "lion": "Lion", "muon": "Muon"}  # deepspeed/runtime/config.py, DEEPSPEED_OPTIMIZERS
_TYPES = {None: "same", "fp32": "fp32", "bf16": "same", "fp16": "same"}


def _read(path: Path) -> ReadSettings:
    data, filled = without_auto(load_yaml(path))
    keys = Keys(data, str(path))
    plan = _read_batch(keys, _BATCH["microbatch"] in filled)
    bf16, fp16 = keys.section("bf16").flag("enabled", False), keys.section("fp16").flag("enabled", False)
    if bf16 or fp16 or not {"bf16.enabled", "fp16.enabled"} & set(filled):
        plan["precision"] = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    plan["gradients"] = keys.section("data_types").choice("grad_accum_dtype", _TYPES)
    plan |= read_zero(keys.section("zero_optimization"))
    if bf16 and plan["data_parallel"] == "ddp" and keys.section("data_types").value("grad_accum_dtype") is None:
        plan["gradients"] = "fp32"  # deepspeed/runtime/engine.py, get_data_types
    if tp := keys.section("tensor_parallel").optional("autotp_size"):
        plan["tp"] = tp
    checkpointing, remarks = _read_checkpointing(keys.section("activation_checkpointing"), plan)
    plan |= checkpointing
    if (cp := keys.optional("sequence_parallel_size")) and cp > 1:
        plan |= {"cp": cp, "cp_method": "ulysses"}
    plan["clip_gradients"] = _norms(keys, plan) or "gradient_clipping" in filled
    plan |= _read_optimizer(keys.section("optimizer"))
    return ReadSettings(str(path), plan, ignored=keys.ignored, remarks=(*remarks_on_filled(filled), *remarks))


def _norms(keys: Keys, plan: Mapping[str, Any]) -> bool:
    """Whether the norm of gradients is taken: with ZeRO and 16 bits it is in every step, clipped or not, and gradients are scaled
    (step of deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, fp16/fused_optimizer.py, bf16_optimizer.py). Raises UserError.
    """
    norm = keys.value("gradient_clipping", 0.0)
    if isinstance(norm, bool) or not isinstance(norm, int | float):
        raise UserError(f"{keys.where}: gradient_clipping={shown(norm)} must be a number")
    return norm != 0 or plan["data_parallel"] != "ddp" or plan.get("precision") != "fp32"


def _read_checkpointing(section: Keys, plan: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the file says of inputs that are kept of recomputed layers, and what a reader should know of it: whether layers are
    recomputed says the model's code, and parts on one tp rank are the whole (deepspeed/runtime/activation_checkpointing/
    checkpointing.py, partition_activations: `num_elements_per_rank = tensor.numel() / mp_size`).
    """
    kept = {name: True for name in _CHECKPOINTING if section.flag(name, False)}
    if not kept or "deepspeed" not in plan:
        return {}, ()
    remarks = ["activation_checkpointing: taken as a model that recomputes all layers; --set plan.recompute=none says otherwise"]
    if "partition_activations" in kept and plan.get("tp", 1) == 1:
        del kept["partition_activations"]
        remarks.append("activation_checkpointing.partition_activations: parts them among tp ranks, of which the file has one")
    return {"recompute": "full", "deepspeed": plan["deepspeed"] | kept}, tuple(remarks)


def _read_optimizer(section: Keys) -> dict[str, Any]:
    """The optimizer that the file names: DeepSpeed's own Adam is one kernel, what comes from torch.optim is not
    (deepspeed/runtime/engine.py, _configure_basic_optimizer). Raises UserError for one that has no price.
    """
    kind = section.value("type")
    if kind is None:  # the training script's
        return {}
    params = section.section("params")
    if str(kind).lower() in ("adam", "adamw"):
        return {"optimizer": "adam"} | ({"fused_optimizer": False} if params.flag("torch_adam", False) else {})
    if str(kind).lower() == "sgd":
        return {"optimizer": "momentum" if params.value("momentum") else "sgd", "fused_optimizer": False}
    if str(kind).lower() in _OTHERS:
        return {"optimizer": str(kind).lower()}
    rule = "has no price: Adam, AdamW, Lamb, Lion, Muon and SGD have; without the section it is priced as Adam"
    raise UserError(f"{section.where}: optimizer.type={shown(kind)} {rule}")


def without_auto(data: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """The settings without what a trainer fills in ("auto"), and the names of what it does."""
    kept: dict[str, Any] = {}
    filled: list[str] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            kept[key], inside = without_auto(value, f"{prefix}{key}.")
            filled += inside
        elif value == "auto":
            filled.append(prefix + key)
        else:
            kept[key] = value
    return kept, filled


def remarks_on_filled(filled: Sequence[str]) -> tuple[str, ...]:
    """What a reader should know of settings that are "auto"."""
    named = [f"plan.{field}=…" for field, name in _BATCH.items() if name in filled]
    ask = f"; say --set {' --set '.join(named)} for others" if named else ""
    return (f"auto, which a trainer fills in: {', '.join(filled)}: defaults instead{ask}",) if filled else ()


def _read_batch(keys: Keys, filled: bool) -> dict[str, Any]:
    """Two of three numbers; the third follows from the number of GPUs."""
    batch = {field: value for field, name in _BATCH.items() if (value := keys.optional(name)) is not None}
    if "microbatch" not in batch and not filled:
        raise UserError(f"{keys.where}: field '{_BATCH['microbatch']}' is required: the number of GPUs is not in this file")
    return batch


def by_default(hook: str) -> dict[str, Any]:
    """Fields of the plan for a file that says no more than the stage."""
    return {} if hook == "ddp" else {"overlap": hook == "zero3", "deepspeed": {}}


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
    else:  # without reduce_scatter buckets are all-reduced, whatever else is said (stage_1_and_2.py, average_tensor)
        parts, together = zero.flag("reduce_scatter", True), zero.flag(_TOGETHER, True)
        limits |= {_TOGETHER: False} if parts and not together else {}
    plan["deepspeed"] = limits
    offload = {"optimizer": zero.section("offload_optimizer").choice("device", PLACES)}
    if hook == "zero3":
        offload["parameters"] = zero.section("offload_param").choice("device", PLACES)
    if any(offload.values()):
        plan["offload"] = offload
    return plan


def _elements(zero: Keys, key: str) -> int:
    """A number of elements; 5e8 is a text to YAML."""
    value = zero.value(key)
    try:
        elements = int(float(value))
    except (TypeError, ValueError, OverflowError):
        elements = -1
    if isinstance(value, bool) or elements < 0:
        raise UserError(f"{zero.where}: zero_optimization.{key}={shown(value)} must be a number of elements")
    return elements


def _write(job: Job) -> WrittenSettings:
    plan, own = job.resolve(), job.plan
    stage = next((stage for stage, name in STAGES.items() if name == own.data_parallel), 0)
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": own.microbatch,
        "gradient_accumulation_steps": plan.microbatches,
        "bf16": {"enabled": own.precision == "bf16"},
        "fp16": {"enabled": own.precision == "fp16"},
        "zero_optimization": {"stage": stage} | (_zero(own) if stage else {}),
    }
    if own.gradients == "fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if not own.clip_gradients:
        config["gradient_clipping"] = 0
    if own.optimizer in _OTHERS:
        config["optimizer"] = {"type": _OTHERS[own.optimizer], "params": {}}
    elif own.optimizer in ("momentum", "sgd"):
        config["optimizer"] = {"type": "SGD", "params": {"momentum": 0.9 if own.optimizer == "momentum" else 0}}
    elif not own.fused_optimizer:
        config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
    if own.deepspeed and (kept := {name: True for name in _CHECKPOINTING if getattr(own.deepspeed, name)}):
        config["activation_checkpointing"] = kept
    if own.tp > 1:
        config["tensor_parallel"] = {"autotp_size": own.tp}
    if own.cp > 1 and own.cp_method == "ulysses":
        config["sequence_parallel_size"] = own.cp
    launch = f"deepspeed --num_nodes {job.cluster.nodes} --num_gpus {job.cluster.node.gpus} train.py --deepspeed_config FILE"
    more: tuple[str, ...] = ("optimizer.params: add your own learning rate",) if "optimizer" in config else ()
    if not own.clip_gradients and (stage or own.precision != "fp32"):
        more += ("clip_gradients=false: DeepSpeed takes the norm of gradients all the same",)
    if own.deepspeed and own.deepspeed.tiles > 1:
        more += (f"to be said in the model's code: deepspeed.zero.TiledLinear(…, out_splits={own.deepspeed.tiles}) in layers",)
    return WrittenSettings(json.dumps(config, indent=2) + "\n", launch, more)


def _zero(plan: Plan) -> dict[str, Any]:
    sizes = {"reduce_bucket_size": round(plan.bucket / plan.bytes_per_gradient)} if plan.bucket else {}
    config: dict[str, Any] = {"overlap_comm": plan.overlap}
    elsewhere = {"version", "tiles", *_CHECKPOINTING}
    config |= plan.deepspeed.model_dump(exclude_unset=True, exclude=elsewhere) if plan.deepspeed else sizes
    for name, place in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        if plan.offload and getattr(plan.offload, place):
            config[name] = {"device": getattr(plan.offload, place)}
    return config


frameworks("deepspeed")(Framework("ds_config.json", _read, _write, _SCRIPT, frozenset({"zero_optimization", *_BATCH.values()})))
