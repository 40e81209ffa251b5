"""Attention of tokens that cp ranks share: ring attention with everybody's keys gathered, and Ulysses.

Ring (Liu et al. 2023, arXiv:2310.01889) as Llama 3 does it (arXiv:2407.21783, section 3.3.2): keys and values are
all-gathered, again in the backward pass, and their gradients are reduce-scattered. Causal tokens are dealt in zig-zag: of 2·cp
blocks rank i has i and 2·cp − 1 − i. A rank runs a causal kernel on its own tokens; of an earlier rank's keys all of its queries
see the first half, and its second half of queries sees all keys of a later rank: every rank does as much. Kernels' results are
merged by their log-sum-exp, in fp32. Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all-to-alls of queries, keys, values and
the result.

PyTorch's own context parallelism has no kernel for CPUs, and sends key gradients round the ring once more than is needed (torch
2.13, tensor/experimental/_context_parallel/_attention.py): this one is of plain collectives.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from calibration.execute.model.all_to_all import exchanged

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """Rank `rank` of the `ranks` in `group`. method: "ring" or "ulysses"; flash: whether the device has it for 16 bits."""

    group: Any
    rank: int
    ranks: int
    method: str
    causal: bool
    flash: bool = True

    def positions(self, sequence: int) -> Tensor:
        """Which tokens of a sequence this rank has, in its order."""
        every = torch.arange(sequence)
        if self.method == "ring" and self.causal:
            blocks = every.chunk(2 * self.ranks)
            return torch.cat([blocks[self.rank], blocks[2 * self.ranks - 1 - self.rank]])
        return every.chunk(self.ranks)[self.rank]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (batch, heads, own tokens, dim), keys and values of perhaps fewer heads, to results like the queries."""
        if self.method == "ring":
            ring: Tensor = Ring.apply(q, k, v, self)  # type: ignore[no-untyped-call]
            return ring
        q, k, v = (_swapped(x, self, to_heads=True) for x in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] > k.shape[1])
        return _swapped(y, self, to_heads=False)


class Ring(torch.autograd.Function):
    """Attention of own queries to everybody's keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Any:
        """Blocks of keys one after the other, own ones first."""
        ctx.context = context
        every = _gathered(k, v, context)
        merged: tuple[Tensor, Tensor] | None = None
        for rank, queries, keys in _blocks(context, q.shape[2]):
            block_k, block_v = _widened(every[rank], keys, q)
            block, sums = _fused(q[:, :, queries], block_k, block_v, context.causal and rank == context.rank, context.flash)
            own = block.to(torch.float32), sums
            merged = _merged(*merged, *own, queries) if merged else own
        assert merged is not None
        result, total = merged[0].to(q.dtype), merged[1]
        ctx.save_for_backward(q, k, v, result, total)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Keys and values once more, and their gradients to those who have them."""
        q, k, v, result, total = ctx.saved_tensors
        context, gradient = ctx.context, gradients[0]
        every, of_queries = _gathered(k, v, context), torch.zeros_like(q, dtype=torch.float32)
        of_keys = torch.zeros_like(every, dtype=torch.float32)
        for rank, queries, keys in _blocks(context, q.shape[2]):
            own_gradient, own_q, own_result = (x[:, :, queries] for x in (gradient, q, result))
            sums = total[:, :, queries].contiguous()  # kernels take no others
            causal = context.causal and rank == context.rank
            block_k, block_v = _widened(every[rank], keys, q)
            of_q, *of_block = _fused_backward(own_gradient, own_q, block_k, block_v, own_result, sums, causal, context.flash)
            of_queries[:, :, queries] += of_q
            for place, part in zip(of_keys[rank], of_block, strict=True):
                shared = part.shape[1] > place.shape[1]  # by several heads of queries
                whole = part.view(len(part), place.shape[1], -1, *part.shape[2:]).sum(2) if shared else part
                place[:, :, keys] += whole
        mine = torch.empty_like(of_keys[0])
        dist.reduce_scatter_tensor(mine.flatten(0, 1), of_keys.flatten(0, 2), group=context.group)
        return of_queries.to(q.dtype), mine[0].to(k.dtype), mine[1].to(v.dtype), None


def _merged(result: Tensor, total: Tensor, block: Tensor, sums: Tensor, queries: slice) -> tuple[Tensor, Tensor]:
    """A result in fp32 and its sums with those of one more block for some of the queries, the last ones.

    By the operators of PyTorch's own ring attention (_SDPAMerger): what is priced is what runs.
    """
    old, before = result[:, :, queries], total[:, :, queries]
    share = functional.sigmoid(sums - before)
    old = old - share[..., None] * (old - block)
    before = before - functional.logsigmoid(before - sums)
    if not queries.start:
        return old, before
    return torch.cat((result[:, :, : queries.start], old), 2), torch.cat((total[:, :, : queries.start], before), 2)


def _swapped(x: Tensor, context: ContextParallel, to_heads: bool) -> Tensor:
    """All tokens of some heads for some tokens of all heads, (batch, heads, tokens, dim), or back."""
    given, taken = (1, 2) if to_heads else (2, 1)
    pieces = exchanged(torch.stack(x.chunk(context.ranks, given)), context.group)
    return torch.cat(pieces.unbind(), taken)


def _gathered(k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
    """(ranks, 2, batch, heads, tokens, dim)."""
    own = torch.stack((k, v))
    every = own.new_empty(context.ranks, *own.shape)
    dist.all_gather_into_tensor(every.flatten(0, 2), own.flatten(0, 1), group=context.group)
    return every


def _blocks(context: ContextParallel, tokens: int) -> Iterator[tuple[int, slice, slice]]:
    """(whose keys, which of the own queries, which of these keys)."""
    every, half = slice(tokens), tokens // 2
    for turn in range(context.ranks):
        rank = (context.rank - turn) % context.ranks
        if not context.causal or not turn:
            yield rank, every, every
        elif rank < context.rank:
            yield rank, every, slice(half)
        else:
            yield rank, slice(half, tokens), every


def _widened(pair: Tensor, keys: slice, q: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, as many heads as queries have."""
    pair = pair[:, :, :, keys]
    wide = pair if q.shape[1] == pair.shape[2] else pair.repeat_interleave(q.shape[1] // pair.shape[2], 2)
    return wide[0], wide[1]


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, flash: bool = True) -> tuple[Tensor, Tensor]:
    """The result and the logarithm of each query's sum of exponentials, by the kernel of the device and the type."""
    if q.device.type == "cpu":
        result, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif q.dtype == torch.float32 or not flash:
        result, sums, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        sums = sums[:, :, : q.shape[2]]  # rows are padded
    else:
        result, sums, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return result, sums


def _fused_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, sums: Tensor, causal: bool, flash: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, of the part of a result that comes from these keys: probabilities are made again
    from the sums over all keys.
    """
    arguments = (gradient, q, k, v)
    if q.device.type == "cpu":
        made = aten._scaled_dot_product_flash_attention_for_cpu_backward(*arguments, result, sums, 0.0, causal)
    elif q.dtype == torch.float32 or not flash:
        rows = functional.pad(sums, (0, -sums.shape[2] % 32), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        made = aten._scaled_dot_product_efficient_attention_backward(
            *arguments, None, result, rows, seed, seed, 0.0, [True, True, True, False], causal
        )
    else:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        made = aten._scaled_dot_product_flash_attention_backward(
            *arguments, result, sums, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[0]
        )
    return made[0], made[1], made[2]
