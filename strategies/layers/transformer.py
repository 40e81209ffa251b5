"""A transformer layer with dense attention and feed-forward: norm, attention, residual, norm, MLP, residual.

Models that norm after the residual addition (the original BERT) run the same kernels and keep as many bytes, in another order.
"""

from __future__ import annotations

from strategies.layers.attention import attention
from strategies.layers.pieces import Piece, Share, column_linear, norm, pointwise, residual, row_linear


def transformer_layer(share: Share) -> list[Piece]:
    """The pieces of one layer, in the order of the forward pass."""
    model = share.model
    width = model.ffn * (2 if model.gated else 1)
    tokens, columns = share.tokens, model.ffn // share.tp
    up = column_linear(share, "mlp up", width, model.mlp_bias)  # gate and up are one product
    return [
        norm(share, "attention norm", residual=True, source="layer input"),
        *attention(share),
        residual(share, "attention residual"),
        norm(share, "mlp norm", residual=True),
        up,
        pointwise(share, "activation", tokens * width // share.tp, tokens * columns, saved="mlp up output"),
        row_linear(share, "mlp down", model.ffn, model.mlp_bias),
        residual(share, "mlp residual"),
    ]
