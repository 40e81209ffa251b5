"""What adapters, frozen parts and parts outside of the optimizer (`strategies.plan.fine_tuning`) exclude, and what they are not
written down for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strategies.models.model import Model
from strategies.optimizers import optimizer_called
from strategies.plan.fine_tuning import FC1, FUSED, QKV, Freeze, Lora, trained_parts

if TYPE_CHECKING:
    from strategies.plan.plan import Plan


def fine_tunes(plan: Plan, model: Model, layers: tuple[int, ...]) -> Iterator[str]:
    """layers: of each virtual stage."""
    if plan.trains_all:
        return
    said = "lora" if plan.lora is not None else "freeze"
    if model.module is not None:
        how = "peft.get_peft_model(…)" if plan.lora is not None else "requires_grad_(False)"
        yield f"{said}: a traced module says itself what is trained: {how} in its file"
    if plan.freeze is not None:
        yield from _frozen(plan.freeze, model)
    if plan.lora is not None:
        yield from _targets(plan, plan.lora, model)
        yield from _weights(plan, plan.lora)
        yield from _tensor_parallel(plan, plan.lora, model)
        if plan.lora.dora:
            yield from _dora(plan, plan.lora)
    lowest = trained_parts(plan, model.layers).lowest
    if lowest is None:
        yield f"{said}: nothing of the model is left to train"
    elif plan.pp > 1 and lowest >= layers[0]:
        yield f"{said} with pp={plan.pp}: the first pipeline stage (embedding and {layers[0]} layers) has nothing to train"
    yield from _together(plan, model, said)


def leaves_out(plan: Plan, model: Model) -> Iterator[str]:
    """Parts that the optimizer is not given."""
    if not plan.outside_optimizer:
        return
    said = f"outside_optimizer={'+'.join(plan.outside_optimizer)}"
    if model.tied and model.head:
        yield f"{said} contradicts the tied embedding of {model.name}: one matrix is both"
    unknown = {
        f"data_parallel={plan.data_parallel}": plan.data_parallel != "ddp",
        "offload": plan.offload is not None,
        f"optimizer={plan.optimizer}": optimizer_called(plan.optimizer).of_matrices is not None,
        "lora or freeze": not plan.trains_all,
        f"the traced module {model.name}": model.module is not None,
        f"the encoder and decoder of {model.name}": model.family == "encoder_decoder",
        f"mtp={model.mtp}": bool(model.mtp),
    }
    yield from (f"{said} is not simulated with {what}" for what, there in unknown.items() if there)


def _frozen(freeze: Freeze, model: Model) -> Iterator[str]:
    if freeze.layers > model.layers:
        yield f"freeze.layers={freeze.layers} exceeds the {model.layers} layers of {model.name}"
    if model.tied and model.head and freeze.head and not freeze.embedding:
        yield f"freeze.head=true contradicts freeze.embedding=false: {model.name} has one matrix for both"


def _targets(plan: Plan, lora: Lora, model: Model) -> Iterator[str]:
    """Whether the model has what is to be adapted."""
    chosen = set(lora.targets)
    mixed = any(map(model.is_mixture, range(model.layers)))
    if mixed and chosen & {*FUSED["linear_fc1"], "linear_fc1", "linear_fc2"}:
        for what, there in ((f"tp={plan.tp}", plan.tp > 1), ("lora.dora=true", lora.dora)):
            if there:
                yield f"lora.targets: adapters of experts, which {model.name} has, are not simulated with {what}: take attention"
    block = {*FC1, "linear_fc1", "linear_fc2"}
    if any(
        not (own.has_attention and chosen - block) and not (own.feed_forward and chosen & block) for own in model.layer_models
    ):
        yield f"lora.targets: layers of {model.name} have none of these matrices: take all-linear"
    if model.latent is not None and chosen & {"linear_qkv", *QKV}:
        has = "linear_proj, linear_fc1 and linear_fc2 are there"
        yield f"lora.targets: the latent attention of {model.name} has no such matrices; {has}"
    if not model.gated and chosen & set(FC1):
        yield f"lora.targets: the MLP of {model.name} has no gate: its matrices are linear_fc1 and linear_fc2"


def _weights(plan: Plan, lora: Lora) -> Iterator[str]:
    """In what frozen matrices are kept."""
    for field, of in (("double_quantization", "nf4"), ("fp8_transposes", "fp8")):
        if field in lora.model_fields_set and lora.weights != of:
            yield f"lora.{field}={str(getattr(lora, field)).lower()} needs lora.weights={of}, and lora.weights={lora.weights}"
    if lora.weights == "fp8" and (plan.fp8 is None or plan.kernel_set.torchao):
        yield "lora.weights=fp8 needs fp8 by Transformer Engine: plan.fp8 with kernels=megatron or torch"
    if lora.fp8_transposes != "kept" and plan.fp8 is not None and plan.fp8.scaling == "nvfp4":
        yield f"lora.fp8_transposes={lora.fp8_transposes} contradicts fp8.scaling=nvfp4, whose scales belong to rows or columns"
    if lora.weights == "nf4":
        if plan.fp8 is not None:
            yield "lora.weights=nf4 contradicts fp8: matrices are dequantised to 16 bits and multiplied in them"
        if plan.bytes_per_element != 2:
            yield f"lora.weights=nf4 contradicts precision={plan.precision}: matrices are dequantised to 16 bits"
        if plan.tp > 1:
            yield f"lora.weights=nf4 with tp={plan.tp}: bitsandbytes' matrices are not cut; take zero3, dp or pp"


def _dora(plan: Plan, lora: Lora) -> Iterator[str]:
    """DoRA runs as PEFT's layers do, which are eager and whole on a rank."""
    unknown = {
        f"tp={plan.tp}": plan.tp > 1,
        f"cp={plan.cp}": plan.cp > 1,
        f"lora.weights={lora.weights}": lora.weights != "same",
        f"kernels={plan.kernels}": plan.kernel_set.compiled,
        "fp8": plan.fp8 is not None,
    }
    yield from (f"lora.dora=true is not simulated with {what}" for what, there in unknown.items() if there)


