"""Megatron-LM: a shell script (or a list of arguments in YAML or JSON) with torchrun's and pretrain_gpt.py's arguments.

Names and defaults: NVIDIA/Megatron-LM, megatron/training/arguments.py. The model is in
`strategies.frameworks.megatron.model_settings`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.frameworks.megatron.model_settings import Flags, model_flags, number, read_model
from strategies.frameworks.megatron.options import MegatronOptions
from strategies.frameworks.settings import Framework, Keys, ReadSettings, WrittenSettings, frameworks
from strategies.frameworks.shell import arguments
from strategies.models.parts import LAYERS
from topologies.reading import UserError

if TYPE_CHECKING:
    from strategies.job import Job
    from strategies.models.model import Model
    from strategies.plan.plan import Plan

_DEGREES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "microbatch": "micro-batch-size",
    "global_batch": "global-batch-size",
    "sequence": "seq-length",
}
_ENDS = ("embedding", "loss")  # of a pipeline, which may count as layers
_SHARDING = {"no_shard": "ddp", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
_CP = {"p2p": "ring", "a2a": "ulysses", "all_gather": "all_gather"}
_DISPATCHERS = {"deepep": "flex", "hybridep": "flex"}
_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
_IN_BF16 = {  # ours -> theirs
    "layers_at_start_in_bf16": "num-layers-at-start-in-bf16",
    "layers_at_end_in_bf16": "num-layers-at-end-in-bf16",
}
_BACKENDS = {"auto": "flash", "flash": "flash", "fused": "flash", "unfused": "materialised", "local": "materialised"}
_ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}


def _read(path: Path) -> ReadSettings:
    flags = Keys(arguments(path), str(path), "--")
    model = read_model(flags)
    plan: dict[str, Any] = {field: value for field, name in _DEGREES.items() if (value := flags.optional(name)) is not None}
    plan |= {
        "precision": "bf16" if flags.flag("bf16", False) else "fp16" if flags.flag("fp16", False) else "fp32",
        "data_parallel": flags.choice("data-parallel-sharding-strategy", _SHARDING, "no_shard"),
        "overlap": flags.flag("overlap-grad-reduce", False),
        "overlap_p2p": not flags.flag("no-overlap-p2p-communication", False),
        "sequence_parallel": flags.flag("sequence-parallel", False) and plan.get("tp", 1) > 1,  # with tp=1 it turns that off
        "attention": flags.choice("attention-backend", _BACKENDS, "auto"),
        "clip_gradients": number(flags, "clip-grad", flags.value("clip-grad", 1.0)) > 0,
        "optimizer": flags.choice("optimizer", {"adam": "adam", "sgd": "momentum"}, "adam"),
        "order": _ORDERS[flags.flag("use-tp-pp-dp-mapping", False)],
    }
    for said in (
        "use-megatron-fsdp",
        "use-flash-attn",
        "rdzv-backend",
        "rdzv-endpoint",
        "use-mcore-models",
        "train-iters",
    ):
        flags.value(said)  # how it is started, or what is done here anyway
    if plan["optimizer"] == "momentum" and not number(flags, "sgd-momentum", flags.value("sgd-momentum", 0.9)):
        plan["optimizer"] = "sgd"
    if plan["data_parallel"] == "ddp" and flags.flag("use-distributed-optimizer", False):
        plan["data_parallel"] = "zero1"
    if flags.flag("use-torch-fsdp2", False):
        plan |= {"data_parallel": "zero3", "reshard": not flags.flag("torch-fsdp2-no-reshard-after-forward", False)}
    if plan.get("cp", 1) > 1:
        plan["cp_method"] = flags.choice("cp-comm-type", _CP, "p2p")
    if flags.flag("tp-comm-overlap", False) and plan.get("tp", 1) > 1:
        plan["overlap_tp"] = "pieces"
    plan |= _read_kernels(flags) | _read_gradients(flags, plan["precision"]) | _read_recompute(flags)
    dispatches = "experts" in model and plan.get("ep", 1) * plan.get("tp", 1) > 1
    plan |= _read_experts(flags, dispatches) | _read_pipeline(flags, model, plan.get("pp", 1))
    nodes, each = flags.optional("nnodes"), flags.optional("nproc-per-node")
    gpus = nodes * each if nodes and each else None
    if plan["data_parallel"] != "ddp" and (copies := flags.optional("num-distributed-optimizer-instances", 1) or 1) > 1:
        plan["shard"] = _shard(flags.where, plan, copies, gpus)
    return ReadSettings(str(path), plan, model, nodes, gpus, flags.ignored)


def _shard(where: str, plan: Mapping[str, Any], copies: int, gpus: int | None) -> int:
    """dp ranks of each of so many copies of the sharded states. Raises UserError where they do not follow from the file."""
    said = f"{where}: --num-distributed-optimizer-instances={copies}"
    if gpus is None:
        raise UserError(f"{said} needs --nnodes and --nproc-per-node, which say how many ranks have a copy")
    degrees: list[int] = [plan.get(axis, 1) for axis in ("tp", "pp", "cp")]
    dp = gpus // max(1, math.prod(degrees))
    if dp % copies:
        raise UserError(f"{said} does not divide dp={dp}")
    return dp // copies


def _read_kernels(flags: Keys) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    fused = flags.flag("cross-entropy-loss-fusion", False)
    if flags.flag("deterministic-mode", False):
        fields["deterministic"] = True  # which has no fused loss
    elif not fused:
        fields["loss"] = "operators"
    if flags.choice("fp8-format", {None: False, "e4m3": True, "hybrid": True}):
        scaling = flags.choice("fp8-recipe", {name: name for name in _RECIPES}, "delayed")
        fields["fp8"] = {"scaling": scaling, "gather": flags.flag("fp8-param-gather", False)}
        fields["fp8"] |= {"attention": True} if flags.flag("fp8-dot-product-attention", False) else {}
        tp_only = flags.flag("tp-only-amax-red", False)
        fields["fp8"] |= {"amax_reduction": "tp"} if tp_only and scaling == "delayed" else {}
    if flags.choice("fp4-format", {None: False, "e2m1": True}) and flags.choice("fp4-recipe", {"nvfp4": True}, "nvfp4"):
        fields["fp8"] = {"scaling": "nvfp4", "gather": flags.flag("fp4-param-gather", False)}
        fields["fp8"] |= {"attention": True} if flags.flag("fp8-dot-product-attention", False) else {}
    ends = {field: flags.optional(name, 1) for field, name in _IN_BF16.items()}
    if flags.flag("first-last-layers-bf16", False) and "fp8" in fields:
        fields["fp8"] |= ends
    return fields


def _read_gradients(flags: Keys, precision: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if flags.flag("no-gradient-accumulation-fusion", False):
        fields["accumulation_fusion"] = False
    options: dict[str, Any] = {"check_gradients": False} if flags.flag("no-check-for-nan-in-loss-and-grad", False) else {}
    if flags.flag("ddp-average-in-collective", False):
        options["average_in_collective"] = True
    if flags.flag("ddp-pad-buckets-for-high-nccl-busbw", False) and flags.flag("use-distributed-optimizer", False):
        options["pad_buckets_for_high_nccl_busbw"] = True
    distributed = flags.flag("use-distributed-optimizer", False) and flags.flag("overlap-grad-reduce", False)
    if flags.flag("overlap-param-gather", False) and distributed:
        options["overlap_param_gather"] = True
    if flags.flag("moe-router-fusion", False):
        options["router_fusion"] = True
    if flags.says("cuda-graph-impl", "full_iteration"):
        options["cuda_graph"] = True
    if options:
        fields["framework"] = options
    if flags.flag("use-precision-aware-optimizer", False):
        for field in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            fields[field] = str(flags.value(field.replace("_", "-"), "fp32"))
    in_bf16 = flags.flag("grad-reduce-in-bf16", False)
    if flags.flag("accumulate-allreduce-grads-in-fp32", False) or (precision == "bf16" and not in_bf16):
        fields["gradients"] = "fp32"  # Megatron-LM sets the flag itself for bf16
    if elements := flags.optional("ddp-bucket-size"):
        fields["bucket"] = f"{elements * (4 if 'gradients' in fields else 2)} B"
    return fields


def _read_recompute(flags: Keys) -> dict[str, Any]:
    granularity = flags.choice("recompute-granularity", {None: "none", "selective": "selective", "full": "full"})
    fields: dict[str, Any] = {"recompute": "selective" if flags.flag("recompute-activations", False) else granularity}
    method = flags.choice("recompute-method", {None: None, "uniform": "uniform", "block": "block"})
    number = flags.optional("recompute-num-layers") or 1
    if fields["recompute"] == "full" and (method, number) not in ((None, 1), ("uniform", 1)):  # which is every layer by itself
        fields |= {"recompute_method": method, "recompute_layers": number}
    modules = flags.value("recompute-modules", None)
    if fields["recompute"] == "selective" and modules is not None:
        names = [str(name).replace("-", "_") for name in (modules if isinstance(modules, list) else [modules])]
        if names != ["core_attn"]:
            fields["recompute_modules"] = names
    if layers := flags.optional("cpu-offloading-num-layers"):
        fields["offload_activations"] = layers
    return fields


def _read_experts(flags: Keys, dispatches: bool) -> dict[str, Any]:
    """dispatches: ranks exchange tokens of experts."""
    fields: dict[str, Any] = {}
    if (degree := flags.optional("expert-tensor-parallel-size")) is not None:
        fields["expert_tp"] = degree
    if (factor := flags.value("moe-expert-capacity-factor", None)) is not None:
        fields["capacity_factor"] = number(flags, "moe-expert-capacity-factor", factor)
    known = ("alltoall", "allgather", "flex")
    dispatcher = flags.choice("moe-token-dispatcher-type", {name: name for name in known}, "allgather")
    backend = flags.choice("moe-flex-dispatcher-backend", {"deepep": "deepep", "hybridep": "hybridep"}, "deepep")
    flags.flag("moe-enable-deepep", False)  # which `flex` has by default
    own = [flags.optional(name) for name in ("moe-flex-dispatcher-num-sms", f"moe-{backend}-num-sms")]
    if dispatcher == "allgather" and dispatches:
        fields["token_dispatcher"] = dispatcher
    if dispatcher == "flex":
        fields["token_dispatcher"] = backend
        if (sms := next((each for each in own if each is not None), None)) is not None:
            fields["dispatcher_sms"] = sms
    if flags.flag("moe-pad-expert-input-to-capacity", False):
        fields["pad_to_capacity"] = True
    return fields


def _read_pipeline(flags: Keys, model: Mapping[str, Any], pp: int) -> dict[str, Any]:
    each, chunks = flags.optional("num-layers-per-virtual-pipeline-stage"), flags.optional("num-virtual-stages-per-pipeline-rank")
    layers, pp = model.get("layers", 0), max(1, pp)
    ends = {f"{end}_as_layer": True for end in _ENDS if flags.flag(f"account-for-{end}-in-pipeline-split", False)}
    if each and layers:
        counted = layers + len(ends)
        if counted % (pp * each):
            rule = f"{pp} stages · {each} do not divide num-layers={layers}{f' and {len(ends)} ends' if ends else ''}"
            raise UserError(f"{flags.where}: --num-layers-per-virtual-pipeline-stage={each}: {rule}")
        chunks = counted // pp // each
    first, last = flags.optional("decoder-first-pipeline-num-layers"), flags.optional("decoder-last-pipeline-num-layers")
    fields: dict[str, Any] = {"schedule": "interleaved", "chunks": chunks} if chunks and chunks > 1 else {}
    if (first or last) and layers and pp <= LAYERS:  # otherwise the plan is refused
        middle = pp - bool(first) - bool(last)
        each, rest = divmod(layers - (first or 0) - (last or 0), max(1, middle))
        if rest or not middle or fields:
            raise UserError(
                f"{flags.where}: {layers} layers with {first or last} on an end do not spread evenly over {pp} stages"
            )
        fields["layers_per_stage"] = [*[first] * bool(first), *[each] * middle, *[last] * bool(last)]
    return fields | ends


def _write(job: Job) -> WrittenSettings:
    plan, own = job.resolve(), job.plan
    batch = {"microbatch": own.microbatch, "global_batch": plan.global_batch, "sequence": plan.sequence}
    flags = model_flags(job.model.model_copy(update={"context": max(job.model.context, plan.sequence)}), own.tp)
    flags += [("--" + name, batch.get(field) or getattr(own, field)) for field, name in _DEGREES.items()]
    flags += [("--" + own.precision, None)] if own.precision in ("bf16", "fp16") else []
    if own.fp8 is not None and own.fp8.scaling == "nvfp4":
        flags += [("--fp4-format", "e2m1"), ("--fp4-recipe", "nvfp4"), *[("--fp4-param-gather", None)] * own.fp8.gather]
    elif own.fp8 is not None:
        flags += [("--fp8-format", "hybrid"), ("--fp8-recipe", own.fp8.scaling if own.fp8.scaling in _RECIPES else "delayed")]
        flags += [("--fp8-param-gather", None)] * own.fp8.gather
        flags += [("--tp-only-amax-red", None)] * (own.fp8.amax_reduction == "tp")
    if own.fp8 is not None and own.fp8.attention:
        flags.append(("--fp8-dot-product-attention", None))
    if own.fp8 is not None and any(getattr(own.fp8, field) for field in _IN_BF16):
        flags += [
            ("--first-last-layers-bf16", None),
            *(("--" + name, getattr(own.fp8, field)) for field, name in _IN_BF16.items()),
        ]
    if own.cp > 1:
        flags.append(("--cp-comm-type", {ours: theirs for theirs, ours in _CP.items()}[own.cp_method]))
    said = {
        "sequence-parallel": own.sequence_parallel,
        "overlap-grad-reduce": own.overlap,
        "no-overlap-p2p-communication": not own.overlap_p2p,
        "use-tp-pp-dp-mapping": own.order == _ORDERS[True],
        "grad-reduce-in-bf16": own.precision == "bf16" and own.gradients == "same",
        "accumulate-allreduce-grads-in-fp32": own.precision != "bf16" and own.gradients == "fp32",
    }
    flags += [("--" + name, None) for name, wanted in said.items() if wanted]
    flags += _sharding_flags(own) + _expert_flags(own, job.model) + _recompute_flags(own)
    flags += _pipeline_flags(own, plan.chunks, plan.layers)
    flags += [("--num-distributed-optimizer-instances", plan.replicas)] * (plan.replicas > 1 and own.hook.zero_stage)
    if own.data_parallel in ("ddp", "zero1", "zero2") and own.bucket is not None:
        flags.append(("--ddp-bucket-size", round(own.bucket / own.bytes_per_gradient)))
    flags.append(("--attention-backend", "flash" if own.fused_attention else "unfused"))
    for kind, wanted in (("hidden", job.model.dropout), ("attention", job.model.attention_dropout)):
        flags.append((f"--{kind}-dropout", 0.1 if (wanted if own.dropout is None else own.dropout) else 0))
    flags += [("--optimizer", "sgd")] * (own.optimizer != "adam") + [("--sgd-momentum", 0)] * (own.optimizer == "sgd")
    if {own.exp_avg_dtype, own.exp_avg_sq_dtype} != {"fp32"}:
        flags += [("--use-precision-aware-optimizer", None), ("--exp-avg-dtype", own.exp_avg_dtype)]
        flags.append(("--exp-avg-sq-dtype", own.exp_avg_sq_dtype))
    flags += [("--clip-grad", 0)] * (not own.clip_gradients)
    flags += [("--no-gradient-accumulation-fusion", None)] * (own.accumulation_fusion is False)
    if isinstance(own.options, MegatronOptions):
        flags += [("--no-check-for-nan-in-loss-and-grad", None)] * (not own.options.check_gradients)
        flags += [("--ddp-average-in-collective", None)] * own.options.average_in_collective
        flags += [("--ddp-pad-buckets-for-high-nccl-busbw", None)] * own.options.pad_buckets_for_high_nccl_busbw
        flags += [("--overlap-param-gather", None)] * own.options.overlap_param_gather
        flags += [("--moe-router-fusion", None)] * own.options.router_fusion
        flags += [("--cuda-graph-impl", "full_iteration")] * own.options.cuda_graph
    flags += [("--deterministic-mode", None)] * own.deterministic
    flags += [("--cross-entropy-loss-fusion", None)] * (own.loss is None and not own.deterministic)
    start = (
        f"torchrun --nnodes {job.cluster.nodes} --nproc-per-node {job.cluster.node.gpus} --rdzv-backend c10d "
        '--rdzv-endpoint "$HEAD_NODE:29500" pretrain_gpt.py'
    )
    lines = [start, *(f"{name} {value}" if value is not None else name for name, value in flags)]
    data = "data, tokenizer, learning rate and checkpoints: add your own arguments"
    return WrittenSettings(" \\\n    ".join(lines) + "\n", "sh FILE    # on every node, with HEAD_NODE set", (data,))


def _sharding_flags(plan: Plan) -> Flags:
    if plan.data_parallel == "zero1":
        return [("--use-distributed-optimizer", None)]
    if plan.data_parallel in ("zero2", "zero3"):
        strategy = next(theirs for theirs, ours in _SHARDING.items() if ours == plan.data_parallel)
        return [("--use-megatron-fsdp", None), ("--data-parallel-sharding-strategy", strategy)]
    return []


def _recompute_flags(plan: Plan) -> Flags:
    flags: Flags = [("--recompute-granularity", plan.recompute)] if plan.recompute != "none" else []
    if plan.recompute == "full" and plan.recompute_method != "every":
        flags += [
            ("--recompute-method", plan.recompute_method or "uniform"),
            ("--recompute-num-layers", plan.recompute_layers or 1),
        ]
    if plan.recompute == "selective" and plan.recompute_modules is not None:
        flags.append(("--recompute-modules", " ".join(plan.recompute_modules)))
    if plan.offload_activations is not None:
        flags.append(("--cpu-offloading-num-layers", plan.offload_activations))
    return flags + [("--tp-comm-overlap", None)] * (plan.overlap_tp == "pieces")


def _expert_flags(plan: Plan, model: Model) -> Flags:
    flags: Flags = [("--expert-tensor-parallel-size", plan.expert_tp)] if plan.expert_tp is not None else []
    flags += [("--moe-expert-capacity-factor", plan.capacity_factor)] if plan.capacity_factor is not None else []
    if model.experts is not None and plan.ep * plan.tp > 1:
        flags.append(("--moe-token-dispatcher-type", _DISPATCHERS.get(plan.token_dispatcher, plan.token_dispatcher)))
    flags += [("--moe-flex-dispatcher-backend", plan.token_dispatcher)] * (plan.token_dispatcher in _DISPATCHERS)
    flags += [("--moe-flex-dispatcher-num-sms", plan.dispatcher_sms)] * (plan.dispatcher_sms is not None)
    return flags + [("--moe-pad-expert-input-to-capacity", None)] * plan.pad_to_capacity


def _pipeline_flags(plan: Plan, chunks: int, layers: tuple[int, ...]) -> Flags:
    flags: Flags = [("--num-virtual-stages-per-pipeline-rank", chunks)] if plan.schedule == "interleaved" else []
    ends = [end for end in _ENDS if getattr(plan, f"{end}_as_layer")]
    if ends:
        return flags + [(f"--account-for-{end}-in-pipeline-split", None) for end in ends]
    if chunks == 1 and len(layers) > 2 and len(set(layers)) > 1 and len(set(layers[1:-1])) == 1:
        flags += [("--decoder-first-pipeline-num-layers", layers[0]), ("--decoder-last-pipeline-num-layers", layers[-1])]
    return flags


frameworks("megatron")(Framework("pretrain.sh", _read, _write))
