"""What kernels, types and recomputation exclude (`strategies.plan.computing`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strategies.data_parallel import hooks
from strategies.frameworks import sets_with
from strategies.models.model import Model
from strategies.optimizers import optimizer_called
from strategies.plan.framework_options import foreign_options

if TYPE_CHECKING:
    from strategies.plan.options import Fp8
    from strategies.plan.plan import Plan


def computes(plan: Plan, model: Model) -> Iterator[str]:
    """What the plan's kernels have, and are written down for."""
    yield from _options(plan)
    if plan.kernel_set.unpads and not (plan.fused_attention and plan.cp == 1 and model.latent is None):
        yield "unpad=true is for fused attention without cp and without latent attention"
    if plan.kernel_set.repeats_keys and not plan.fused_attention:
        yield "repeated_keys=true needs fused attention; attention=materialised repeats them anyway"
    metrics = plan.kernel_set.loss_metrics
    for said, there in (("loss=fused", plan.loss == "fused"), (f"loss_metrics={metrics}", metrics)):
        if there and plan.tp > 1:
            yield f"{said} with tp={plan.tp} is not simulated: logits are cut over the tp ranks"
    if plan.kernel_set.fp16_loss and (plan.precision != "fp16" or plan.loss not in (None, "operators")):
        which = f"precision={plan.precision}" if plan.precision != "fp16" else f"loss={plan.loss}"
        yield f"fp16_lm_cross_entropy=true contradicts {which}: it is of Megatron-LM's own loss in fp16"
    if plan.packing is not None:
        yield from _packed(plan, model)
    yield from _updates(plan)
    if plan.fp8 is not None:
        yield from _fp8(plan, plan.fp8, model)
    if plan.deterministic:
        yield from _deterministic(plan, model)
    if not plan.master_weights:
        yield from _without_masters(plan)
    for field in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(plan, field) != "fp32":
            yield from _moments(plan, f"{field}={getattr(plan, field)}")
    if plan.recompute_modules is not None:
        yield from _modules(plan, model, plan.recompute_modules)
    if plan.offload_activations:
        yield from _activations(plan, model, plan.offload_activations)


def _activations(plan: Plan, model: Model, count: int) -> Iterator[str]:
    """What excludes Transformer Engine's offloading of activations: the first two are Megatron-LM's own rules
    (megatron/core/transformer/transformer_config.py, cpu_offloading).
    """
    said = f"offload_activations={count}"
    if plan.pp > 1:
        yield f"{said} contradicts pp={plan.pp}: layers are counted over one pass, and Megatron-LM has it without pipelines only"
    if plan.recompute != "none" and not plan.of_pytorch:
        yield f"{said} contradicts recompute={plan.recompute}: Megatron-LM has one or the other"
    if count >= (model.layers if model.module is None else count + 1):
        yield f"{said} must be less than layers={model.layers}: activations of the last one are needed at once"
    if plan.schedule != "1f1b":
        yield f"{said} contradicts schedule={plan.schedule}: passes are whole, one after the other"
    if plan.deepspeed is not None:
        yield f"{said} contradicts deepspeed, which has cpu_checkpointing"
    if plan.data_parallel == "dataparallel":
        yield f"{said} with data_parallel={plan.data_parallel} is not simulated"


def _packed(plan: Plan, model: Model) -> Iterator[str]:
    """What attention of variable lengths is not written down for."""
    unknown = {
        f"attention={plan.attention}": not plan.fused_attention,
        f"cp={plan.cp}": plan.cp > 1,
        f"the windows or chunks of {model.name}": any(own.window or own.chunk for own, _ in model.distinct_layers),
        f"the encoder and decoder of {model.name}": model.family == "encoder_decoder",
        f"the images of {model.name}": model.patches is not None,
        f"the relative positions of {model.name}": model.positions == "relative",
        "unpad=true": plan.kernel_set.unpads,
        "dp ranks that take different numbers of microbatches": plan.microbatches_per_replica is not None,
    }
    yield from (f"packing is not simulated with {what}" for what, there in unknown.items() if there)


def _updates(plan: Plan) -> Iterator[str]:
    """What optimizers that look at whole tensors or matrices exclude."""
    kind, said = optimizer_called(plan.optimizer), f"optimizer={plan.optimizer}"
    if not kind.fused and plan.fused_optimizer and "fused_optimizer" in plan.model_fields_set:
        yield f"fused_optimizer=true contradicts {said}, which no framework has in one kernel"
    if not (kind.whole_tensors or kind.of_matrices):
        return
    what = kind.of_matrices.does if kind.of_matrices else "takes sums over whole tensors"
    if plan.tp > 1:
        yield f"{said} with tp={plan.tp} is not simulated: it {what}, of which tp ranks have parts"
    if plan.shards_parameters or (kind.whole_tensors and "optimizer" in plan.hook.shards):
        hooks_with = "ddp, zero1 and zero2 are" if kind.of_matrices else "hooks that do not shard states are"
        yield f"{said} with data_parallel={plan.data_parallel} is not simulated: it {what}; {hooks_with}"
    if plan.offload is not None:
        yield f"{said} with offload is not simulated: it {what}"


