"""Attention of a decoder's tokens to the result of an encoder, between a layer's own attention and its feed-forward block.

Keys and values of every layer are products of the same tensor, which is kept once, by the first layer of the decoder; backward,
each adds its gradient to that of the layers after it.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.layers.attention.context_parallel import Shape
from strategies.layers.attention.self_attention import fused_core, materialised_core
from strategies.layers.operators import Operator, column_linear, norm, residual, row_linear
from strategies.layers.rank_shapes import RankShapes


def cross_attention(rank: RankShapes) -> list[Operator]:
    """The pieces in the order of the forward pass; the first layer of a decoder norms the encoder's result before."""
    model, encoder = rank.model, RankShapes(rank.model.as_encoder, rank.resolved)
    width, shared = model.heads * model.head_dim, rank.kv_heads * model.head_dim
    keys = column_linear(
        encoder,
        "cross key value",
        2 * model.kv_heads * model.head_dim,
        model.attention_bias,
        2 * shared,
        source="encoder result",
        parts=(shared, shared),
    )
    both = rank.memory("encoder result gradient", "backward", 3 * rank.element * encoder.stream)
    shape: Shape = (rank.batch, rank.heads, rank.kv_heads, rank.sequence, encoder.sequence, model.head_dim, 0)
    fused = rank.resolved.fused_attention
    core = [fused_core(rank, [shape], encoder.sequence)] if fused else materialised_core(rank, encoder.sequence)
    return [
        *([norm(encoder, "encoder norm")] if model.joins else []),
        norm(rank, "cross norm", residual=True),
        column_linear(rank, "cross query", width, model.attention_bias),
        keys if model.joins else replace(keys, saved={}),
        *([] if model.joins else [Operator(input_gradient=(both,))]),
        *map(_renamed, core),
        row_linear(rank, "cross output", model.heads * model.v_head_dim, model.output_bias),
        residual(rank, "cross residual"),
    ]


def _renamed(operator: Operator) -> Operator:
    """With names of tensors that differ from those of the layer's own attention."""
    saved, inner = ({f"cross {name}": size for name, size in kept.items()} for kept in (operator.saved, operator.inner))
    return replace(operator, saved=saved, inner=inner)
