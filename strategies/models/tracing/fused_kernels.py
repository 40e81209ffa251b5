"""What GPUs have one kernel for, in place of what PyTorch dispatches on the meta device. Imports torch: import it inside a
function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from strategies.models.tracing.tensor_parallel import is_distributed
from topologies.reading import UserError


class FusedAttention(torch.autograd.Function):
    """Attention in one kernel each way, which keeps its operands, its result and a number per query and head."""

    @staticmethod
    def forward(ctx: Any, recorder: Any, causal: bool, q: Any, k: Any, v: Any) -> Any:
        batch, heads, rows = q.shape[0], q.shape[1], q.shape[2]
        with recorder.paused():
            result = q.new_empty(batch, rows, heads, v.shape[-1]).transpose(1, 2)  # as FlashAttention has it
            sums = q.new_empty(batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, result, sums)
        ctx.recorder, ctx.causal = recorder, causal
        recorder.add("attention_forward", (q, k, v), (result,), (causal,))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        q, k, v, result, _ = ctx.saved_tensors
        with ctx.recorder.paused():
            gradients = tuple(torch.empty_like(each) for each in (q, k, v))
        ctx.recorder.add("attention_backward", (q, k, v, result, gradient), gradients, (ctx.causal,))
        return None, None, *gradients


class FusedKernels(TorchFunctionMode):
    """What GPUs have one kernel for and the meta device none: dropout, and scaled_dot_product_attention unless it has a mask,
    which FlashAttention has not, or the plan wants its scores.
    """

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            said = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            if said.get("training", True) and said.get("p", 0.5) and not said.get("inplace"):
                return torch.native_dropout(said["input"], said.get("p", 0.5), True)[0]
        if func is functional.scaled_dot_product_attention and self.recorder.fused_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            said = dict(zip(names, args, strict=False)) | kwargs
            q, k, v = said["query"], said["key"], said["value"]
            if is_distributed([type(q)]):
                raise UserError(
                    "scaled_dot_product_attention is given DTensors: reshape heads from local tensors, with -1 of them"
                )
            if said.get("attn_mask") is None and q.dim() == 4:
                return FusedAttention.apply(self.recorder, bool(said.get("is_causal", False)), q, k, v)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)
