"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): queries, keys and values from low-rank bottlenecks.

As in Megatron-LM and the training form of the paper, latents are expanded to ordinary heads before the attention core. The
matrices into the bottlenecks are whole on every tp rank and, with sequence parallelism, work on its part of the tokens; those out
of them are cut by columns. Every key head has a copy of the one rotary key.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.layers.attention.rotary import rotary
from strategies.layers.operators import Operator, column_linear, norm, pointwise, replicated_linear
from strategies.layers.rank_shapes import RankShapes
from strategies.models.parts import Latent

INPUT = "qkv input"


def projections(rank: RankShapes, latent: Latent) -> list[Operator]:
    """Everything between the layer's norm and the attention core."""
    model, q_rank, kv_rank = rank.model, latent.q_rank, latent.kv_rank
    width, up_width = model.heads * model.head_dim, model.heads * (latent.nope_head_dim + latent.v_head_dim)
    if q_rank:
        query = [*_down(rank, "query", q_rank, q_rank), _up(column_linear(rank, "query up", width, False, inputs=q_rank))]
    else:
        query = [_up(column_linear(rank, "query", width, False, source=INPUT))]
    keys = _down(rank, "key value", kv_rank + latent.rope_head_dim, kv_rank)
    both = rank.memory("qkv input sum", "backward", 3 * rank.element * rank.stream)  # gradients of the two ways
    heads = rank.tokens * rank.heads
    turned = heads * latent.rope_head_dim + rank.tokens * latent.rope_head_dim  # queries' and the one key's rotary features
    copied = heads * latent.nope_head_dim + rank.tokens * latent.rope_head_dim
    return [
        Operator(input_gradient=(both,)),
        *query,
        *keys,
        _up(column_linear(rank, "key value up", up_width, False, inputs=kv_rank), "values"),
        _up(rotary(rank, turned), "queries"),
        _up(pointwise(rank, "keys", copied, heads * model.head_dim), "keys"),
    ]


def _up(operator: Operator, *makes: str) -> Operator:
    """Part of Megatron-LM's mla_up_proj: norms of the latents, matrices out of them, rotary features, keys."""
    return replace(operator, modules=("mla_up_proj",), makes=makes)


def _down(rank: RankShapes, name: str, outputs: int, normed: int) -> list[Operator]:
    """Matrix into a bottleneck, and the norm of `normed` of its features."""
    bias, ranks = rank.model.attention_bias, rank.tokens // rank.local_tokens
    down = replicated_linear(rank, f"{name} down", rank.local_tokens, outputs, ranks, bias, INPUT, in_fp8=True)
    return [down, _up(norm(rank, f"{name} norm", features=normed), f"{name} up input")]