def _tensor_parallel(plan: Plan, lora: Lora, model: Model) -> Iterator[str]:
    """Adapters are cut as Megatron Bridge cuts them."""
    scatters = plan.tp > 1 and plan.sequence_parallel
    if lora.all_to_all and not scatters:
        yield f"lora.all_to_all=true needs tp above 1 with sequence_parallel, and tp={plan.tp}"
    if plan.tp == 1:
        return
    if plan.of_pytorch:
        yield f"lora with tp={plan.tp} and kernels={plan.kernels}: adapters are cut over tp ranks with kernels=megatron only"
    if lora.rank % plan.tp:
        yield f"lora.rank={lora.rank} must be a multiple of tp={plan.tp}, which cuts A by its rows"
    if model.kv_heads < plan.tp:
        yield f"lora with tp={plan.tp}, which exceeds the {model.kv_heads} key and value heads of {model.name}, is not simulated"


def _together(plan: Plan, model: Model, said: str) -> Iterator[str]:
    """Other fields."""
    ds = plan.deepspeed
    compressed = ds is not None and (
        ds.zero_quantized_weights or ds.zero_quantized_gradients or ds.zero_hpz_partition_size > 1 or not ds.coalesced
    )
    tied = model.tied and model.head and plan.kernel_set.eager and plan.pytorch_fsdp
    still = plan.lora is not None or (plan.freeze is not None and plan.freeze.embedding)
    unknown = {
        f"the encoder and decoder of {model.name}": model.family == "encoder_decoder",
        f"data_parallel={plan.data_parallel}": plan.data_parallel == "dataparallel",
        "reshard=false": not plan.reshard,
        "gradient_sync=last": plan.keeps_parameters,
        "offload.parameters": plan.offload is not None and plan.offload.parameters is not None,
        "recompute=operators": plan.recompute == "operators",
        "recompute_method=uniform": plan.recompute_method == "uniform" and (plan.recompute_layers or 1) > 1,
        "deterministic=true": plan.deterministic,
        "fp8.gather=true": plan.gathers_fp8,
        "ZeRO++ or DeepSpeed of 2021": compressed,
        f"data_parallel={plan.data_parallel} and ep={plan.ep}": plan.shards_parameters and plan.ep > 1,
        f"data_parallel={plan.data_parallel} and the tied embedding of {model.name}": tied and still,
    }
    yield from (f"{said} is not simulated with {what}" for what, there in unknown.items() if there)
