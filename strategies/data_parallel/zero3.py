"""ZeRO-3, FSDP's full sharding: parameters are sharded too (`strategies.data_parallel.sharded_parameters`).

PyTorch's and Megatron-LM's is in `strategies.frameworks.pytorch.zero3`; a framework with an engine of its own has its own
(`Runtime.zero3`), such as DeepSpeed in `strategies.frameworks.deepspeed.zero3`.
"""

from __future__ import annotations

from strategies.data_parallel import hooks
from strategies.data_parallel.hook import Moves
from strategies.data_parallel.sharded_parameters import ShardedParameters, zero3_implementations
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved


@hooks("zero3")
class Zero3(ShardedParameters):
    """Sharded parameters, gradients and optimizer states."""

    @classmethod
    def for_plan(cls, plan: Plan) -> ShardedParameters:
        """The implementation of the plan's framework."""
        return zero3_implementations[plan.runtime.zero3]()

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """As the implementation."""
        return zero3_implementations[plan.runtime.zero3].moves(plan)

    @classmethod
    def in_turn(cls, plan: Plan) -> bool:
        """As the implementation."""
        return zero3_implementations[plan.runtime.zero3].in_turn(plan)
