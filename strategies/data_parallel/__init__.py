"""Data parallel hooks: one file each, with what the hook declares and how it is lowered.

`hooks` has the declarations by name: which model states (parameters, gradients, optimizer states) the dp ranks shard (ZeRO's
stages), and what else plans, rules and bounds ask. `strategies.data_parallel.hook` says what a hook does to a program.
"""

from __future__ import annotations

from typing import ClassVar

from topologies.registry import Registry


class Declaration:
    """What a hook says of itself, whatever the plan."""

    shards: ClassVar[frozenset[str]] = frozenset()  # of "parameter", "gradient", "optimizer"
    scatters: ClassVar[bool] = False  # whether ranks have reduced gradients of their shards only

    flat: ClassVar[bool] = False  # whether gradients live in a buffer of its own, which stays
    of_ddp: ClassVar[bool] = False  # whether PyTorch's DDP reduces the gradients
    whole_gradients: ClassVar[bool] = False  # whether a framework may go over whole gradients before they are reduced
    framework_buckets: ClassVar[bool] = False  # whether buckets are of the size that the framework chooses

    zero_stage: ClassVar[bool] = False  # whether it is a stage of ZeRO, which DeepSpeed has and whose states may be offloaded
    asynchronous: ClassVar[bool] = False  # whether stages may be updated at different times
    blocks: ClassVar[bool] = False  # whether it is written down for a host that waits for every kernel
    powersgd: ClassVar[bool] = False  # whether plan.powersgd describes it

    local: ClassVar[bool] = False  # whether plan.local_steps go by before ranks synchronise
    outer: ClassVar[int] = 0  # bytes per parameter of an optimizer around the optimizer

    @classmethod
    def shards_all(cls, *states: str) -> bool:
        """Whether the dp ranks shard each of these model states."""
        return cls.shards.issuperset(states)


hooks: Registry[type[Declaration]] = Registry("data_parallel", package="strategies.data_parallel")
