"""What of a model tensor, context and expert parallelism can divide; a rule that is broken is a UserError with the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategies.model import Experts, Model
from topologies.hardware import Cpu
from topologies.reading import UserError

if TYPE_CHECKING:
    from strategies.plan import Plan


def divides(model: Model, plan: Plan, sequence: int, where: str) -> None:
    """What tp and cp ranks share must divide by their number."""
    for count, what in ((model.heads, "attention heads"), (model.kv_heads, "key-value heads"), (model.ffn, "MLP columns")):
        # tp above the number of key-value heads replicates them, as Megatron-LM and vLLM do
        if count % plan.tp and not (what == "key-value heads" and plan.tp % count == 0):
            raise UserError(f"{where}: tp={plan.tp} does not divide {count} {what}")
    if plan.sequence_parallel and plan.tp == 1:
        raise UserError(f"{where}: sequence_parallel=true needs tp > 1, and tp=1")
    if plan.sequence_parallel and sequence % plan.tp:
        raise UserError(f"{where}: tp={plan.tp} does not divide {sequence} tokens, which sequence_parallel needs")
    for wrong, why in (
        (plan.tp == 1 or plan.pp == 1, f"needs tp > 1 and pp > 1, and tp={plan.tp}, pp={plan.pp}"),
        (plan.sequence_parallel, "contradicts sequence_parallel=true, with which tp ranks have different tokens to send"),
    ):
        if plan.scatter_gather not in (None, "none") and wrong:
            raise UserError(f"{where}: scatter_gather={plan.scatter_gather} {why}")
    if plan.kernels == "torch" and plan.overlap_tp not in (None, "none"):
        rule = "contradicts kernels=torch: PyTorch's own operators run one by one, and wait for each collective"
        raise UserError(f"{where}: overlap_tp={plan.overlap_tp} {rule}")
    if plan.kernels == "compiled" and plan.overlap_tp == "weight_gradient":
        rule = "contradicts kernels=compiled: PyTorch's tensor parallelism waits for each collective, or takes pieces"
        raise UserError(f"{where}: overlap_tp=weight_gradient {rule}")
    if plan.overlap_tp == "pieces" and not plan.sequence_parallel:
        raise UserError(f"{where}: overlap_tp=pieces needs sequence_parallel=true: an all-reduce has no pieces to wait for")
    if plan.persistent_norm and plan.kernels != "apex":
        raise UserError(f"{where}: persistent_norm=true is for kernels=apex, not {plan.kernels}")
    if plan.unpad and not (plan.fused_attention and plan.cp == 1 and model.latent is None):
        raise UserError(f"{where}: unpad=true is for fused attention without cp and without latent attention")
    for field in ("complex_rotary", "repeated_keys"):
        if getattr(plan, field) and not plan.of_pytorch:
            raise UserError(
                f"{where}: {field}=true contradicts kernels={plan.kernels}: it is of models in PyTorch's own operators"
            )
    if plan.repeated_keys and not plan.fused_attention:
        raise UserError(f"{where}: repeated_keys=true needs fused attention; attention=materialised repeats them anyway")
    for said, there in (("loss=fused", plan.loss == "fused"), (f"loss_metrics={plan.loss_metrics}", plan.loss_metrics)):
        if there and plan.tp > 1:
            raise UserError(f"{where}: {said} with tp={plan.tp} is not simulated: logits are cut over the tp ranks")
    if plan.cp > 1:
        _context(model, plan, sequence, where)
    if model.positions == "learned" and sequence > model.context:
        raise UserError(f"{where}: sequence={sequence} exceeds the {model.context} learned positions of {model.name}")


def belongs(plan: Plan, model: Model, where: str) -> None:
    """Groups of fields go with the strategies that they describe."""
    if plan.powersgd is not None and plan.data_parallel != "ddp_powersgd":
        raise UserError(f"{where}: powersgd contradicts data_parallel={plan.data_parallel}; it describes ddp_powersgd")
    _deepspeed(plan, where)
    _fp8(plan, where)
    if plan.deterministic:
        _deterministic(plan, model, where)
    if plan.gradient_sync == "last":
        _late(plan, where)
    offload = plan.offload
    if offload is None:
        return
    named = f"offload.parameters={offload.parameters}" if offload.parameters else f"offload.optimizer={offload.optimizer}"
    if plan.data_parallel not in ("zero1", "zero2", "zero3"):
        raise UserError(f"{where}: {named} needs data_parallel=zero1, zero2 or zero3, not {plan.data_parallel}")
    if offload.parameters and plan.data_parallel != "zero3":
        why = "keeps whole parameters on each GPU; take zero3"
        raise UserError(f"{where}: {named} contradicts data_parallel={plan.data_parallel}, which {why}")
    if not plan.fused_optimizer:
        raise UserError(f"{where}: fused_optimizer=false contradicts {named}: the CPUs update in one pass")
    if plan.ep > 1:
        raise UserError(f"{where}: {named} with ep={plan.ep} is not simulated yet")
    if plan.pp > 1 and model.tied:
        raise UserError(f"{where}: {named} with pp={plan.pp} and the tied embedding of {model.name} is not simulated yet")


ENGINE = ("delayed", "tensorwise", "blockwise", "mxfp8")
SCALINGS = {"megatron": ENGINE, "torch": ENGINE, "compiled": ("tensorwise", "rowwise", "mxfp8")}


def _deterministic(plan: Plan, model: Model, where: str) -> None:
    """What the deterministic mode excludes (megatron/training/arguments.py), and what it is not written down for."""
    if plan.overlap_tp == "pieces" or plan.loss not in (None, "operators"):
        said = "overlap_tp=pieces" if plan.overlap_tp == "pieces" else f"loss={plan.loss}"
        raise UserError(f"{where}: deterministic=true contradicts {said}, which Megatron-LM's --deterministic-mode refuses")
    unknown = {
        f"kernels={plan.kernels}": plan.kernels != "megatron",
        f"attention={plan.attention}": plan.attention not in ("flash", "flash2"),
        "fp8": plan.fp8 is not None, f"cp={plan.cp}": plan.cp > 1, "experts": model.experts is not None,
        "latent attention": model.latent is not None, "qk_norm": model.qk_norm, "sync_norm=true": plan.sync_norm,
    }  # fmt: skip
    for what, there in unknown.items():
        if there:
            raise UserError(f"{where}: deterministic=true is not simulated with {what}")


def _fp8(plan: Plan, where: str) -> None:
    """What Transformer Engine (kernels=megatron, torch) and torchao (compiled) have of fp8."""
    fp8 = plan.fp8
    if fp8 is None:
        return
    if plan.kernels not in SCALINGS:
        rule = "needs kernels=megatron or torch (Transformer Engine) or compiled (torchao with torch.compile)"
        raise UserError(f"{where}: fp8 {rule}, not {plan.kernels}")
    if fp8.scaling not in SCALINGS[plan.kernels]:
        has = ", ".join(SCALINGS[plan.kernels])
        raise UserError(f"{where}: fp8.scaling={fp8.scaling} contradicts kernels={plan.kernels}, which has {has}")
    if plan.bytes_per_element != 2:
        raise UserError(f"{where}: fp8 contradicts precision={plan.precision}: what is not in fp8 has 16 bits")
    if not fp8.gather:
        return
    known = ("zero3",) if plan.kernels == "compiled" else ("zero1", "zero2", "zero3")
    for wrong, why in (
        (
            plan.data_parallel not in known,
            f"data_parallel={plan.data_parallel}: with kernels={plan.kernels} {', '.join(known)} have it",
        ),
        (
            plan.kernels == "compiled" and fp8.scaling != "tensorwise",
            f"fp8.scaling={fp8.scaling}: torchao gathers tensorwise only",
        ),
        (plan.deepspeed is not None, "deepspeed, which quantises by itself (zero_quantized_weights)"),
        (plan.offload is not None, "offload, which is not simulated with it"),
    ):
        if wrong:
            raise UserError(f"{where}: fp8.gather=true contradicts {why}")


def _late(plan: Plan, where: str) -> None:
    """Who can keep whole gradients until the last microbatch."""
    for wrong, why in (
        (plan.data_parallel != "zero3", f"data_parallel={plan.data_parallel}; it is a choice of FSDP2 (zero3)"),
        (plan.deepspeed is not None, "deepspeed: its ZeRO-3 reduces gradients as they are made"),
        (plan.offload is not None, "offload: gradients leave the GPU as they are made"),
    ):
        if wrong:
            raise UserError(f"{where}: gradient_sync=last contradicts {why}")


def _deepspeed(plan: Plan, where: str) -> None:
    """Rules of DeepSpeed and ZeRO++."""
    options = plan.deepspeed
    if options is None:
        return
    if plan.data_parallel not in ("zero1", "zero2", "zero3"):
        raise UserError(f"{where}: deepspeed contradicts data_parallel={plan.data_parallel}; it describes zero1, zero2, zero3")
    if "bucket" in plan.model_fields_set:
        raise UserError(f"{where}: bucket contradicts deepspeed, whose buckets are reduce_bucket_size and allgather_bucket_size")
    three = {name for name in options.model_fields_set if name.startswith(("stage3", "zero_"))}
    if three and plan.data_parallel != "zero3":
        raise UserError(f"{where}: deepspeed.{min(three)} contradicts data_parallel={plan.data_parallel}; it describes zero3")
    if not options.coalesced:
        _one_by_one(plan, where)
    if "allgather_bucket_size" in options.model_fields_set and plan.data_parallel == "zero3":
        raise UserError(f"{where}: deepspeed.allgather_bucket_size contradicts data_parallel=zero3, which gathers part by part")
    if plan.data_parallel != "zero3":
        return
    for wrong, why in (
        (plan.pp > 1, f"pp={plan.pp}: DeepSpeed's ZeRO-3 has no pipelines"),
        (plan.schedule != "1f1b", f"schedule={plan.schedule}: its trace is a forward and a backward pass in turns (1f1b)"),
        (not plan.reshard, "reshard=false: stage3_max_reuse_distance says what is released"),
        (plan.shard is not None, f"shard={plan.shard}: DeepSpeed shards over all ranks"),
        (plan.ep > 1, f"ep={plan.ep} is not simulated yet"),
    ):
        if wrong:
            raise UserError(f"{where}: deepspeed with data_parallel=zero3 contradicts {why}")


def _one_by_one(plan: Plan, where: str) -> None:
    """What DeepSpeed of 2021 had, or is not simulated of it."""
    options = plan.deepspeed
    assert options is not None
    for wrong, why in (
        (plan.data_parallel != "zero3", f"data_parallel={plan.data_parallel}; it describes zero3"),
        (options.hierarchical or options.zero_quantized_weights, "ZeRO++, which is of 2023"),
        (plan.offload is not None, "offload, which is not simulated with it"),
        (
            plan.recompute == "operators" or plan.recompute_method == "uniform",
            "this recomputation, which is not simulated with it",
        ),
    ):
        if wrong:
            raise UserError(f"{where}: deepspeed.version={options.version} contradicts {why}")


def neighbours(plan: Plan, dp: int, per_node: int, where: str) -> int:
    """dp ranks between which ZeRO++ keeps a second copy and exchanges gradients first; 1 without ZeRO++."""
    options = plan.deepspeed
    if options is None or not (options.hierarchical or options.zero_quantized_weights):
        return 1
    size = options.zero_hpz_partition_size
    named = f"deepspeed.zero_hpz_partition_size={size}" if size > 1 else "ZeRO++"
    for wrong, why in (
        (plan.offload is not None, "offload is not simulated yet"),
        (plan.cp > 1, f"cp={plan.cp} is not simulated yet"),
        (
            not plan.order.startswith("tp-cp-ep-dp"),
            f"order={plan.order} is not simulated: neighbouring dp ranks must share nodes",
        ),
    ):
        if wrong:
            raise UserError(f"{where}: {named} with {why}")
    node = min(dp, max(1, per_node // plan.tp))
    if not options.hierarchical:
        return 1
    if options.zero_quantized_gradients and (per_node % plan.tp or dp % node or size not in (1, node)):
        has = f"dp={dp}, tp={plan.tp} and {per_node} GPUs in a node"
        raise UserError(f"{where}: deepspeed.zero_quantized_gradients with {has} needs zero_hpz_partition_size=1 or {node}")
    inner = node if size == 1 else size
    if dp % inner:
        raise UserError(f"{where}: {named} does not divide dp={dp}")
    return inner


def hosted(plan: Plan, cpu: Cpu | None, where: str) -> None:
    """What is offloaded needs a place that the cluster describes."""
    if plan.offload is None:
        return
    if cpu is None:
        raise UserError(f"{where}: offload needs node.cpu, which the cluster does not describe: its memory and bandwidth")
    for name in ("optimizer", "parameters"):
        if getattr(plan.offload, name) == "nvme" and not cpu.disk:
            raise UserError(f"{where}: offload.{name}=nvme needs node.cpu.disk, disk_read and disk_write of the cluster")


def _context(model: Model, plan: Plan, sequence: int, where: str) -> None:
    """Rules of context parallelism."""
    if not plan.fused_attention:
        raise UserError(f"{where}: cp={plan.cp} needs attention=flash, and attention={plan.attention}")
    if model.pooler:
        raise UserError(f"{where}: cp={plan.cp} is not simulated for {model.name}: its pooler works on the first token alone")
    if plan.cp_method == "ring":  # zig-zag: a rank has a block from the start and one from the end
        pieces, what = 2 * plan.cp, f"2·cp = 2·{plan.cp}"
    else:
        pieces, what = plan.cp, f"cp = {plan.cp}"
        for count, of in ((model.heads, "attention heads"), (model.kv_heads, "key-value heads")):
            if count % (plan.tp * plan.cp):
                product = f"tp·cp = {plan.tp}·{plan.cp} = {plan.tp * plan.cp}"
                raise UserError(f"{where}: {product} does not divide {count} {of}, which cp_method=ulysses spreads")
    if sequence % pieces:
        raise UserError(f"{where}: {what} does not divide sequence={sequence}, which cp_method={plan.cp_method} needs")
    if plan.sequence_parallel and sequence // plan.cp % plan.tp:
        has = f"sequence/cp = {sequence}/{plan.cp} tokens"
        raise UserError(f"{where}: tp={plan.tp} does not divide {has}, which sequence_parallel needs")


def recomputed(plan: Plan, layers: tuple[int, ...], where: str) -> None:
    """Rules of recomputing some layers."""
    method, number = plan.recompute_method, plan.recompute_layers
    if plan.early_stop is not None and plan.recompute != "full":
        raise UserError(
            f"{where}: early_stop={str(plan.early_stop).lower()} needs recompute=full, and recompute={plan.recompute}"
        )
    if (method is None) != (number is None):
        has, lacks = ("recompute_method", "recompute_layers") if method else ("recompute_layers", "recompute_method")
        raise UserError(f"{where}: {has}={method or number} needs {lacks}")
    if number is None:
        return
    if plan.recompute != "full":
        raise UserError(f"{where}: recompute_method={method} needs recompute=full, and recompute={plan.recompute}")
    if number > max(layers):
        raise UserError(f"{where}: recompute_layers={number} exceeds the {max(layers)} layers of the largest stage")
    if method == "uniform" and number > 1 and plan.data_parallel == "zero3":
        said = f"recompute_method=uniform with recompute_layers={number} contradicts data_parallel=zero3"
        raise UserError(f"{where}: {said}, which gathers one layer at a time")


def synchronised(plan: Plan, dp: int, where: str) -> None:
    """Rules of norms over all ranks."""
    if plan.sync_norm and dp * plan.cp == 1:
        raise UserError(f"{where}: sync_norm=true needs dp or cp above 1")
    if plan.sync_norm and plan.local_steps:
        raise UserError(f"{where}: sync_norm=true contradicts local_steps={plan.local_steps}: dp ranks would meet in every layer")
    if plan.sync_norm and plan.sequence_parallel:
        raise UserError(
            f"{where}: sync_norm=true with sequence_parallel=true is not simulated: tp ranks would share statistics too"
        )


def experts(model: Model, plan: Plan, dp: int, where: str) -> None:
    """Rules of mixtures of experts and expert parallelism."""
    moe, ep = model.experts, plan.ep
    asked = {"capacity_factor": plan.capacity_factor, "expert_tp": plan.expert_tp, "ep": ep if ep > 1 else None}
    for name, value in asked.items():
        if moe is None and value is not None:
            raise UserError(f"{where}: {name}={value:g} needs a mixture of experts, and {model.name} has none")
    whole = plan.expert_tp == 1 and plan.tp > 1
    if moe is None or (ep == 1 and not whole):
        if plan.imbalance != 1:
            raise UserError(
                f"{where}: imbalance={plan.imbalance:g} needs ep > 1: with ep=1 a rank has every expert of its tokens"
            )
    elif moe.experts % ep or dp % ep:
        count, what = (moe.experts, f"{moe.experts} experts") if moe.experts % ep else (dp, f"dp={dp}")
        raise UserError(f"{where}: ep={ep} does not divide {what}: {count} % {ep} = {count % ep}")
    elif plan.tp > 1 and not plan.sequence_parallel:
        asking = f"ep={ep}" if ep > 1 else "expert_tp=1"
        raise UserError(f"{where}: {asking} with tp={plan.tp} needs sequence_parallel=true, as in Megatron-LM")
    elif plan.shard and ep > 1:
        raise UserError(f"{where}: shard={plan.shard} with ep={ep} is not simulated yet")
    if moe:
        _expert_columns(moe, plan, where)
    if plan.pad_to_capacity and plan.capacity_factor is None:
        raise UserError(f"{where}: pad_to_capacity=true needs capacity_factor")
    _nodes(moe, plan, where)


def _expert_columns(moe: Experts, plan: Plan, where: str) -> None:
    """How experts are cut, or spread, over the tp ranks."""
    if plan.expert_tp not in (None, 1, plan.tp):
        raise UserError(f"{where}: expert_tp={plan.expert_tp} is not simulated: only tp={plan.tp} and 1 are")
    whole = plan.expert_tp == 1
    if whole and moe.experts % (plan.ep * plan.tp):
        raise UserError(f"{where}: ep·tp = {plan.ep}·{plan.tp} does not divide {moe.experts} experts, which expert_tp=1 spreads")
    for count in (*(() if whole else (moe.ffn,)), moe.shared * moe.shared_ffn):
        if count % plan.tp:
            raise UserError(f"{where}: tp={plan.tp} does not divide {count} columns of an expert")


def _nodes(moe: Experts | None, plan: Plan, where: str) -> None:
    """Exchanges in two steps, across nodes and inside them."""
    if (plan.ep_nodes == 1) != (plan.routed_nodes is None):
        wanted = "routed_nodes: to how many of these nodes each token goes" if plan.routed_nodes is None else "ep_nodes above 1"
        given = f"ep_nodes={plan.ep_nodes}" if plan.routed_nodes is None else f"routed_nodes={plan.routed_nodes}"
        raise UserError(f"{where}: {given} needs {wanted}")
    if plan.ep_nodes == 1:
        return
    if plan.ep % plan.ep_nodes:
        raise UserError(f"{where}: ep_nodes={plan.ep_nodes} does not divide ep={plan.ep}")
    if plan.expert_tp == 1 and plan.tp > 1:
        raise UserError(f"{where}: ep_nodes={plan.ep_nodes} with expert_tp=1 is not simulated yet")
    most = min(moe.chosen if moe else 1, plan.ep_nodes)
    if plan.routed_nodes is not None and plan.routed_nodes > most:
        raise UserError(f"{where}: routed_nodes={plan.routed_nodes} exceeds {most}, the least of a token's experts and ep_nodes")
