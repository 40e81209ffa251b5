"""A transformer layer with dense attention and feed-forward: norm, attention, residual, norm, MLP, residual.

Models that norm after the residual addition (the original BERT) run the same kernels and keep as many bytes, in another order.
"""

from __future__ import annotations

from dataclasses import replace

from sim.program import Kernel
from strategies.layers.pieces import Piece, Share, column_linear, norm, pointwise, residual, row_linear

LOG_SUM_EXP = 4  # bytes: flash attention keeps one fp32 number per query and head (arXiv:2205.14135)


def transformer_layer(share: Share) -> list[Piece]:
    """The pieces of one layer, in the order of the forward pass."""
    model = share.model
    width = model.ffn * (2 if model.gated else 1)
    tokens, columns = share.tokens, model.ffn // share.tp
    up = column_linear(share, "mlp up", width, model.mlp_bias)  # gate and up are one product
    return [
        norm(share, "attention norm", residual=True, source="layer input"),
        *_attention(share),
        residual(share, "attention residual"),
        norm(share, "mlp norm", residual=True),
        up,
        pointwise(share, "activation", tokens * width // share.tp, tokens * columns, saved="mlp up output"),
        row_linear(share, "mlp down", model.ffn, model.mlp_bias),
        residual(share, "mlp residual"),
    ]


def _attention(share: Share) -> list[Piece]:
    model, dim = share.model, share.model.head_dim
    queries, keys = share.tokens * share.heads * dim, share.tokens * share.kv_heads * dim
    outputs = (model.heads + 2 * model.kv_heads) * dim
    local = (share.heads + 2 * share.kv_heads) * dim
    pieces = [column_linear(share, "qkv", outputs, model.attention_bias, local)]
    if model.qk_norm:
        parameters = 2 * model.norm_parameters(dim)
        normed = pointwise(share, "qk norm", queries + keys, queries + keys, saved="queries and keys before norm")
        pieces.append(replace(normed, parameters=parameters, replicated=parameters))
    if model.positions == "rotary":
        pieces.append(pointwise(share, "rotary", queries + keys, queries + keys))
    flash = share.resolved.plan.attention == "flash"
    pieces += [_flash(share)] if flash else _materialised(share)
    return [*pieces, row_linear(share, "attention output", model.heads * dim, model.output_bias)]


def _flash(share: Share) -> Piece:
    """One fused kernel each way. Causal attention executes half of the products; backward 5 products where forward has 2.

    Dropout is drawn again in backward: no mask is kept. The backward kernel sums query gradients in fp32 (FlashAttention-2).
    """
    model, dim, element = share.model, share.model.head_dim, share.element
    queries, keys = share.tokens * share.heads * dim, share.tokens * share.kv_heads * dim
    sums = LOG_SUM_EXP * share.tokens * share.heads
    causal = model.family == "decoder"
    flops = 4.0 * queries * share.sequence * (0.5 if causal else 1.0)
    shape = (share.batch, share.heads, share.kv_heads, share.sequence, share.sequence, dim, int(causal))
    dtype = share.resolved.plan.precision
    moved = float(element * 2 * (queries + keys) + sums)  # reads queries, keys, values; writes the result
    backward = float(element * 4 * (queries + keys) + sums)  # these, the result's gradient, and three gradients written
    return Piece(
        forward=(Kernel("attention_forward", "attention", "forward", flops, moved, dtype, shape),),
        input_gradient=(Kernel("attention_backward", "attention", "backward", 2.5 * flops, backward, dtype, shape),),
        saved={"queries": element * queries, "keys": element * keys, "values": element * keys},
        core=True,
        inner={"log-sum-exp": sums},
        temporary=element * 2 * (queries + keys) + 4 * queries,
        flops=4.0 * share.tokens * model.heads * dim * share.sequence,
    )


def _materialised(share: Share) -> list[Piece]:
    """Scores and probabilities as tensors in memory, sequence × sequence for every head, in full even when causal.

    Shared key and value heads are repeated for each query head first, as the batched product needs them.
    """
    sequence, dim, element = share.sequence, share.model.head_dim, share.element
    plan = share.resolved.plan
    queries, keys = element * share.tokens * share.heads * dim, element * share.tokens * share.kv_heads * dim
    matrices = share.batch * share.heads
    scores = matrices * sequence**2
    repeated = share.kv_heads < share.heads
    # the attention core gets keys and values as they are: repeated ones are its own, and then only selective recomputation
    # needs those that were not
    inputs = {"keys": keys, "values": keys} if not repeated or plan.recompute == "selective" else {}
    pieces = []
    if repeated:
        forward = share.memory("repeat keys and values", "forward", 2 * (keys + queries))
        backward = share.memory("repeat keys and values", "backward", 2 * (keys + queries))
        pieces.append(Piece((forward,), (backward,), core=True, inner={"repeated keys": queries, "repeated values": queries}))
    rows = pointwise(share, "softmax", scores, scores)
    softmax = replace(
        rows,
        core=True,
        inner={"probabilities": element * scores},
        input_gradient=(share.memory("softmax", "backward", 3 * element * scores),),
    )
    pieces += [_product(share, "scores", sequence, dim, {"queries": queries, **inputs}), softmax]
    if share.attention_dropout:
        moved = (2 * element + 1) * scores
        kept = {"attention dropout mask": scores, "dropped probabilities": element * scores}
        work = [(share.memory("attention dropout", phase, moved),) for phase in ("forward", "backward")]
        pieces.append(Piece(work[0], work[1], core=True, inner=kept, temporary=2 * element * scores))
    return [*pieces, _product(share, "context", dim, sequence, inputs)]


def _product(share: Share, label: str, columns: int, depth: int, saved: dict[str, int]) -> Piece:
    """For every head sequence × depth by depth × columns; both operands have gradients."""
    sequence, matrices = share.sequence, share.batch * share.heads
    left = share.gemm(f"{label} gradient left", "backward", sequence, depth, columns, matrices)
    right = share.gemm(f"{label} gradient right", "backward", depth, columns, sequence, matrices)
    return Piece(
        forward=(share.gemm(label, "forward", sequence, columns, depth, matrices),),
        input_gradient=(left, right),
        saved=dict(saved),
        core=True,
        temporary=share.element * matrices * sequence * (columns + depth),
        flops=2.0 * share.batch * share.model.heads * sequence * columns * depth,
    )
