"""A transformer layer: norm, attention, residual, norm, MLP or mixture of experts, residual.

Models that norm after the residual addition (the original BERT) or after the block (OLMo 2) run the same kernels and keep as many
bytes, in another order. With four norms (Gemma 2) results of both blocks are normed, too. Of parallel blocks (GPT-NeoX, Falcon)
each adds its result to the residual stream, and tp ranks reduce each by itself; GPT-NeoX reduces their sum, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from strategies.frameworks.pytorch import operators as eager
from strategies.layers.attention.cross_attention import cross_attention
from strategies.layers.attention.self_attention import attention
from strategies.layers.mixture_of_experts import mixture
from strategies.layers.operators import Operator, activation, column_linear, norm, residual, row_linear
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.state_space.delta_net import delta_net
from strategies.layers.state_space.mixer import state_space
from strategies.layers.state_space.shared_block import block_of, shared_block
from strategies.models.parts import Experts


def transformer_layer(rank: RankShapes, moe: Experts | None) -> list[Operator]:
    """The pieces of one layer, dense or with the experts `moe`, in the order of the forward pass."""
    if rank.model.parallel:
        return _parallel(rank)
    if rank.model.mixer != "attention" or not rank.model.feed_forward:
        return _of_blocks(rank, moe)
    dense, latent = moe is None, rank.model.latent is not None
    before = norm(rank, "attention norm", residual=True, source="layer input", into_product=not latent)
    after = norm(rank, "mlp norm", residual=True, into_product=dense)
    return [
        replace(before, modules=("layernorm",), makes=("qkv input",)),
        *attention(rank, normed=True),
        *_result_norm(rank, "attention"),
        residual(rank, "attention residual"),
        *(cross_attention(rank) if rank.model.cross else ()),
        replace(after, modules=("layernorm",), makes=("mlp up input", "mlp input")),
        *(mixture(rank, moe) if moe else _mlp(rank, normed=True)),
        *_result_norm(rank, "mlp"),
        residual(rank, "mlp residual"),
    ]


def _of_blocks(rank: RankShapes, moe: Experts | None) -> list[Operator]:
    """A layer with a mixer, a feed-forward block or both (Mamba-2 and its hybrids); attention and state space side by side read
    one norm and are added. A block that layers share may precede both (Zamba2).
    """
    model, operators = rank.model, list[Operator]()
    if model.shared_block:
        operators += shared_block(rank, _mlp(block_of(rank)))
    if model.mixer != "none":
        before = norm(rank, "attention norm", residual=True, source="" if operators else "layer input")
        operators.append(replace(before, modules=("layernorm",), makes=("qkv input",)))
        if model.mixer == "both":
            there, back = (rank.memory("mixer sum", phase, 3 * rank.element * rank.stream) for phase in ("forward", "backward"))
            operators += [*attention(rank), *state_space(rank, source="qkv input"), Operator((there,), (back,))]
        else:
            mixers: dict[str, Callable[[RankShapes], list[Operator]]] = {
                "attention": attention,
                "state_space": state_space,
                "delta_net": delta_net,
            }
            operators += mixers[model.mixer](rank)
        operators.append(residual(rank, "attention residual"))
    if model.feed_forward:
        before = norm(rank, "mlp norm", residual=True, source="" if operators else "layer input")
        operators.append(replace(before, modules=("layernorm",), makes=("mlp up input", "mlp input")))
        operators += [*(mixture(rank, moe) if moe else _mlp(rank)), residual(rank, "mlp residual")]
    return operators


def _result_norm(rank: RankShapes, block: str) -> list[Operator]:
    """The norm of a block's result before it is added, where layers have four."""
    return [norm(rank, f"{block} result norm")] if rank.model.norms == 4 else []


def _parallel(rank: RankShapes) -> list[Operator]:
    """Both blocks read the layer's input through one norm or through one each."""
    before = norm(rank, "attention norm", residual=True, source="layer input")
    if rank.model.norms == 1:
        both = rank.memory("parallel input sum", "backward", 3 * rank.element * rank.stream)  # gradients of the two ways
        between, source = Operator(input_gradient=(both,)), "qkv input"
    else:
        between, source = norm(rank, "mlp norm", residual=True, source="layer input"), ""
    return [
        replace(before, modules=("layernorm",), makes=("qkv input",)),
        *([between] if source else []),
        *attention(rank),
        *([] if source else [replace(between, modules=("layernorm",), makes=("mlp up input",))]),
        *_mlp(rank, source),
        residual(rank, "attention residual"),
        residual(rank, "mlp residual"),
    ]


def _mlp(rank: RankShapes, source: str = "", normed: bool = False) -> list[Operator]:
    """source: name of its input where another block reads it, too. normed: as of `column_linear`."""
    model = rank.model
    width = model.ffn * (2 if model.gated else 1)
    tokens, columns = rank.tokens, model.ffn // rank.tp
    parts = (columns, columns) if model.gated else ()
    up = column_linear(rank, "mlp up", width, model.mlp_bias, source=source, parts=parts, normed=normed)
    between = (
        eager.gated(rank, "activation", tokens * columns, saved="mlp up output")
        if rank.eager and model.gated
        else activation(rank, "activation", tokens * columns, saved="mlp up output")
    )
    return [
        replace(up, modules=("mlp",), makes=("mlp up output",)),
        replace(between, modules=("mlp",), makes=("mlp down input",)),
        replace(row_linear(rank, "mlp down", model.ffn, model.mlp_bias), modules=("mlp",)),
    ]
