"""torchtitan: the TOML of v0.2.2 and before. Names: pytorch/torchtitan, torchtitan/config."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.frameworks.settings import EVERYTHING, Framework, Keys, ReadSettings, WrittenSettings, frameworks, of_pytorch
from topologies.reading import UserError, load_yaml, shown

if TYPE_CHECKING:
    from strategies.job import Job
    from strategies.plan.plan import Plan

_DEGREES = {
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
}
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}  # classes of torch.distributed.pipelining
_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _read(path: Path) -> ReadSettings:
    keys = Keys(load_yaml(path, ".toml"), str(path))
    training, parallel = keys.section("training"), keys.section("parallelism")
    plan: dict[str, Any] = {field: value for field, name in _DEGREES.items() if (value := parallel.optional(name)) is not None}
    plan |= {
        "microbatch": training.integer("batch_size" if training.value("batch_size") else "local_batch_size"),  # its older name
        "sequence": training.integer("seq_len"),
        "precision": training.choice("mixed_precision_param", _TYPES, "bfloat16"),
        "gradients": {"fp32": "fp32"}.get(training.choice("mixed_precision_reduce", _TYPES, "float32"), "same"),
        "sequence_parallel": plan.get("tp", 1) > 1,  # torchtitan's tensor parallel plans always split norms
    }
    if plan.get("ep", 1) > 1:
        plan |= _read_experts(parallel, plan.get("tp", 1))
    if training.choice("dtype", _TYPES, "float32") == "bf16":
        plan["master_weights"] = False
    if training.value("global_batch_size", -1) != -1:
        plan["global_batch"] = training.integer("global_batch_size")
    asynchronous = parallel.flag("enable_async_tensor_parallel", False)
    if plan.get("tp", 1) > 1:  # PyTorch's tensor parallelism waits for its collectives, unless it is asynchronous
        plan["overlap_tp"] = "pieces" if asynchronous else "none"
    plan |= _read_sharding(parallel, plan) | _read_pipeline(parallel, plan) | _read_fp8(keys)
    plan |= _read_recompute(keys.section("activation_checkpoint"))
    optimizer = keys.section("optimizer")
    plan["optimizer"] = optimizer.choice("name", {"Adam": "adam", "AdamW": "adam"}, "AdamW")
    known = {"fused": True, "foreach": False, "for-loop": False}
    one_pass = optimizer.choice("implementation", known, "fused" if optimizer.flag("fused", True) else "foreach")  # older: fused
    plan["fused_optimizer"] = one_pass
    if training.flag("enable_cpu_offload", False):
        plan["offload"] = EVERYTHING.model_dump(exclude_unset=True)
    compiled = keys.section("compile").flag("enable", False) or training.flag("compile", False)
    plan, remarks = of_pytorch(plan, compiled or asynchronous)
    options = {"complex_rotary": True, "repeated_keys": True}  # torchtitan/models/llama/model.py
    by_default = parallel.value("fsdp_reshard_after_forward", "default") == "default"
    if plan.get("reshard") and by_default and "offload" not in plan:
        options["keep_last_unit"] = True  # apply_fsdp: but for norm and head
    plan |= {"attention": "sdpa", "framework": options}
    return ReadSettings(str(path), plan, ignored=keys.ignored, remarks=remarks)


def _read_experts(parallel: Keys, tp: int) -> dict[str, Any]:
    """Experts on several ranks: not cut by default, when tp ranks are among the ep ranks."""
    cut = parallel.optional("expert_tensor_parallel_degree", 1)
    backend = parallel.choice("expert_parallel_comm_backend", {"standard": "alltoall", "deepep": "deepep"}, "standard")
    return {"token_dispatcher": backend} | ({"expert_tp": cut} if tp > 1 else {})


def _read_recompute(checkpoint: Keys) -> dict[str, Any]:
    """Selective means every so many-th layer, by default every second, or by operation ("op")."""
    mode = checkpoint.choice("mode", {"none": "none", "full": "full", "selective": "selective"}, "selective")
    option = str(checkpoint.value("selective_ac_option", "2"))
    if mode != "selective" or option == "op":
        return {"recompute": "operators" if mode == "selective" else mode}
    if not re.fullmatch(r"[1-9][0-9]{0,5}", option):
        raise UserError(f"{checkpoint.where}: activation_checkpoint.selective_ac_option={shown(option)} must be 'op' or a number")
    return {"recompute": "full", "recompute_method": "every", "recompute_layers": int(option)}


def _read_fp8(keys: Keys) -> dict[str, Any]:
    """Linear layers in fp8, by a model converter with a section of its own, now under `quantize.linear`."""
    fields: dict[str, Any] = {}
    model, linear = keys.section("model"), keys.section("quantize").section("linear")
    for said in ("name", "flavor"):
        model.value(said)  # the model is named beside
    converters = model.value("converters") or []
    if not isinstance(converters, str | list):
        raise UserError(f"{model.where}: model.converters={shown(converters)} must be a list of names")
    asked = converters.split(",") if isinstance(converters, str) else converters
    for name, recipes, default in (
        ("float8", ("tensorwise", "rowwise"), "tensorwise"),
        ("mx", ("mxfp8_cublas", "mxfp8"), "mxfp8_cublas"),
    ):
        if name not in asked and f"quantize.linear.{name}" not in asked:
            continue
        section = keys.section(name) if name in asked else linear.section(name)
        scaling = section.choice("recipe_name", {recipe: recipe.split("_")[0] for recipe in recipes}, default)
        fields["fp8"] = {"scaling": scaling, "gather": section.flag("enable_fsdp_float8_all_gather", False)}
    return fields


def _read_sharding(parallel: Keys, plan: dict[str, Any]) -> dict[str, Any]:
    replicate = parallel.optional("data_parallel_replicate_degree", 1) or 1
    rest = parallel.value("data_parallel_shard_degree", -1) == -1
    shard = -1 if rest else parallel.integer("data_parallel_shard_degree")
    reshard = parallel.choice(
        "fsdp_reshard_after_forward", {"default": plan.get("pp", 1) == 1, "always": True, "never": False}, "default"
    )  # default: not with pipeline parallelism
    if shard == 1:
        return {"data_parallel": "ddp", "dp": replicate, "bucket": "100 MiB"}  # replicate(…, bucket_cap_mb=100) of apply_ddp
    if replicate == 1:
        return {"data_parallel": "zero3", "reshard": reshard} | ({"dp": shard} if shard != -1 else {})
    if shard == -1:
        raise UserError(f"{parallel.where}: parallelism.data_parallel_shard_degree=-1: give its value beside a replicate degree")
    return {"data_parallel": "zero3", "reshard": reshard, "dp": replicate * shard, "shard": shard}


def _read_pipeline(parallel: Keys, plan: dict[str, Any]) -> dict[str, Any]:
    """The microbatch of the pipeline is cut out of the local batch."""
    if plan.get("pp", 1) == 1:
        return {}
    known = {theirs: ours for ours, theirs in _SCHEDULES.items()}
    schedule = parallel.value("pipeline_parallel_schedule_csv") or parallel.choice("pipeline_parallel_schedule", known, "1F1B")
    local, each = plan["microbatch"], parallel.optional("pipeline_parallel_microbatch_size", 1) or 1
    if local % each:
        raise UserError(f"{parallel.where}: pipeline_parallel_microbatch_size={each} does not divide local_batch_size={local}")
    fields: dict[str, Any] = {"schedule": schedule, "microbatch": each}
    return fields if "global_batch" in plan else fields | {"accumulation": local // each}


def _write(job: Job) -> WrittenSettings:
    plan, own = job.resolve(), job.plan
    sections: dict[str, dict[str, Any]] = {
        "training": {
            "local_batch_size": own.microbatch * (plan.microbatches if own.pp > 1 else 1),
            "global_batch_size": plan.global_batch,
            "seq_len": plan.sequence,
            **_types(own),
        }
    }
    sections["parallelism"] = {name: getattr(own, field) for field, name in _DEGREES.items()} | _sharding(own, plan.dp)
    if own.ep > 1:
        sections["parallelism"]["expert_tensor_parallel_degree"] = 1 if own.whole_experts else own.tp
        sections["parallelism"]["expert_parallel_comm_backend"] = "deepep" if own.token_dispatcher == "deepep" else "standard"
    if own.tp > 1 and own.overlap_tp == "pieces":
        sections["parallelism"]["enable_async_tensor_parallel"] = True
    if own.pp > 1:
        sections["parallelism"]["pipeline_parallel_microbatch_size"] = own.microbatch
        if own.schedule in _SCHEDULES:
            sections["parallelism"]["pipeline_parallel_schedule"] = _SCHEDULES[own.schedule]
    sections["activation_checkpoint"] = _recompute(own)
    if not own.fused_optimizer:
        sections["optimizer"] = {"implementation": "foreach"}
    if own.offload == EVERYTHING:
        sections["training"]["enable_cpu_offload"] = True
    if own.kernels != "torch":  # asynchronous tensor parallelism, too, needs it
        sections["compile"] = {"enable": True}
    sections |= _fp8(own)
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    ]
    launch = (
        f"torchrun --nnodes {job.cluster.nodes} --nproc-per-node {job.cluster.node.gpus} --rdzv-backend c10d "
        '--rdzv-endpoint "$HEAD_NODE:29500" -m torchtitan.train --job.config_file FILE'
    )
    return WrittenSettings("\n".join(lines), launch, (f"model: the flavor with {job.model.name}'s sizes",))


def _recompute(plan: Plan) -> dict[str, str]:
    if plan.recompute_method == "every":
        return {"mode": "selective", "selective_ac_option": str(plan.recompute_layers)}
    if plan.recompute == "operators":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": "full" if plan.recompute == "full" else "none"}  # Megatron-LM's selective recomputation is not to be had


def _types(plan: Plan) -> dict[str, str]:
    names = {ours: theirs for theirs, ours in _TYPES.items()}
    precision = names.get(plan.precision, "float32")
    whole = {"dtype": precision} if plan.updates_16_bits else {}
    return {
        "mixed_precision_param": precision,
        "mixed_precision_reduce": "float32" if plan.gradients == "fp32" else precision,
    } | whole


def _fp8(plan: Plan) -> dict[str, dict[str, Any]]:
    if plan.fp8 is None:
        return {}
    if plan.fp8.scaling == "mxfp8":
        return {"model": {"converters": ["quantize.linear.mx"]}, "quantize.linear.mx": {"recipe_name": "mxfp8_cublas"}}
    more = {"enable_fsdp_float8_all_gather": True} if plan.fp8.gather and plan.data_parallel == "zero3" else {}
    recipe = plan.fp8.scaling if plan.fp8.scaling in ("tensorwise", "rowwise") else "tensorwise"
    return {
        "model": {"converters": ["quantize.linear.float8"]},
        "quantize.linear.float8": {"recipe_name": recipe, "filter_fqns": ["output"], **more},
    }


def _sharding(plan: Plan, dp: int) -> dict[str, Any]:
    if plan.data_parallel != "zero3":
        return {"data_parallel_replicate_degree": dp, "data_parallel_shard_degree": 1}
    shard = plan.shard or dp
    return {
        "data_parallel_replicate_degree": dp // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": ("default" if plan.kernel_set.keeps_last_unit else "always") if plan.reshard else "never",
    }


frameworks("torchtitan")(Framework("train.toml", _read, _write, keys=frozenset({"parallelism", "training"})))
