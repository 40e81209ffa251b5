"""Context parallelism: the cp ranks hold sequence / cp tokens each; only attention needs the others' tokens.

Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values go round the ring of cp ranks in cp − 1 exchanges, each rank
attending to one block after the other; in backward they go round again, and their gradients with them. Here each turn is one
ring all-gather, and that of the gradients one ring reduce-scatter: they send the same bytes in the same cp − 1 steps. With
causal attention tokens are dealt in zig-zag (rank i has blocks i and 2·cp − 1 − i of 2·cp), so that all ranks work equally:
a causal block of its own tokens, and of every other rank's half the products (arXiv:2407.21783, section 3.3.2). The blocks'
results and gradients are merged by passes over memory (`_merging`). Transformer Engine sends a turn's keys and values on before
it attends to them, and in the backward pass with them the gradients of the turn before: each exchange runs beside a block
(`around`; transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVP2P). With other
kernels the compute stream waits for the exchanges.

All-gather (arXiv:2407.21783, section 3.3.2; AttnFuncWithCPAndKVAllGather there): keys and values of all ranks are gathered,
forward and backward, and put in order; a kernel for each of a rank's two blocks of queries, which are dealt in zig-zag too,
attends to all that come before; gradients of all keys and values are added up and reduce-scattered. Nothing hides these
collectives.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all-to-alls of queries, keys and values give each rank all tokens of 1/cp of its
heads, and one of the result takes that back; backward, of their gradients: (N·h)·4/cp elements per layer and direction for
N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sim.program import Collective, Kernel
from strategies.layers.operators import Operator
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items, beside

TILE = 128  # keys of a tile (flash_fwd_launch_template.h of FlashAttention-2: 64 to 128)
Shape = tuple[int, int, int, int, int, int, int]  # batch, heads, kv_heads, queries, keys, head_dim, causal: as in Kernel


def blocks(rank: RankShapes) -> list[Shape]:
    """Shapes of the attention kernels that a rank runs."""
    sequence, causal, dim = (
        rank.sequence,
        int(rank.model.family == "decoder"),
        (rank.model.head_dim + rank.model.v_head_dim) // 2,
    )
    if local := _local(rank, dim):
        return [local]
    if gathers(rank):
        return _after_gather(rank, dim, causal)
    if not rings(rank):
        return [(rank.batch, rank.heads // rank.cp, rank.kv_heads // rank.cp, sequence, sequence, dim, causal)]
    own = sequence // rank.cp
    others: Shape = (rank.batch, rank.heads, rank.kv_heads, own, own // 2 if causal else own, dim, 0)
    return [(rank.batch, rank.heads, rank.kv_heads, own, own, dim, causal)] + [others] * (rank.cp - 1)


def _after_gather(rank: RankShapes, dim: int, causal: int) -> list[Shape]:
    """A kernel for each of the last rank's two blocks of queries, with half of their diagonals: all ranks have as much to do."""
    own = rank.sequence // rank.cp
    if not causal:
        return [(rank.batch, rank.heads, rank.kv_heads, own, rank.sequence, dim, 0)]
    block = own // 2
    seen = rank.cp * block - block // 2, (rank.cp + 1) * block - (block - block // 2)
    return [(rank.batch, rank.heads, rank.kv_heads, block, keys, dim, 0) for keys in seen]


