"""Options of models and trainers in PyTorch (`kernels: torch` and `compiled`): torchtitan, llm-foundry, Hugging Face."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, NonNegativeInt

from strategies.frameworks.options import Options


class PyTorchOptions(Options):
    """How the model is written, and what PyTorch's DDP, FSDP and optimizers are given."""

    droppable: ClassVar[frozenset[str]] = frozenset(
        {"flat_parameters", "root_unit", "keep_last_unit", "set_to_none", "gradient_as_bucket_view", "broadcast_buffers"}
    )

    joined_products: bool = Field(
        False,
        description="queries, keys and values are made by one product, and so are gate and up of an MLP (GPT-2, llm-foundry); "
        "most PyTorch models have a matrix for each",
    )
    complex_rotary: bool = Field(
        False,
        description="rotary positions, where a model has them, are products of complex numbers in fp32, as in Meta's Llama and "
        "torchtitan, which torch.compile does not fuse",
    )
    repeated_keys: bool = Field(
        False,
        description="key and value heads are copied for each of their query heads before fused attention (torchtitan's and "
        "Hugging Face's repeat_kv)",
    )
    unpad: bool = Field(
        False,
        description="fused attention is given tokens without padding, gathered before it and put back after it (flash_attn's "
        "bert_padding, as llm-foundry and Hugging Face do); here there is no padding, but the copies are",
    )
    loss_metrics: NonNegativeInt = Field(
        0,
        le=100,
        description="metrics that compute the cross entropy of every microbatch once more, by PyTorch's own operators and "
        "without gradients (llm-foundry has two: LanguageCrossEntropy and LanguagePerplexity)",
    )
    flat_parameters: bool = Field(
        False,
        description="zero3: PyTorch's FSDP1 (FullyShardedDataParallel), which joins, casts and divides gradients before it "
        "reduces them, in place of FSDP2 (fully_shard), which copies gradients and what it gathered",
    )
    root_unit: bool = Field(
        False,
        description="zero3: embedding, last norm and head are one unit of FSDP2, the root's: gathered before the forward pass, "
        "kept for the backward pass and reduced at its end (torchtitan before pull request 1094 of July 2025)",
    )
    keep_last_unit: bool = Field(
        False,
        description="zero3: the unit that a forward pass ends with is not released after it, as the backward pass begins with it "
        "(FSDP2's reshard_after_forward=False): the head, or with root_unit the last layer, as torchtitan does",
    )
    set_to_none: bool = Field(
        True,
        description="gradients are freed after the update and made anew by the next backward pass (PyTorch's "
        "Optimizer.zero_grad); otherwise they stay, as they always do in the buffers of Megatron-LM, DeepSpeed, zero1 and zero2",
    )
    gradient_as_bucket_view: bool = Field(
        False,
        description="DDP: gradients live in its buckets; otherwise, PyTorch's default, beside them, and are copied there and, "
        "when they are reduced, back",
    )
    broadcast_buffers: bool = Field(
        True,
        description="DDP of a traced module: rank 0 sends its buffers (batch normalisation's running statistics) to all before "
        "the first forward pass of a step",
    )
