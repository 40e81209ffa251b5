"""Megatron-LM before Transformer Engine (2020 to 2022), with Apex's layernorm and cuBLAS before CUDA 11.7.

The bias of queries, keys and values is added, and gradients of scaled scores are scaled, by kernels of their own
(megatron/model/transformer.py); so is every step of the loss (megatron/mpu/cross_entropy.py).
"""

from __future__ import annotations

import math

from strategies.frameworks import KernelSet, kernel_sets
from strategies.frameworks.passes import Ways, apex_norm, operator_loss


@kernel_sets("apex")
class Megatron2021(KernelSet):
    """`kernels: apex` in a plan."""

    persistent_norm = early_cublas = adds_qkv_bias = scales_score_gradients = small_kernels = True
    softmax_rows = 4

    def norm(self, rms: bool, width: float, persistent: bool = False) -> Ways:
        """Apex's; the weight's gradient is made by a kernel of its own."""
        return apex_norm(width, persistent)

    def loss(self, width: float) -> Ways:
        """Operator by operator."""
        return operator_loss(width)

    def bucket(self, overlap: bool, first: bool, dp: int) -> float | None:
        """All after the backward pass, or with overlap PyTorch's DDP (--DDP-impl)."""
        return None if overlap else math.inf

    def before_reduction(self, gradient: int, joined: bool, copies: int, checked: bool, averaged: bool) -> list[tuple[str, int]]:
        """The buffer of fp32 gradients was divided, and gradients of 16 bits were joined, divided and copied back, over however
        many ranks (megatron/model/distributed.py, allreduce_gradients).
        """
        scale = ("gradient scale", 2 * gradient)
        return [("gradient joining", 2 * gradient), scale, ("gradient parting", 2 * gradient)] if joined else [scale]
