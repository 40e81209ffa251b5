"""A transformer layer: norm, attention, residual, norm, MLP or mixture of experts, residual.

Models that norm after the residual addition (the original BERT) run the same kernels and keep as many bytes, in another order.
"""

from __future__ import annotations

from strategies.layers import eager
from strategies.layers.attention import attention
from strategies.layers.mixture import mixture
from strategies.layers.pieces import Piece, activation, column_linear, norm, residual, row_linear
from strategies.layers.share import Share
from strategies.model import Experts


def transformer_layer(share: Share, moe: Experts | None) -> list[Piece]:
    """The pieces of one layer, dense or with the experts `moe`, in the order of the forward pass."""
    return [
        norm(share, "attention norm", residual=True, source="layer input"),
        *attention(share),
        residual(share, "attention residual"),
        norm(share, "mlp norm", residual=True),
        *(mixture(share, moe) if moe else _mlp(share)),
        residual(share, "mlp residual"),
    ]


def _mlp(share: Share) -> list[Piece]:
    model = share.model
    width = model.ffn * (2 if model.gated else 1)
    tokens, columns = share.tokens, model.ffn // share.tp
    return [
        column_linear(share, "mlp up", width, model.mlp_bias, parts=(columns, columns) if model.gated else ()),
        eager.gated(share, columns)
        if share.eager and model.gated
        else activation(share, "activation", tokens * columns, saved="mlp up output"),
        row_linear(share, "mlp down", model.ffn, model.mlp_bias),
    ]
