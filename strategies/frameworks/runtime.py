"""What keeps gradients and model states on a rank between passes, and reduces and gathers them.

`Runtime` is what PyTorch does (DDP, FSDP); a framework with an engine of its own has a subclass, such as
`strategies.frameworks.deepspeed.runtime.DeepSpeedRuntime`. It is asked what it does; nobody asks which it is.
"""

from __future__ import annotations

from typing import Literal

SendInParts = Literal["none", "megatron", "deepspeed", "deepspeed_forward"]  # see `plan.scatter_gather`


class Runtime:
    """PyTorch's. Sizes are elements; None: as the plan or the kernels' framework says."""

    reduce_bucket_size: int | None = None  # a buffer of its own, into which gradients are copied as they are made
    allgather_bucket_size: int | None = None  # parameters gathered at once after an update
    all_reduces_gradients: bool = False  # those whose optimizer states are sharded, too: each rank keeps its part of the sum
    zero3: str = "fsdp"  # how sharded parameters are gathered (`strategies.data_parallel.sharded_parameters`)
    looks_ahead: bool = False  # sharded parameters are gathered by a trace of the passes before
    pads_each_parameter: bool = False  # sharded parameters are filled up one by one
    reduces_as_made: bool = False  # sharded gradients cannot wait for the last microbatch
    casts_gradients: bool = False  # 16-bit gradients of a step are added to fp32 ones by kernels of the optimizer
    passes_over_gradients: bool = True  # whole gradients are checked or scaled by kernels before they are reduced
    zeroes_gradients: bool = False  # buffers of gradients are set to zero in every step, whatever their type
    reads_norm: bool = False  # the host waits for the norm of all gradients before it launches the rest of the update
    copies_each_tensor: bool = False  # the update copies gradients and parameters tensor by tensor, from Python
    fp8_buffers: bool = False  # what is gathered in fp8 has buckets of its own, and is cast tensor by tensor
    fp32_moments: bool = False  # Adam's moments have no other type
    send_in_parts: SendInParts = "none"  # the default of `plan.scatter_gather` where tp ranks send the same
    partitions_checkpoints: bool = False  # recompute=full: a tp rank keeps its part of a layer's input
    checkpoints_on_cpu: bool = False  # recompute=full: inputs of layers are kept in the CPUs' memory

    @property
    def fsdp(self) -> bool:
        """Whether sharded parameters are gathered part by part, each one part ahead of its use, by PyTorch's or Megatron-LM's
        FSDP.
        """
        return self.zero3 == "fsdp"

    @property
    def own_buffers(self) -> bool:
        """Whether gradients are copied into a buffer of its own as they are made."""
        return self.reduce_bucket_size is not None

    def update_workspace(self, count: float, largest: float, clips: bool, sharded: bool) -> float:
        """Bytes that an update of `count` parameters with 16-bit gradients takes: their copy in fp32
        (megatron/optimizer/optimizer.py). largest: elements of the largest tensor; clips: the norm of all gradients is taken;
        sharded: parameters are (ZeRO-3).
        """
        return 4.0 * count
