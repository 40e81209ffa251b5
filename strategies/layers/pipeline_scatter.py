"""Tensors on their way between stages that each tp rank of a stage has: a part each is sent, and the whole is gathered.

Narayanan et al. 2021 (arXiv:2104.04473, section 4.1) call it the scatter/gather optimisation. Megatron-LM of 2021 and 2022
gathers what comes in (megatron/p2p_communication.py, gather_split_1d_tensor). DeepSpeed's pipeline engine keeps but a part of the
stage's own result meanwhile, too, and gathers that before the backward pass (deepspeed/runtime/pipe/engine.py of 0.5.9 and 0.6.0:
is_pipe_partitioned, is_grad_partitioned, _exec_forward_pass, _exec_backward_pass; deepspeed/runtime/utils.py,
PartitionedTensor.full). The sizes of parts, sent as a message of their own, are left out.
"""

from __future__ import annotations

from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items


def received(rank: RankShapes) -> Items:
    """Before the forward pass of a stage whose input comes from another rank."""
    return _whole(rank, "stage input", "forward") if rank.resolved.splits("F") else ()


def returned(rank: RankShapes) -> Items:
    """Before the backward pass of a stage whose result went to another rank: that result, and the gradient from there."""
    plan = rank.resolved
    own = _whole(rank, "stage output", "backward") if plan.partitioned else ()
    return own + (_whole(rank, "stage output gradient", "backward") if plan.splits("B") else ())


def _whole(rank: RankShapes, label: str, phase: str) -> Items:
    """An all-gather into a list of tensors, which PyTorch copies out of one; DeepSpeed sets a buffer to zero and copies again."""
    size = rank.element * rank.stream
    copy = rank.memory(f"{label} copy", phase, 2 * size)
    gather = rank.collective("all_gather", label, size)
    if not rank.resolved.partitioned:
        return (*gather, copy)
    return (rank.memory(f"{label} zeros", phase, size), *gather, copy, copy)
