"""Options of Megatron-LM (`kernels: megatron`)."""

from __future__ import annotations

from operator import not_
from typing import ClassVar

from pydantic import Field

from strategies.frameworks.options import Options


class MegatronOptions(Options):
    """Arguments of Megatron-Core's distributed data parallelism."""

    droppable: ClassVar[frozenset[str]] = frozenset(
        {
            "check_gradients",
            "average_in_collective",
            "pad_buckets_for_high_nccl_busbw",
            "overlap_param_gather",
            "router_fusion",
            "cuda_graph",
        }
    )

    check_gradients: bool = Field(
        True,
        description="gradients are searched for NaN before they are reduced, but in fp16 (Megatron-LM's default; "
        "--no-check-for-nan-in-loss-and-grad)",
    )
    average_in_collective: bool = Field(
        False,
        description="collectives average gradients (--ddp-average-in-collective); otherwise a pass over them does, before they "
        "are summed",
    )
    pad_buckets_for_high_nccl_busbw: bool = Field(
        False,
        description="buckets of the distributed optimizer (zero1) are padded to a multiple of 65,536 elements "
        "(--ddp-pad-buckets-for-high-nccl-busbw); otherwise of 128",
    )
    overlap_param_gather: bool = Field(
        False,
        description="the distributed optimizer (zero1) gathers parameters beside the first forward pass of the next step, a "
        "bucket ahead (--overlap-param-gather); otherwise after the update",
    )
    router_fusion: bool = Field(
        False,
        exclude_if=not_,
        description="experts are chosen, and the loss that balances them is made, by Transformer Engine's fused kernels "
        "(--moe-router-fusion); otherwise by PyTorch's operators",
    )
    cuda_graph: bool = Field(
        False,
        exclude_if=not_,
        description="forward and backward passes of a step are one CUDA graph, which the host launches once "
        "(--cuda-graph-impl full_iteration); the update is launched by the host, when it has read the norm of gradients",
    )
