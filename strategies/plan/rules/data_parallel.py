"""What each way to share model states, and each group of fields that describes one, excludes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strategies.models.model import Model
from topologies.hardware import Cpu

if TYPE_CHECKING:
    from strategies.frameworks.deepspeed.options import DeepSpeed
    from strategies.plan.options import Offload
    from strategies.plan.plan import Plan


def shares(plan: Plan, dp: int) -> Iterator[str]:
    """Rules of sharded states."""
    shards = plan.hook.shards
    if not plan.reshard and "parameter" not in shards:
        yield f"reshard=false contradicts data_parallel={plan.data_parallel}, which shards no parameters"
    if plan.kernel_set.flat_parameters and not plan.pytorch_fsdp:
        has = "deepspeed" if plan.deepspeed else f"data_parallel={plan.data_parallel}, kernels={plan.kernels}"
        yield f"flat_parameters=true contradicts {has}: PyTorch's FSDP1 is zero3, kernels torch or compiled"
    yield from _kept_units(plan)
    if plan.shard is None:
        return
    if not shards:
        yield f"shard={plan.shard} contradicts data_parallel={plan.data_parallel}, which shards nothing"
    if plan.shard == 1 or dp % plan.shard:
        yield f"shard={plan.shard} must be at least 2 and divide dp={dp}"


def _kept_units(plan: Plan) -> Iterator[str]:
    """What FSDP2 keeps gathered between a forward pass and its backward pass."""
    kernels = plan.kernel_set
    for option, said in {"root_unit": kernels.root_unit, "keep_last_unit": kernels.keeps_last_unit}.items():
        has = f"data_parallel={plan.data_parallel}" + ", deepspeed" * (plan.deepspeed is not None)
        if said and not plan.pytorch_fsdp:
            yield f"{option}=true contradicts {has}: it is a choice of PyTorch's FSDP2, zero3"
        elif said and kernels.flat_parameters:
            yield f"{option}=true contradicts flat_parameters=true: it is a choice of FSDP2"
        elif said and plan.pp > 1:
            yield f"{option}=true contradicts pp={plan.pp}: it is simulated of models without stages"
        elif said and plan.offload is not None:
            yield f"{option}=true contradicts offload: it is simulated of parameters that stay on the GPUs"
    if kernels.keeps_last_unit and not plan.reshard:
        yield "keep_last_unit=true contradicts reshard=false, which releases no unit"


def belongs(plan: Plan, model: Model) -> Iterator[str]:
    """Groups of fields go with the strategies that they describe."""
    if plan.powersgd is not None and not plan.hook.powersgd:
        yield f"powersgd contradicts data_parallel={plan.data_parallel}; it describes ddp_powersgd"
    if plan.deepspeed is not None:
        yield from _deepspeed(plan, plan.deepspeed)
        if plan.deepspeed.tiles > 1:
            yield from _tiled(plan, plan.deepspeed, model)
    if plan.gradient_sync is not None:
        yield from _synchronised(plan)
    if plan.reshard_after_backward is not None:
        yield from _resharded(plan, plan.reshard_after_backward)
    yield from _gradients(plan)
    if plan.offload is not None:
        yield from _offload(plan, plan.offload, model)


def _gradients(plan: Plan) -> Iterator[str]:
    """Whose buffers of gradients are given back, or padded."""
    has = "deepspeed" if plan.deepspeed else "offload" if plan.offload else ""
    has = has or f"data_parallel={plan.data_parallel}, kernels={plan.kernels}"
    stated = plan.framework.model_dump(exclude_unset=True) if plan.framework else {}
    said = {name: f"{name}={str(value).lower()} contradicts {has}" for name, value in stated.items()}
    if "set_to_none" in said and not plan.own_gradients:
        yield f"{said['set_to_none']}, whose gradients are in a buffer that stays"
    if "gradient_as_bucket_view" in said and not (plan.own_gradients and plan.hook.of_ddp):
        yield f"{said['gradient_as_bucket_view']}; it is a choice of PyTorch's DDP, kernels torch or compiled"
    if "broadcast_buffers" in said and not plan.hook.of_ddp:
        yield f"{said['broadcast_buffers']}; it is a choice of PyTorch's DDP"
    if "pad_buckets_for_high_nccl_busbw" in said and (plan.deepspeed or not plan.hook.even_buckets):
        yield f"{said['pad_buckets_for_high_nccl_busbw']}; it is a choice of Megatron-LM's distributed optimizer, zero1"
    if plan.kernel_set.overlap_param_gather and (plan.deepspeed or not plan.hook.even_buckets or not plan.overlap):
        what = "it is a choice of Megatron-LM's distributed optimizer, zero1, that overlaps gradients"
        yield f"{said['overlap_param_gather']}, overlap={str(plan.overlap).lower()}; {what}"


def _synchronised(plan: Plan) -> Iterator[str]:
    """Who can choose when to reduce gradients, and keep whole ones until the last microbatch."""
    said = f"gradient_sync={plan.gradient_sync} contradicts"
    if "gradient" not in plan.hook.shards:
        yield f"{said} data_parallel={plan.data_parallel}; it is a choice of hooks that shard gradients: zero2, zero3"
    if plan.gradient_sync == "every":
        return
    if plan.deepspeed is not None:
        yield f"{said} deepspeed: its ZeRO-2 and ZeRO-3 reduce gradients as they are made"
    if plan.offload is not None:
        yield f"{said} offload: gradients leave the GPU as they are made"


def _resharded(plan: Plan, after_backward: bool) -> Iterator[str]:
    """When parameters are released after backward passes that reduce nothing, which there must be."""
    said = f"reshard_after_backward={str(after_backward).lower()}"
    if not plan.shards_parameters or plan.deepspeed is not None:
        has = "deepspeed" if plan.deepspeed else f"data_parallel={plan.data_parallel}"
        yield f"{said} contradicts {has}; it is a choice of zero3 by FSDP"
    elif plan.syncs_gradients == "every":
        yield f"{said} needs gradient_sync=last: a backward pass that reduces gradients releases parameters"
    elif after_backward and plan.pp > 1:
        yield f"{said} contradicts pp={plan.pp}: parameters of pipeline stages stay until the last backward pass"


def _offload(plan: Plan, offload: Offload, model: Model) -> Iterator[str]:
    """Rules of states that are not kept on GPUs."""
    named = f"offload.parameters={offload.parameters}" if offload.parameters else f"offload.optimizer={offload.optimizer}"
    if not plan.hook.zero_stage:
        yield f"{named} needs data_parallel=zero1, zero2 or zero3, not {plan.data_parallel}"
    if offload.parameters and not plan.shards_parameters:
        why = "keeps whole parameters on each GPU; take zero3"
        yield f"{named} contradicts data_parallel={plan.data_parallel}, which {why}"
    if not plan.fused_optimizer:
        yield f"fused_optimizer=false contradicts {named}: the CPUs update in one pass"
    if plan.ep_of_copies > 1:
        yield f"{named} with ep={plan.ep} is not simulated yet"
    if plan.pp > 1 and (model.tied or model.mtp):
        shared = "the tied embedding" if model.tied else f"mtp={model.mtp}"
        yield f"{named} with pp={plan.pp} and {shared} of {model.name} is not simulated yet"


def hosted(plan: Plan, cpu: Cpu | None) -> Iterator[str]:
    """What is offloaded needs a place that the cluster describes."""
    if plan.deepspeed is not None and plan.deepspeed.cpu_checkpointing and cpu is None:
        yield "deepspeed.cpu_checkpointing needs node.cpu, which the cluster does not describe: its memory and bandwidth"
    if plan.offload_activations and cpu is None:
        yield "offload_activations needs node.cpu, which the cluster does not describe: its memory and bandwidth"
    if plan.offload is None:
        return
    if cpu is None:
        yield "offload needs node.cpu, which the cluster does not describe: its memory and bandwidth"
    elif not cpu.disk:
        for name in ("optimizer", "parameters"):
            if getattr(plan.offload, name) == "nvme":
                yield f"offload.{name}=nvme needs node.cpu.disk, disk_read and disk_write of the cluster"


def _deepspeed(plan: Plan, options: DeepSpeed) -> Iterator[str]:
    """Rules of DeepSpeed."""
    if not plan.hook.zero_stage:
        yield f"deepspeed contradicts data_parallel={plan.data_parallel}; it describes zero1, zero2, zero3"
    if "bucket" in plan.model_fields_set:
        yield "bucket contradicts deepspeed, whose buckets are reduce_bucket_size and allgather_bucket_size"
    three = {name for name in options.model_fields_set if name.startswith(("stage3", "zero_", "tiles"))}
    if three and not plan.shards_parameters:
        yield f"deepspeed.{min(three)} contradicts data_parallel={plan.data_parallel}; it describes zero3"
    if not options.coalesced:
        yield from _one_by_one(plan, options)
    yield from _checkpoints(plan, options)
    if "allgather_bucket_size" in options.model_fields_set and plan.shards_parameters:
        yield "deepspeed.allgather_bucket_size contradicts data_parallel=zero3, which gathers part by part"
    said = f"deepspeed with data_parallel={plan.data_parallel} contradicts"
    if plan.pp > 1 and plan.hook.shards_all("gradient"):  # deepspeed/runtime/pipe/engine.py, PipelineEngine.__init__
        yield f"{said} pp={plan.pp}: DeepSpeed's pipelines are incompatible with ZeRO-2 and ZeRO-3"
    if not plan.shards_parameters:
        return
    if plan.schedule != "1f1b":
        yield f"{said} schedule={plan.schedule}: its trace is a forward and a backward pass in turns (1f1b)"
    if not plan.reshard:
        yield f"{said} reshard=false: stage3_max_reuse_distance says what is released"
    if plan.shard is not None:
        yield f"{said} shard={plan.shard}: DeepSpeed shards over all ranks"
    if plan.ep_of_copies > 1:
        yield f"{said} ep={plan.ep} is not simulated yet"


def _tiled(plan: Plan, options: DeepSpeed, model: Model) -> Iterator[str]:
    """What tiles of matrices are not simulated with."""
    unknown = {
        f"deepspeed.version={options.version}": not options.coalesced,
        "ZeRO++": options.hierarchical or options.zero_quantized_weights,
        "deepspeed.cpu_checkpointing": options.cpu_checkpointing,
        f"tp={plan.tp}": plan.tp > 1,
        "fp8": plan.fp8 is not None,
        "lora": plan.lora is not None,
        "freeze": plan.freeze is not None,
        "recompute=operators": plan.recompute == "operators",
        f"the experts of {model.name}": model.experts is not None,
        f"the traced module {model.name}": model.module is not None,
    }
    yield from (f"deepspeed.tiles={options.tiles} is not simulated with {what}" for what, there in unknown.items() if there)


def _checkpoints(plan: Plan, options: DeepSpeed) -> Iterator[str]:
    """Where DeepSpeed keeps inputs of layers that are recomputed."""
    for field in ("partition_activations", "cpu_checkpointing"):
        if getattr(options, field) and (plan.recompute != "full" or plan.recompute_method is not None):
            yield f"deepspeed.{field}=true needs recompute=full of every layer by itself"
    if options.partition_activations and (plan.tp == 1 or plan.sequence_parallel):
        has = "sequence_parallel=true, with which tp ranks have parts already" if plan.sequence_parallel else "tp=1"
        yield f"deepspeed.partition_activations=true needs tp > 1 ranks with the same input, and has {has}"
    if options.cpu_checkpointing and not plan.shards_parameters:
        yield f"deepspeed.cpu_checkpointing=true with data_parallel={plan.data_parallel} is not simulated yet: with zero3 it is"


def _one_by_one(plan: Plan, options: DeepSpeed) -> Iterator[str]:
    """What DeepSpeed of 2021 had, or is not simulated of it."""
    said = f"deepspeed.version={options.version} contradicts"
    if not plan.shards_parameters:
        yield f"{said} data_parallel={plan.data_parallel}; it describes zero3"
    if options.hierarchical or options.zero_quantized_weights:
        yield f"{said} ZeRO++, which is of 2023"
    if plan.offload is not None:
        yield f"{said} offload, which is not simulated with it"
    if plan.recompute == "operators" or plan.recompute_method == "uniform":
        yield f"{said} this recomputation, which is not simulated with it"


def neighbours(plan: Plan, dp: int, per_node: int) -> int:
    """dp ranks between which ZeRO++ keeps a second copy and exchanges gradients first, by default of a node of per_node GPUs; 1
    without ZeRO++.
    """
    if plan.deepspeed is None or not plan.deepspeed.hierarchical:
        return 1
    size = plan.deepspeed.zero_hpz_partition_size
    return size if size > 1 else _of_a_node(plan, dp, per_node)


def _of_a_node(plan: Plan, dp: int, per_node: int) -> int:
    return min(dp, max(1, per_node // plan.tp))


def quantises(plan: Plan, dp: int, per_node: int) -> Iterator[str]:
    """Rules of ZeRO++."""
    options = plan.deepspeed
    if options is None or not (options.hierarchical or options.zero_quantized_weights):
        return
    size, node = options.zero_hpz_partition_size, _of_a_node(plan, dp, per_node)
    named = f"deepspeed.zero_hpz_partition_size={size}" if size > 1 else "ZeRO++"
    if plan.offload is not None:
        yield f"{named} with offload is not simulated yet"
    if plan.cp > 1:
        yield f"{named} with cp={plan.cp} is not simulated yet"
    if not plan.order.startswith("tp-cp-ep-dp"):
        yield f"{named} with order={plan.order} is not simulated: neighbouring dp ranks must share nodes"
    if options.zero_quantized_gradients and (per_node % plan.tp or dp % node or size not in (1, node)):
        has = f"dp={dp}, tp={plan.tp} and {per_node} GPUs in a node"
        yield f"deepspeed.zero_quantized_gradients with {has} needs zero_hpz_partition_size=1 or {node}"
    if dp % neighbours(plan, dp, per_node):
        yield f"{named} does not divide dp={dp}"
