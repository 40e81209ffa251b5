"""What ranks that do not divide parameters evenly send and hold besides them.

FSDP2 cuts every parameter by rows into pieces of ceil(rows / ranks), as torch.chunk does; the last ones are filled up for
all-gathers and reduce-scatters (torch 2.13, FSDPParam._init_sharded_param, _get_dim0_padded_size). FSDP1 fills up the flat
parameter of a unit (FlatParamHandle, _get_shard). DeepSpeed's ZeRO-3 fills up each parameter
(deepspeed/runtime/zero/partition_parameters.py, _aligned_size). DeepSpeed's flat groups of ZeRO-1 and 2
are filled up once; these few elements are left out. What fills up Megatron-LM's buckets is in `strategies.data_parallel.buckets`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from strategies.layers.operators import Shape
from strategies.plan.plan import Plan


def padded(plan: Plan, shapes: Iterable[Shape], ranks: int) -> int:
    """Elements of parameters of these shapes, which are sharded together over `ranks` ranks, with what fills them up."""
    if plan.pytorch_fsdp and not plan.kernel_set.flat_parameters:
        return sum(multiple(shape[0], ranks) * math.prod(shape[1:]) for shape in shapes)
    if plan.runtime.pads_each_parameter and plan.shards_parameters:
        return sum(multiple(math.prod(shape), ranks) for shape in shapes)
    elements = sum(map(math.prod, shapes))
    return multiple(elements, ranks) if plan.pytorch_fsdp else elements


def multiple(count: int, of: int) -> int:
    """The next multiple."""
    return -(-count // of) * of
