"""How a rank computes its part of a step: the fields of a plan that say what is recomputed, which kernels run, in which types,
and what the host waits for; and what follows from them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, SerializeAsAny, ValidationInfo, field_validator, model_validator

from strategies.frameworks import KernelSet, kernel_set, kernel_sets
from strategies.frameworks.options import Options
from strategies.models.parts import unsaid
from strategies.optimizers import optimizer_called, optimizers
from strategies.plan.framework_options import options_in_group, read_options
from strategies.plan.options import Fp8
from strategies.plan.packing import Packing
from strategies.plan.synonyms import NO_PRECISION, PRECISIONS
from topologies.reading import Config, folded

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}  # bytes per element of an activation or weight


Moment = Literal["fp32", "fp16", "bf16"]
Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class Computing(Config):
    """Fields of a plan that concern one rank: recomputation, kernels, types, optimizer."""

    recompute: Literal["none", "selective", "operators", "full"] = Field(
        "none",
        description="activations recomputed in the backward pass: of recompute_modules (selective, Megatron-LM; by default "
        "the attention core), of all operators but attention and every second product (operators, torchtitan's "
        "selective_ac_option = 'op'), or of whole layers (full)",
    )
    recompute_modules: tuple[Module, ...] | None = Field(
        None,
        description="with recompute=selective, what of a layer runs again (Megatron-LM's --recompute-modules): core_attn (the"
        " default), layernorm, mla_up_proj, mlp, moe, moe_act (the experts' activation), shared_experts",
    )
    recompute_method: Literal["block", "uniform", "every"] | None = Field(
        None,
        description="with recompute=full, which layers of a stage: block, the first recompute_layers; uniform, all, so many "
        "at a time from one kept input (both Megatron-LM); every, each so many-th (torchtitan); by default each by itself",
    )
    recompute_layers: PositiveInt | None = Field(None, le=10_000, description="how many layers recompute_method means")
    early_stop: bool | None = Field(
        None,
        description="full recomputation ends when the last tensor that backward needs is there, before the last product of a "
        "layer (torch.utils.checkpoint's early_stop); by default as there with kernels=torch or compiled, and otherwise not",
    )
    offload_activations: PositiveInt | None = Field(
        None,
        exclude_if=unsaid,
        le=10_000,
        description="layers, the first of the model, whose activations are kept in the CPUs' memory until their backward pass, "
        "copied beside compute (Megatron-LM's --cpu-offloading-num-layers; Transformer Engine's get_cpu_offload_context)",
    )
    attention: Literal["flash", "flash2", "sdpa", "flash1", "triton", "materialised"] = Field(
        "flash",
        description="attention kernel: the fastest fused one of the GPU (flash; on Hopper and later FlashAttention-3's or "
        "cuDNN's), FlashAttention-2 of 2023 (flash2), PyTorch's build of it (sdpa: scaled_dot_product_attention), "
        "FlashAttention-1 of 2022 (flash1) or its Triton kernel (triton); or scores written to memory (materialised)",
    )
    packing: Packing | None = Field(
        None,
        exclude_if=unsaid,
        description="sequences are packed from documents of unequal lengths, within which attention stays: {lengths: [310, 1250, "
        "…]}, of the data set or a sample; by default a sequence attends as one",
    )
    loss: Literal["fused", "torch", "operators"] | None = Field(
        None,
        description="what computes the loss when it is not `kernels`: one kernel over logits in their own type (fused: the "
        "cross entropy of flash-attn and Apex); PyTorch's own operators (torch: torchtitan until 2024, which compiled layers "
        "alone); Megatron-LM's one by one (operators: without --cross-entropy-loss-fusion)",
    )
    kernels: str = Field(
        "megatron",
        description="what runs between matrix products and is kept for backward: Megatron-LM's fused kernels with Transformer"
        " Engine, those before it and cuBLAS of then (apex), torch.compile's (compiled), or PyTorch's own operators one by "
        "one (torch, which keeps more); the last two gather nothing twice under sequence parallelism",
    )
    framework: SerializeAsAny[Options] | None = Field(
        None,
        description="options of the framework that `kernels` names, which no other has: {complex_rotary: true}; of all, "
        "{blocking_launches: …, expandable_segments: …}. They may also be written beside the plan's fields",
    )
    deterministic: bool = Field(
        False,
        description="the same bits in every run (Megatron-LM's --deterministic-mode with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0):"
        " attention adds up query gradients in a fixed order, the loss is operator by operator, and PyTorch fills every "
        "tensor that it allocates without contents (torch.utils.deterministic.fill_uninitialized_memory); with "
        "kernels=megatron",
    )
    precision: Literal["bf16", "fp16", "fp32", "tf32"] = Field(
        "bf16", description="arithmetic and activations; 16-bit keeps fp32 masters, unless master_weights=false"
    )
    master_weights: bool = Field(
        True,
        exclude_if=bool,
        description="the optimizer updates fp32 copies of 16-bit weights; false: the weights themselves, of a model cast as "
        "a whole (model.to(torch.bfloat16), torchtitan's training.dtype, Apex's opt level O3), without a loss scale; PyTorch's "
        "optimizers then keep moments of 16 bits, too",
    )
    fp8: Fp8 | None = Field(
        None,
        description="linear layers multiply in fp8, the rest as `precision` says: {scaling: …, gather: …}; {} takes defaults",
    )
    gradients: Literal["same", "fp32"] = Field("same", description="type in which gradients are accumulated and reduced")
    accumulation_fusion: bool | None = Field(
        None,
        description="products accumulate weight gradients; otherwise a kernel of its own does; by default with kernels=megatron",
    )
    optimizer: str = Field(
        "adam",
        description="by name (`shardyard list optimizers`): adam keeps two states per parameter, lion, muon and momentum one, "
        "sgd and adafactor none, shampoo preconditioners besides; adamw is adam",
    )
    exp_avg_dtype: Moment = Field(
        "fp32", description="adam: type of the first moment (Megatron-LM's --use-precision-aware-optimizer --exp-avg-dtype)"
    )
    exp_avg_sq_dtype: Moment = Field("fp32", description="adam: type of the second moment (--exp-avg-sq-dtype)")
    fused_optimizer: bool = Field(
        True, description="the update is one kernel over all states; otherwise an operator at a time, as PyTorch does by default"
    )
    clip_gradients: bool = Field(True, description="the norm of all gradients is taken before the update, to clip them")
    dropout: bool | None = Field(None, description="dropout, whose masks are activations; by default as the model says")

    @field_validator("optimizer")
    @classmethod
    def _optimizer(cls, name: str) -> str:
        return "adam" if folded(name) == "adamw" else optimizers.named(name)

    @field_validator("precision", mode="before")
    @classmethod
    def _precision(cls, name: object) -> object:
        if not isinstance(name, str):
            return name
        if folded(name) in NO_PRECISION:
            raise ValueError(NO_PRECISION[folded(name)])
        return PRECISIONS.get(folded(name), name.lower())

    @field_validator("kernels")
    @classmethod
    def _kernels(cls, name: str) -> str:
        kernel_sets[name]
        return name

    @model_validator(mode="before")
    @classmethod
    def _beside(cls, data: Any) -> Any:
        """Accept options of a framework beside the plan's fields."""
        return options_in_group(data, cls.model_fields) if isinstance(data, Mapping) else data

    @field_validator("framework", mode="before")
    @classmethod
    def _framework(cls, given: Any, info: ValidationInfo) -> Any:
        return read_options(info.data.get("kernels", "megatron"), given) if isinstance(given, Mapping) else given

    @property
    def kernel_set(self) -> KernelSet:
        """What `kernels` names, with the options of `framework`."""
        return kernel_set(self.kernels, self.framework)

    @property
    def options(self) -> Options:
        """`framework`, or its defaults."""
        return self.kernel_set.options

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one weight or activation element."""
        return BYTES[self.precision]

    @property
    def bytes_per_gradient(self) -> int:
        """Bytes of one gradient element."""
        return 4 if self.gradients == "fp32" else self.bytes_per_element

    @property
    def gathers_fp8(self) -> bool:
        """Whether parameters of linear layers are gathered in fp8 or fp4."""
        return self.fp8 is not None and self.fp8.gather

    @property
    def least_gathered(self) -> float:
        """Bytes of a parameter when it is gathered, at least: of linear layers fewer than of others."""
        return self.fp8.width if self.fp8 is not None and self.fp8.gather else self.bytes_per_element

    @property
    def of_pytorch(self) -> bool:
        """Whether the kernels are PyTorch's own or what torch.compile makes of them."""
        return self.kernel_set.of_pytorch

    @property
    def fused_attention(self) -> bool:
        """Whether attention is one kernel that writes no scores."""
        return self.attention != "materialised"

    @property
    def fused_accumulation(self) -> bool:
        """Whether the product that makes a weight gradient accumulates it."""
        return self.kernel_set.accumulates_in_products if self.accumulation_fusion is None else self.accumulation_fusion

    @property
    def recomputed_modules(self) -> frozenset[str]:
        """Modules that recompute=selective runs again."""
        return frozenset(self.recompute_modules or ("core_attn",)) if self.recompute == "selective" else frozenset()

    @property
    def stops_early(self) -> bool:
        """Whether recomputation leaves out what backward does not need."""
        return self.of_pytorch if self.early_stop is None else self.early_stop

    @property
    def bytes_per_optimizer_state(self) -> float:
        """Bytes of optimizer state per parameter: fp32 states, and an fp32 master copy when weights have 16 bits.

        Adam in mixed precision: 4 + 4 + 4 = 12, the K of the ZeRO paper (Rajbhandari et al. 2020, section 3.1). What Adam keeps
        more where Muon leaves it parameters, and preconditioners, are counted by stages. Without masters PyTorch's optimizers
        keep states in the weights' type (torch.zeros_like), Apex's in fp32 (apex/optimizers/fused_adam.py).
        """
        moments = BYTES[self.exp_avg_dtype] + BYTES[self.exp_avg_sq_dtype]
        states = moments if self.optimizer == "adam" else optimizer_called(self.optimizer).states
        if self.updates_16_bits and self.of_pytorch:
            return states * self.bytes_per_element / 4
        return states + (4 if self.has_masters else 0)

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates fp32 copies of 16-bit weights."""
        return self.bytes_per_element == 2 and self.master_weights

    @property
    def updates_16_bits(self) -> bool:
        """Whether the optimizer updates weights of 16 bits."""
        return self.bytes_per_element == 2 and not self.master_weights
