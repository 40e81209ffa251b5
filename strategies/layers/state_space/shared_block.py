"""A block of attention and feed-forward block that several layers share (Zamba2; Glorioso et al. 2024, arXiv:2411.15242).

Before its mixer a layer joins the residual stream with the embedded tokens; a norm, attention over 2 · hidden features, another
norm, a gated feed-forward block and a matrix of the layer's own follow, without residual connections, and the result is added to
what the mixer reads (transformers, models/zamba2/modular_zamba2.py). The feed-forward block's first matrix, and queries, keys and
values if the model says so, have adapters of the layer's own: two matrices of low rank, whose result is added. Every layer that
has a block runs all of it; its parameters, and their gradients, are those of the first such layer, whose backward pass is the
last. Embedded tokens are kept once, with what is before the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from strategies.layers.attention.self_attention import attention
from strategies.layers.operators import Operator, column_linear, norm
from strategies.layers.rank_shapes import RankShapes


def block_of(rank: RankShapes) -> RankShapes:
    """What a rank sees of the block."""
    return replace(rank, model=rank.model.as_shared_block)


def shared_block(rank: RankShapes, feed_forward: Sequence[Operator]) -> list[Operator]:
    """The pieces before a layer's mixer, in the order of the forward pass. feed_forward: the block's."""
    model, own, wide = rank.model, rank.model.shared_blocks, 2 * rank.model.hidden
    assert own is not None
    size, block = float(rank.element * rank.stream), block_of(rank)
    checkpoint = {"layer input": size} if rank.resolved.recompute == "full" else {}  # the joined tensor is made again
    joined = Operator(
        forward=(rank.memory("block input", "forward", 4 * size),),
        input_gradient=tuple(rank.memory(f"{to} gradient", "backward", 3 * size) for to in ("block input", "embedding")),
        saved=checkpoint,
    )
    held = _elsewhere if model.shared_block == "again" else _here
    before, between = norm(rank, "block norm", features=wide), norm(rank, "block mlp norm")
    up, *rest = feed_forward
    heads = {"query": own.heads, "key": own.kv_heads, "value": own.kv_heads} if own.attention_adapters else {}
    return [
        joined,
        held(replace(before, modules=("layernorm",), makes=("qkv input",))),
        *chain.from_iterable(_adapter(rank, name, wide, count * own.head_dim, "qkv input") for name, count in heads.items()),
        *map(held, attention(block, wide)),
        held(replace(between, modules=("layernorm",), makes=("mlp up input",))),
        held(up),
        *_adapter(rank, "mlp up", model.hidden, 2 * own.ffn, "mlp up input"),
        *map(held, rest),
        column_linear(rank, "block result", model.hidden, False),
        Operator((rank.memory("block result sum", "forward", 3 * size),)),
    ]


def _adapter(rank: RankShapes, name: str, inputs: int, outputs: int, source: str) -> list[Operator]:
    """Two matrices beside a product, whose results are added, as are the gradients of their input. source: name of that."""
    assert rank.model.shared_blocks is not None
    low = rank.model.shared_blocks.adapter_rank
    there = rank.memory(f"{name} adapter sum", "forward", 3 * rank.element * rank.tokens * outputs)
    back = rank.memory(f"{name} adapter input gradient", "backward", 3 * rank.element * rank.tokens * inputs)
    return [
        Operator(input_gradient=(back,)),
        column_linear(rank, f"{name} A", low, False, source=source, inputs=inputs),
        column_linear(rank, f"{name} B", outputs, False, inputs=low),
        Operator(forward=(there,)),
    ]


def _here(operator: Operator) -> Operator:
    """The operator with its parameters."""
    return operator


def _elsewhere(operator: Operator) -> Operator:
    """The operator with parameters that another layer has."""
    return replace(operator, tied=operator.shapes, shapes=(), replicated=0, fp8_parameters=0)