def _without_masters(plan: Plan) -> Iterator[str]:
    """Who updates weights of 16 bits."""
    said = "master_weights=false contradicts"
    if plan.bytes_per_element != 2:
        yield f"{said} precision={plan.precision}, whose weights have no copies"
    if plan.deepspeed is not None:
        yield f"{said} deepspeed, whose optimizers of 16-bit weights keep fp32 masters"
    elif "optimizer" in plan.hook.shards and not plan.of_pytorch:
        yield f"{said} data_parallel={plan.data_parallel}: with kernels={plan.kernels} its shards are fp32 masters"
    if plan.gradients == "fp32":
        yield f"{said} gradients=fp32: the optimizer reads gradients of the weights' type"
    for field in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if plan.of_pytorch and field in plan.model_fields_set:
            yield f"{field}={getattr(plan, field)} contradicts master_weights=false: PyTorch's moments have the weights' type"
    unknown = {
        f"optimizer={plan.optimizer}": optimizer_called(plan.optimizer).of_matrices is not None,
        "offload": plan.offload is not None,
        f"data_parallel={plan.data_parallel}": plan.hook.local,
    }
    yield from (f"master_weights=false is not simulated with {what}" for what, there in unknown.items() if there)


def _options(plan: Plan) -> Iterator[str]:
    """Whose options are stated."""
    for name in foreign_options(plan.kernels, plan.framework):
        value = str(getattr(plan.framework, name)).lower()
        yield f"{name}={value} contradicts kernels={plan.kernels}: it is an option of kernels={' and '.join(sets_with([name]))}"


def _moments(plan: Plan, said: str) -> Iterator[str]:
    """Who keeps Adam's moments in 16 bits."""
    if plan.optimizer != "adam":
        yield f"{said} contradicts optimizer={plan.optimizer}: it is of Adam's moments"
    if not plan.fused_optimizer:
        yield f"{said} contradicts fused_optimizer=false: PyTorch's operators keep moments in the type of what they update"
    if plan.runtime.fp32_moments:
        yield f"{said} contradicts deepspeed, whose moments are fp32"


def _modules(plan: Plan, model: Model, modules: tuple[str, ...]) -> Iterator[str]:
    """What can be recomputed of the model's layers."""
    said = f"recompute_modules=[{', '.join(modules)}]"
    if plan.recompute != "selective":
        yield f"{said} needs recompute=selective, and recompute={plan.recompute}"
    if not modules:
        yield f"{said}: name at least one, or take recompute=none"
    moe = {"moe", "moe_act", "shared_experts"}
    if model.experts is None and moe.intersection(modules):
        yield f"{said} needs a mixture of experts, and {model.name} has none"
    if model.experts is not None and not model.experts.shared and "shared_experts" in modules:
        yield f"{said} needs shared experts, and {model.name} has none"
    if model.latent is None and "mla_up_proj" in modules:
        yield f"{said} needs latent attention, and {model.name} has none"
    if "mlp" in modules and all(map(model.is_mixture, range(model.layers))):
        yield f"{said}: {model.name} has no dense MLP"


def _deterministic(plan: Plan, model: Model) -> Iterator[str]:
    """What the deterministic mode excludes (megatron/training/arguments.py), and what it is not written down for."""
    if plan.overlap_tp == "pieces" or plan.loss not in (None, "operators"):
        said = "overlap_tp=pieces" if plan.overlap_tp == "pieces" else f"loss={plan.loss}"
        yield f"deterministic=true contradicts {said}, which Megatron-LM's --deterministic-mode refuses"
    unknown = {
        f"kernels={plan.kernels}": not plan.kernel_set.deterministic,
        f"attention={plan.attention}": plan.attention not in ("flash", "flash2"),
        "fp8": plan.fp8 is not None,
        f"cp={plan.cp}": plan.cp > 1,
        "experts": model.experts is not None,
        "latent attention": model.latent is not None,
        "qk_norm": model.qk_norm,
        "sync_norm=true": plan.sync_norm,
    }
    yield from (f"deterministic=true is not simulated with {what}" for what, there in unknown.items() if there)


