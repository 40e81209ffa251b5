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


def transformer_layer(share: RankShapes, moe: Experts | None) -> list[Operator]:
    """The pieces of one layer, dense or with the experts `moe`, in the order of the forward pass."""
    before, after = norm(share, "attention norm", residual=True, source="layer input"), norm(share, "mlp norm", residual=True)
    return [
        replace(before, modules=("layernorm",), makes=("qkv input",)),
        *attention(share),
        residual(share, "attention residual"),
        replace(after, modules=("layernorm",), makes=("mlp up input", "mlp input")),
        *(mixture(share, moe) if moe else _mlp(share)),
        residual(share, "mlp residual"),
    ]


def _mlp(share: RankShapes) -> list[Operator]:
    model = share.model
    width = model.ffn * (2 if model.gated else 1)
    tokens, columns = share.tokens, model.ffn // share.tp
    up = column_linear(share, "mlp up", width, model.mlp_bias, parts=(columns, columns) if model.gated else ())
    between = (
        eager.gated(share, columns)
        if share.eager and model.gated
        else activation(share, "activation", tokens * columns, saved="mlp up output")
    )
    return [
        replace(up, modules=("mlp",), makes=("mlp up output",)),
        replace(between, modules=("mlp",), makes=("mlp down input",)),
        replace(row_linear(share, "mlp down", model.ffn, model.mlp_bias), modules=("mlp",)),
    ]