def _local(rank: RankShapes, dim: int) -> Shape | None:
    """The kernel of attention within chunks, each a sequence of its own, or within a sliding window: a query sees as many keys as
    the window leaves it on average, and a tile of keys at each end of the window is half in vain. None: over all tokens.
    """
    model, sequence = rank.model, rank.sequence
    heads, kv_heads, causal = rank.heads // _spread(rank), rank.kv_heads // _spread(rank), model.family == "decoder"
    if (packed := rank.resolved.longest_documents) is not None and packed < sequence:
        number = max(1, round(sequence / packed))  # with as many pairs of tokens: number · rows² / sequence = packed
        rows = round(math.sqrt(packed * sequence / number))
        return (rank.batch * number, heads, kv_heads, rows, rows, dim, int(causal))
    if model.chunk and model.chunk < sequence:
        number = -(-sequence // model.chunk)
        rows = -(-sequence // number)
        return (rank.batch * number, heads, kv_heads, rows, rows, dim, int(causal))
    if model.window and model.window < sequence:
        seen = model.visible_pairs(sequence) / sequence if causal else min(sequence, 2 * model.window)
        return (rank.batch, heads, kv_heads, sequence, min(sequence, round(seen) + TILE), dim, 0)
    return None


def _spread(rank: RankShapes) -> int:
    """Ranks over which Ulysses spreads heads."""
    return 1 if rings(rank) or gathers(rank) else rank.cp


def around(
    rank: RankShapes, forward: Sequence[Kernel], backward: Sequence[Kernel], elements: tuple[int, int, int]
) -> tuple[Items, Items]:
    """The kernels of the blocks, forward and backward, and with a ring or a gather what ranks exchange and merge. elements: on
    this rank, of queries, of keys and values together, of results.
    """
    if gathers(rank):
        return _behind_gathers(rank, tuple(forward), tuple(backward), elements)
    if not rings(rank):
        return tuple(forward), tuple(backward)
    queries, keys, results = elements
    coming, returning = _passed_on(rank, keys)
    merged, summed = _merging(rank, queries, keys, results)
    if not rank.kernels.hides_ring:
        return (*coming, *forward, *merged), (*coming, *backward, *summed, *returning)
    assert isinstance(coming[0], Collective)
    round_ = replace(coming[0], repeat=1 / (rank.cp - 1))
    both = replace(round_, bytes=2 * round_.bytes, label="keys, values and gradients")
    gradients = replace(round_, label="key and value gradients")
    merges = [merged[:1]] + [(each,) for each in merged[1:]]
    sums = [summed[-2:], *zip(summed[:-2:2], summed[1:-2:2], strict=True)]
    there = [beside((kernel,), (round_,)) for kernel in forward[:-1]] + [(forward[-1],)]
    returns = [round_, *[both] * (rank.cp - 2), gradients]
    back = [beside((kernel,), (sent,)) for kernel, sent in zip(backward[::-1], returns, strict=True)]
    return (
        tuple(item for turn, merge in zip(there, merges, strict=True) for item in (*turn, *merge)),
        tuple(item for turn, each in zip(back, sums, strict=True) for item in (*turn, *each)),
    )


def _behind_gathers(
    rank: RankShapes, forward: tuple[Kernel, ...], backward: tuple[Kernel, ...], elements: tuple[int, int, int]
) -> tuple[Items, Items]:
    """Keys are gathered, then values, put in the order of tokens, and copied for each kernel as far as it sees them."""
    queries, keys, results = elements
    item, every = rank.element, rank.element * keys * rank.cp
    seen = every * (2 * rank.cp + 1) / (2 * rank.cp) if rank.model.family == "decoder" else every

    def passes(phase: str, *moved: float) -> Items:
        return tuple(rank.memory("merge", phase, size) for size in moved)

    def both(operation: str, label: str) -> Items:
        items = _along(rank, operation, label, every / 2)
        return tuple(replace(each, repeat=2) for each in items if isinstance(each, Collective))

    gather, ordered = both("all_gather", "keys and values"), (2 * every, 2 * seen)
    there = (*gather, *passes("forward", *ordered), *forward, *passes("forward", 2 * item * results))
    back = (*passes("backward", *ordered, every), *backward, *passes("backward", 3 * seen, 2 * item * queries, 2 * every))
    return there, (*gather, *back, *both("reduce_scatter", "key and value gradients"))


def _passed_on(rank: RankShapes, keys: int) -> tuple[Items, Items]:
    """(Keys and values on their way round, their gradients on their way back); `keys` elements of both together are on this
    rank.
    """
    size, width = keys * rank.cp, _sum_width(rank)
    return (
        _along(rank, "all_gather", "keys and values", rank.element * size, "ring"),
        _along(rank, "reduce_scatter", "key and value gradients", width * size, "ring", width),
    )


def _merging(rank: RankShapes, queries: int, keys: int, results: int) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Passes over memory beside the attention kernels, (forward, backward), for so many elements of queries, of keys and
    values together and of results on this rank. They are those of a rank whose queries all see half of each block's keys, as the
    last one's do; another rank has as many of half its queries and a copy of the others.

    Transformer Engine (pytorch/attention/dot_product_attention/context_parallel.py): a result is scaled and added in one compiled
    pass; gradients are added in the type of the activations. PyTorch (torch/distributed/tensor/experimental/_attention.py,
    _templated_ring_attention and _SDPAMerger), operator by operator even where layers are compiled: keys and values are joined,
    and each turn's gradients; results become fp32, and a difference, a product by a number a head and a difference merge them;
    gradients are summed in fp32, and what is added to half of the keys' is joined to the other half. Passes over sums of
    exponentials, one number a head, are left out.
    """
    item, wide, others = rank.element, _sum_width(rank), rank.cp - 1

    def passes(phase: str, *moved: float) -> tuple[Kernel, ...]:
        return tuple(rank.memory("merge", phase, size) for size in moved)

    if not rank.resolved.of_pytorch:
        there = passes("forward", 2 * item * results, *[3 * item * results] * others)
        back = passes("backward", *[3 * item * queries, 3 * item * keys / 2] * others, 2 * item * queries, 2 * item * keys)
        return there, back
    joined, added, half = 2 * item * keys, item + 2 * wide, keys / 2  # half: keys, or values
    cast = [item + wide] * (item < wide)  # what is of fp32 already stays as it is
    merged = [size * results for size in (*cast, 3 * wide, 2 * wide, 3 * wide)]
    casts = [size * results for size in cast]
    there = passes("forward", *[joined] * others, *casts, *merged * others, *casts)
    turn = [added * half / 2, 2 * wide * half] * 2 + [2 * wide * keys, added * queries]
    back = passes(
        "backward",
        *(wide * queries, wide * half, wide * half),
        *[joined] * others,
        *(added * half, added * half, 2 * wide * keys, added * queries),
        *turn * others,
        *(size * count for size in cast for count in (queries, keys)),
    )
    return there, back


def _sum_width(rank: RankShapes) -> float:
    """Bytes of a number of the gradients of keys and values on their way round."""
    return max(rank.element, 4.0) if rank.resolved.of_pytorch else rank.element


def exchanged(rank: RankShapes, core: Operator) -> list[Operator]:
    """Ulysses: the attention core between all-to-alls; its result is kept besides the one that has been exchanged back."""
    if rank.cp == 1 or rings(rank) or gathers(rank):
        return [core]
    result = float(rank.element * rank.tokens * rank.heads * rank.model.v_head_dim)
    before, after = _swap(rank, dict(core.saved)), _swap(rank, {"attention result": result})
    return [before, replace(core, inner={**core.inner, "attention result": result}), after]


def _swap(rank: RankShapes, tensors: dict[str, float]) -> Operator:
    """An all-to-all of each tensor, tokens for heads or back, and of its gradient."""
    work = tuple(item for name, size in tensors.items() for item in _along(rank, "all_to_all", name, size))
    return Operator(work, work, temporary=2 * max(tensors.values()))


def _along(rank: RankShapes, operation: str, label: str, size: float, algorithm: str = "", width: float = 0) -> Items:
    """A collective of the cp ranks: see `RankShapes.along`."""
    axes = rank.resolved.attending
    return rank.along("cp", rank.cp, operation, label, size, algorithm, width, axes=() if axes == ("cp",) else axes)


def gathers(rank: RankShapes) -> bool:
    """Whether keys and values of all cp ranks are gathered."""
    return rank.cp > 1 and rank.resolved.cp_method == "all_gather"


def rings(rank: RankShapes) -> bool:
    """Whether keys and values go round a ring."""
    return rank.cp > 1 and rank.resolved.cp_method == "ring"
