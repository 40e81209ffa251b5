"""Data parallel hooks: one file each, with what the hook declares and how it is lowered.

`hooks` has the declarations by name: which model states (parameters, gradients, optimizer states) the dp ranks shard (ZeRO's
stages), and what else plans, rules and bounds ask. `strategies.data_parallel.hook` says what a hook does to a program.
"""

from __future__ import annotations

from typing import ClassVar

from topologies.registry import Registry


class Declaration:
    """Properties of a hook that do not depend on the plan."""

    shards: ClassVar[frozenset[str]] = frozenset()  # states sharded over dp ranks: "parameter", "gradient", "optimizer"
    scatters: ClassVar[bool] = False  # whether gradients are reduce-scattered: a rank has the sum of its shard only

    flat: ClassVar[bool] = False  # whether gradients live in a persistent buffer, not in parameters' .grad
    of_ddp: ClassVar[bool] = False  # whether PyTorch's DDP reduces the gradients
    whole_gradients: ClassVar[bool] = False  # whether a framework may check or scale unsharded gradients before the reduction
    framework_buckets: ClassVar[bool] = False  # whether the framework chooses the size of buckets, otherwise PyTorch's DDP does
    even_buckets: ClassVar[bool] = False  # whether ranks share out each bucket, which the framework may align for that

    zero_stage: ClassVar[bool] = False  # whether it is a stage of ZeRO, which DeepSpeed has and whose states may be offloaded
    asynchronous: ClassVar[bool] = False  # whether stages may be updated at different times
    blocks: ClassVar[bool] = False  # whether it is simulated with CUDA_LAUNCH_BLOCKING=1
    powersgd: ClassVar[bool] = False  # whether plan.powersgd describes it

    local: ClassVar[bool] = False  # whether dp ranks train alone for plan.local_steps before they synchronise
    outer: ClassVar[int] = 0  # bytes per parameter of an outer optimizer (DiLoCo)

    @classmethod
    def shards_all(cls, *states: str) -> bool:
        """Whether the dp ranks shard each of these model states."""
        return cls.shards.issuperset(states)


hooks: Registry[type[Declaration]] = Registry("data_parallel", package="strategies.data_parallel")
