"""Megatron-LM before Transformer Engine (2020 to 2022), with Apex's layernorm and cuBLAS before CUDA 11.7.

The bias of queries, keys and values is added, and gradients of scaled scores are scaled, by kernels of their own
(megatron/model/transformer.py); so is every step of the loss (megatron/mpu/cross_entropy.py). The host forks a generator for
attention's dropout, and restores generators when it recomputes (megatron/mpu/random.py).
"""

from __future__ import annotations

import math

from sim.program import Launching
from strategies.frameworks import KernelSet, kernel_sets
from strategies.frameworks.megatron_2021.options import Megatron2021Options
from strategies.frameworks.options import Options
from strategies.frameworks.passes import FLOAT, Ways, apex_norm, operator_loss

# Its modules do more around a kernel than others: forward passes of BERT, 24 layers without tp, take 52 us for each kernel on a
# DGX A100 (github.com/xduan7/scalable-transformer, docs/megatron_bert_345m.md) and 71 on another A100's host
# (github.com/NVIDIA/nccl issue 743), 60 in the mean, where `Profile.eager` is 38. A kernel of a backward pass takes the 0.6th
# part of that, from autograd's C++ engine (`python -m calibration.measure.launches`).
LAUNCHING = Launching(5 / 3, 1.0)


@kernel_sets("apex")
class Megatron2021(KernelSet):
    """`kernels: apex` in a plan."""

    options: Megatron2021Options = Megatron2021Options.model_validate({})
    early_cublas = adds_qkv_bias = scales_score_gradients = small_kernels = tracks_generators = pipeline_modules = True
    softmax_rows = 4
    launching = LAUNCHING

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.waits_before_passes, self.times_parts = self.options.timers, self.options.timed_parts
        self.fp16_loss = self.options.fp16_lm_cross_entropy

    def norm(self, rms: bool, width: float) -> Ways:
        """Apex's; the weight's gradient is made by a kernel of its own."""
        return apex_norm(width, self.options.persistent_norm)

    def loss(self, width: float) -> Ways:
        """Operator by operator."""
        return operator_loss(width, width if self.fp16_loss else FLOAT)

    def bucket(self, overlap: bool, first: bool, dp: int) -> float | None:
        """All after the backward pass, or with overlap PyTorch's DDP (--DDP-impl)."""
        return None if overlap else math.inf

    def before_reduction(self, gradient: int, joined: bool, copies: int, scaled: bool) -> list[tuple[str, int]]:
        """The buffer of fp32 gradients was divided, and gradients of 16 bits were joined, divided and copied back, over however
        many ranks (megatron/model/distributed.py, allreduce_gradients).
        """
        if self.times_parts:  # of one replica and one microbatch
            return []
        scale = ("gradient scale", 2 * gradient)
        return [("gradient joining", 2 * gradient), scale, ("gradient parting", 2 * gradient)] if joined else [scale]
