"""How a rank computes its part of a step: the fields of a plan that say what is recomputed, which kernels run, in which types,
and what the host waits for; and what follows from them alone.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from strategies.frameworks import KernelSet, kernel_set, kernel_sets
from strategies.plan.options import Fp8
from topologies.reading import Config

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}  # bytes per element of an activation or weight


Moment = Literal["fp32", "fp16", "bf16"]
Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class Computing(Config):
    """Fields that no group of ranks shares out; `strategies.plan.plan.Plan` has them beside its own."""

    recompute: Literal["none", "selective", "operators", "full"] = Field(
        "none",
        description="activations recomputed in the backward pass: those of recompute_modules (selective, Megatron-LM; by default "
        "the attention core), of all operators but attention and every second product (operators, as torchtitan's "
        "selective_ac_option = 'op'), or all",
    )
    recompute_modules: tuple[Module, ...] | None = Field(
        None,
        description="with recompute=selective, what of a layer runs again (Megatron-LM's --recompute-modules): core_attn (the "
        "default), layernorm, mla_up_proj, mlp, moe, moe_act (the experts' activation), shared_experts",
    )
    recompute_method: Literal["block", "uniform", "every"] | None = Field(
        None,
        description="with recompute=full, which layers of a stage: block, the first recompute_layers; uniform, all, so many at a "
        "time from one kept input (both Megatron-LM); every, each so many-th (torchtitan); by default each by itself",
    )
    recompute_layers: PositiveInt | None = Field(None, le=10_000, description="how many layers recompute_method means")
    early_stop: bool | None = Field(
        None,
        description="full recomputation ends when the last tensor that backward needs is there, before the last product of a "
        "layer (torch.utils.checkpoint's early_stop); by default as there with kernels=torch or compiled, and otherwise not",
    )
    attention: Literal["flash", "flash2", "sdpa", "flash1", "triton", "materialised"] = Field(
        "flash",
        description="fused attention, the fastest kernel of the GPU (on Hopper and later FlashAttention-3's or cuDNN's); that of "
        "FlashAttention-2 (2023), PyTorch's build of it (sdpa: scaled_dot_product_attention), "
        "FlashAttention-1 (2022) or its Triton kernel; or scores written to memory (materialised)",
    )
    unpad: bool = Field(
        False,
        description="fused attention is given tokens without padding, gathered before it and put back after it (flash_attn's "
        "bert_padding, as llm-foundry and Hugging Face do); here there is no padding, but the copies are",
    )
    loss: Literal["fused", "torch", "operators"] | None = Field(
        None,
        description="what computes the loss when it is not `kernels`: one kernel over logits in their own type (fused: the cross "
        "entropy of flash-attn and Apex); PyTorch's own operators (torch: torchtitan until 2024, which compiled layers alone); "
        "Megatron-LM's one by one (operators: without --cross-entropy-loss-fusion)",
    )
    loss_metrics: NonNegativeInt = Field(
        0,
        le=100,
        description="metrics that compute the cross entropy of every microbatch once more, by PyTorch's own operators and "
        "without gradients (llm-foundry has two: LanguageCrossEntropy and LanguagePerplexity)",
    )
    kernels: str = Field(
        "megatron",
        description="what runs between matrix products and is kept for backward: Megatron-LM's fused kernels with Transformer "
        "Engine, those before it and cuBLAS of then (apex), torch.compile's (compiled), or PyTorch's own operators one by one "
        "(torch, which keeps more); the last two gather nothing twice under sequence parallelism",
    )
    joined_products: bool | None = Field(
        None,
        description="queries, keys and values are made by one product, and so are gate and up of an MLP; by default not with "
        "kernels=torch or compiled, as most PyTorch models have a matrix for each (GPT-2 and llm-foundry join them)",
    )
    complex_rotary: bool = Field(
        False,
        description="kernels=torch or compiled: rotary positions, where a model has them, are products of complex numbers in "
        "fp32, as in Meta's Llama and torchtitan, which torch.compile does not fuse",
    )
    repeated_keys: bool = Field(
        False,
        description="kernels=torch or compiled: key and value heads are copied for each of their query heads before fused "
        "attention (torchtitan's and Hugging Face's repeat_kv)",
    )
    persistent_norm: bool = Field(
        False, description="kernels=apex: layer norms by Apex's FastLayerNorm (Megatron-LM since the end of 2021)"
    )
    deterministic: bool = Field(
        False,
        description="the same bits in every run (Megatron-LM's --deterministic-mode with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0): "
        "attention adds up query gradients in a fixed order, the loss is operator by operator, and PyTorch fills every tensor "
        "that it allocates without contents (torch.utils.deterministic.fill_uninitialized_memory); with kernels=megatron",
    )
    precision: Literal["bf16", "fp16", "fp32", "tf32"] = Field(
        "bf16", description="arithmetic and activations; 16-bit keeps fp32 masters"
    )
    fp8: Fp8 | None = Field(
        None,
        description="linear layers multiply in fp8, the rest as `precision` says: {scaling: …, gather: …}; {} takes defaults",
    )
    gradients: Literal["same", "fp32"] = Field("same", description="type in which gradients are accumulated and reduced")
    accumulation_fusion: bool | None = Field(
        None, description="products add weight gradients to those before; otherwise a kernel of its own; by default as megatron"
    )
    check_gradients: bool = Field(
        True,
        description="kernels=megatron: gradients are searched for NaN before they are reduced, but in fp16 (Megatron-LM's "
        "default; --no-check-for-nan-in-loss-and-grad)",
    )
    average_in_collective: bool = Field(
        False,
        description="kernels=megatron: collectives average gradients (--ddp-average-in-collective); otherwise a pass over them "
        "does, before they are summed",
    )
    optimizer: Literal["adam", "momentum", "sgd"] = Field(
        "adam", description="adam keeps two states per parameter, momentum one, sgd none"
    )
    exp_avg_dtype: Moment = Field(
        "fp32", description="adam: type of the first moment (Megatron-LM's --use-precision-aware-optimizer --exp-avg-dtype)"
    )
    exp_avg_sq_dtype: Moment = Field("fp32", description="adam: type of the second moment (--exp-avg-sq-dtype)")
    fused_optimizer: bool = Field(
        True, description="the update is one pass over all states; otherwise an operator at a time, as PyTorch does by default"
    )
    clip_gradients: bool = Field(True, description="the norm of all gradients is taken before the update, to clip them")
    dropout: bool | None = Field(None, description="dropout, whose masks are activations; by default as the model says")
    timers: bool = Field(
        False,
        description="the host waits for the GPU before every pass, to take the time (Megatron-LM until 2022: "
        "torch.cuda.synchronize in megatron/global_vars.py)",
    )
    expandable_segments: bool = Field(
        False,
        description="segments of PyTorch's caching allocator grow, so that it loses no memory between blocks of other sizes "
        "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True); otherwise the profile's share is lost",
    )
    blocking_launches: bool = Field(
        False,
        description="the host waits for each kernel to end before it launches the next (CUDA_LAUNCH_BLOCKING=1)",
    )

    @field_validator("kernels")
    @classmethod
    def _kernels(cls, name: str) -> str:
        kernel_sets[name]
        return name

    @property
    def kernel_set(self) -> KernelSet:
        """What `kernels` names."""
        return kernel_set(self.kernels)

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
        """Whether parameters of linear layers are gathered in fp8."""
        return self.fp8 is not None and self.fp8.gather

    @property
    def least_gathered(self) -> int:
        """Bytes of a parameter when it is gathered, at least: of linear layers fewer than of others."""
        return 1 if self.gathers_fp8 else self.bytes_per_element

    @property
    def of_pytorch(self) -> bool:
        """Whether the kernels are PyTorch's own or what torch.compile makes of them."""
        return self.kernel_set.of_pytorch

    @property
    def fused_attention(self) -> bool:
        """Whether attention is one kernel that writes no scores."""
        return self.attention != "materialised"

    @property
    def separate_products(self) -> bool:
        """Whether queries, keys, values, gate and up are products of their own."""
        return self.of_pytorch if self.joined_products is None else not self.joined_products

    @property
    def fused_accumulation(self) -> bool:
        """Whether the product that makes a weight gradient adds it to those before."""
        return self.kernel_set.accumulates_in_products if self.accumulation_fusion is None else self.accumulation_fusion

    @property
    def recomputed_modules(self) -> frozenset[str]:
        """Of recompute=selective."""
        return frozenset(self.recompute_modules or ("core_attn",)) if self.recompute == "selective" else frozenset()

    @property
    def stops_early(self) -> bool:
        """Whether recomputation leaves out what backward does not need."""
        return self.of_pytorch if self.early_stop is None else self.early_stop

    @property
    def bytes_per_optimizer_state(self) -> int:
        """Bytes of optimizer state per parameter: fp32 states, and an fp32 master copy when weights have 16 bits.

        Adam in mixed precision: 4 + 4 + 4 = 12, the K of the ZeRO paper (Rajbhandari et al. 2020, section 3.1).
        """
        moments = BYTES[self.exp_avg_dtype] + BYTES[self.exp_avg_sq_dtype]
        states = {"adam": moments, "momentum": 4, "sgd": 0}[self.optimizer]
        return states + (4 if self.bytes_per_element == 2 else 0)
