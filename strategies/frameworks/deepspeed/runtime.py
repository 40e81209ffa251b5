"""DeepSpeed's engine: buffers, partitions and checkpoints."""

from __future__ import annotations

from functools import lru_cache

from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.frameworks.runtime import Runtime

SUB_GROUP = 1e9  # parameters: DeepSpeed's sub_group_size


class DeepSpeedRuntime(Runtime):
    """As `plan.deepspeed` says."""

    zero3 = "deepspeed"
    passes_over_gradients = False
    looks_ahead = reduces_as_made = casts_gradients = fp32_moments = True
    send_in_parts = "deepspeed"

    def __init__(self, options: DeepSpeed) -> None:
        self.options = options
        self.reduce_bucket_size, self.allgather_bucket_size = options.reduce_bucket_size, options.allgather_bucket_size
        self.all_reduces_gradients = options.use_multi_rank_bucket_allreduce
        self.pads_each_parameter = options.coalesced
        self.partitions_checkpoints, self.checkpoints_on_cpu = options.partition_activations, options.cpu_checkpointing

    def update_workspace(self, count: float, largest: float, clips: bool, sharded: bool) -> float:
        """ZeRO takes the norm of each gradient as fp64, then joins those of its own parameters in 16 bits and turns them to fp32
        (deepspeed/runtime/zero/stage_1_and_2.py, step, get_grad_norm_direct), in ZeRO-3 of at most SUB_GROUP parameters at a
        time (stage3.py). That the gradients of others' parameters are dropped in between is left out: their blocks are no place
        for joined ones.
        """
        norm = 8.0 * min(largest, count) if clips else 0.0
        return max(norm, (2.0 + 4.0) * (min(count, SUB_GROUP) if sharded else count))


@lru_cache(maxsize=256)
def deepspeed_runtime(options: DeepSpeed) -> DeepSpeedRuntime:
    """One object for plans with equal options."""
    return DeepSpeedRuntime(options)