def _fp8(plan: Plan, fp8: Fp8, model: Model) -> Iterator[str]:
    """What Transformer Engine (kernels=megatron, torch) and torchao (compiled) have of fp8."""
    scalings = plan.kernel_set.fp8_scalings
    if not scalings:
        rule = "needs kernels=megatron or torch (Transformer Engine) or compiled (torchao with torch.compile)"
        yield f"fp8 {rule}, not {plan.kernels}"
    if fp8.scaling not in scalings:
        has = ", ".join(scalings)
        yield f"fp8.scaling={fp8.scaling} contradicts kernels={plan.kernels}, which has {has}"
    if plan.bytes_per_element != 2:
        yield f"fp8 contradicts precision={plan.precision}: what is not in fp8 has 16 bits"
    for field in ("dispatch", "activation_func_input_store", "attention", "attention_output"):
        if field in fp8.model_fields_set and not plan.kernel_set.fp8_experts:
            yield f"fp8.{field} contradicts kernels={plan.kernels}: it is written down for kernels=megatron"
    if "amax_reduction" in fp8.model_fields_set and fp8.scaling != "delayed":
        yield f"fp8.amax_reduction={fp8.amax_reduction} contradicts fp8.scaling={fp8.scaling}: delayed has maxima of past steps"
    yield from _fp8_attention(plan, fp8, model) if fp8.attention else ()
    if fp8.scaling == "nvfp4":
        yield from ("fp8.dispatch=true contradicts fp8.scaling=nvfp4: it is of 8 bits",) * fp8.dispatch
    low = fp8.layers_at_start_in_bf16, fp8.layers_at_end_in_bf16
    if any(low) and plan.kernel_set.torchao:
        yield f"fp8.layers_at_start_in_bf16={low[0]}, at_end={low[1]} contradict kernels={plan.kernels}: Megatron-LM has them"
    if sum(low) >= model.layers:
        said = f"fp8.layers_at_start_in_bf16={low[0]} and fp8.layers_at_end_in_bf16={low[1]}"
        yield f"{said} leave none of {model.layers} layers in fp8: remove plan.fp8"
    if any(low) and plan.lora is not None and plan.lora.weights == "fp8":
        yield f"fp8.layers_at_start_in_bf16={low[0]}, at_end={low[1]} contradict lora.weights=fp8, which all layers have"
    if fp8.dispatch and model.experts is None:
        yield f"fp8.dispatch=true needs a mixture of experts, and {model.name} has none"
    if not fp8.gather:
        return
    said = "fp8.gather=true contradicts"
    known = [name for name in hooks if hooks[name].zero_stage and plan.kernel_set.fp8_gathers in hooks[name].shards]
    if plan.data_parallel not in known:
        yield f"{said} data_parallel={plan.data_parallel}: with kernels={plan.kernels} {', '.join(known)} have it"
    if plan.kernel_set.torchao and fp8.scaling != "tensorwise":
        yield f"{said} fp8.scaling={fp8.scaling}: torchao gathers tensorwise only"
    if plan.deepspeed is not None:
        yield f"{said} deepspeed, which quantises by itself (zero_quantized_weights)"
    if plan.offload is not None:
        yield f"{said} offload, which is not simulated with it"


def _fp8_attention(plan: Plan, fp8: Fp8, model: Model) -> Iterator[str]:
    """What Transformer Engine's attention in fp8 has none of, or is not written down for."""
    if fp8.scaling not in ("delayed", "tensorwise", "nvfp4"):
        yield f"fp8.attention=true contradicts fp8.scaling={fp8.scaling}: it is written down for delayed, tensorwise and nvfp4"
    if fp8.attention_output != "bf16":
        yield f"fp8.attention=true contradicts fp8.attention_output={fp8.attention_output}: the core keeps its result in fp8"
    unknown = {
        f"attention={plan.attention}": plan.attention != "flash",
        "recompute_modules=[core_attn]": "core_attn" in plan.recomputed_modules,
        f"cp={plan.cp}": plan.cp > 1,
        "packing": plan.packing is not None,
        f"positions={model.positions}": model.positions in ("alibi", "relative"),
        "attention within windows or chunks": any(own.window or own.chunk for own, _ in model.distinct_layers),
        "attention sinks": model.sinks,
        "latent attention": model.latent is not None,
        "cross attention": model.family == "encoder_decoder",
    }
    yield from (f"fp8.attention=true is not simulated with {what}" for what, there in unknown.items() if there)


def recomputed(plan: Plan, layers: tuple[int, ...]) -> Iterator[str]:
    """Rules of recomputing some layers."""
    method, number = plan.recompute_method, plan.recompute_layers
    if plan.early_stop is not None and plan.recompute != "full":
        yield f"early_stop={str(plan.early_stop).lower()} needs recompute=full, and recompute={plan.recompute}"
    if (method is None) != (number is None):
        has, lacks = ("recompute_method", "recompute_layers") if method else ("recompute_layers", "recompute_method")
        yield f"{has}={method or number} needs {lacks}"
    if number is None:
        return
    if plan.recompute != "full":
        yield f"recompute_method={method} needs recompute=full, and recompute={plan.recompute}"
    if number > max(layers):
        yield f"recompute_layers={number} exceeds the {max(layers)} layers of the largest stage"
    if method == "uniform" and number > 1 and plan.shards_parameters:
        said = f"recompute_method=uniform with recompute_layers={number} contradicts data_parallel=zero3"
        yield f"{said}, which gathers one layer at a time"
