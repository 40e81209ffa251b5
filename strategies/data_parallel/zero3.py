"""ZeRO-3, FSDP's full sharding: parameters are sharded too (`strategies.data_parallel.sharded_parameters`).

PyTorch's and Megatron-LM's is in `strategies.data_parallel.fsdp`; with `deepspeed` DeepSpeed's is, in
`strategies.frameworks.deepspeed.zero3`.
"""

from __future__ import annotations

from strategies.data_parallel import hooks
from strategies.data_parallel.fsdp import FSDP
from strategies.data_parallel.hook import Moves
from strategies.data_parallel.sharded_parameters import ShardedParameters
from strategies.frameworks.deepspeed.zero3 import DeepSpeedZero3
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved


@hooks("zero3")
class Zero3(ShardedParameters):
    """Sharded parameters, gradients and optimizer states."""

    @classmethod
    def for_plan(cls, plan: Plan) -> ShardedParameters:
        """DeepSpeed's or FSDP."""
        return _kind(plan)()

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """As the plan's."""
        return _kind(plan).moves(plan)

    @classmethod
    def in_turn(cls, plan: Plan) -> bool:
        """As the plan's."""
        return _kind(plan).in_turn(plan)


def _kind(plan: Plan) -> type[FSDP] | type[DeepSpeedZero3]:
    return FSDP if plan.runtime.fsdp else DeepSpeedZero3
