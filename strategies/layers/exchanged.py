"""What DeepSpeed's pipeline engine does with tensors on their way between stages when each is on every tp rank.

Each tp rank sends an equal part of it, and the ranks of the stage that gets it gather the whole: of activations before a forward
pass; before a backward pass of gradients, and of the stage's own result, of which only a part was kept meanwhile
(deepspeed/runtime/pipe/engine.py of 0.5.9 and 0.6.0: is_pipe_partitioned, is_grad_partitioned, _exec_forward_pass,
_exec_backward_pass; deepspeed/runtime/utils.py, PartitionedTensor.full). The sizes of parts, sent as a message of their own, are
left out.
"""

from __future__ import annotations

from strategies.layers.overlap import Items
from strategies.layers.share import Share


def received(share: Share) -> Items:
    """Before the forward pass of every stage but the first."""
    return _whole(share, "stage input", "forward")


def returned(share: Share) -> Items:
    """Before the backward pass of every stage but the last."""
    return (*_whole(share, "stage output", "backward"), *_whole(share, "stage output gradient", "backward"))


def _whole(share: Share, label: str, phase: str) -> Items:
    """A buffer set to zero, an all-gather into a list of tensors, which PyTorch copies out of one, and a copy."""
    if not share.resolved.plan.sends_parts:
        return ()
    size = share.element * share.stream
    copy = share.memory(f"{label} copy", phase, 2 * size)
    return (share.memory(f"{label} zeros", phase, size), *share.collective("all_gather", label, size), copy, copy)
