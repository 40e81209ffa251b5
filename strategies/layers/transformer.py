"""A transformer layer: norm, attention, residual, norm, MLP or mixture of experts, residual.

Models that norm after the residual addition (the original BERT) run the same kernels and keep as many bytes, in another order.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.frameworks.pytorch import operators as eager
from strategies.layers.attention.self_attention import attention
from strategies.layers.mixture_of_experts import mixture
from strategies.layers.operators import Operator, activation, column_linear, norm, residual, row_linear
from strategies.layers.rank_shapes import RankShapes
from strategies.models.model import Experts


def transformer_layer(rank: RankShapes, moe: Experts | None) -> list[Operator]:
    """The pieces of one layer, dense or with the experts `moe`, in the order of the forward pass."""
    before, after = norm(rank, "attention norm", residual=True, source="layer input"), norm(rank, "mlp norm", residual=True)
    return [
        replace(before, modules=("layernorm",), makes=("qkv input",)),
        *attention(rank),
        residual(rank, "attention residual"),
        replace(after, modules=("layernorm",), makes=("mlp up input", "mlp input")),
        *(mixture(rank, moe) if moe else _mlp(rank)),
        residual(rank, "mlp residual"),
    ]


def _mlp(rank: RankShapes) -> list[Operator]:
    model = rank.model
    width = model.ffn * (2 if model.gated else 1)
    tokens, columns = rank.tokens, model.ffn // rank.tp
    up = column_linear(rank, "mlp up", width, model.mlp_bias, parts=(columns, columns) if model.gated else ())
    between = (
        eager.gated(rank, columns)
        if rank.eager and model.gated
        else activation(rank, "activation", tokens * columns, saved="mlp up output")
    )
    return [
        replace(up, modules=("mlp",), makes=("mlp up output",)),
        replace(between, modules=("mlp",), makes=("mlp down input",)),
        replace(row_linear(rank, "mlp down", model.ffn, model.mlp_bias), modules=("mlp",)),
    ]
