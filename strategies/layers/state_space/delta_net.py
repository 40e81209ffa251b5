"""A gated delta net on one rank: a matrix in, a convolution, the delta rule in chunks, norm and gate, a matrix out.

Yang et al. 2024 (arXiv:2412.06464, section 3.3): of each chunk of C tokens, products with one matrix of key × value features per
head replace C updates of it one after the other. As Megatron-LM's GatedDeltaNet (megatron/core/ssm/gated_delta_net.py) calls
flash-linear-attention's kernels (fla/ops/gated_delta_rule/chunk.py, wy_fast.py, fla/ops/common/chunk_delta_h.py, chunk_o.py);
queries and keys are copied for each value head. Of each chunk and value head, with K key and V value features:

* K·Kᵀ (C × C × K), whose unit lower triangle is inverted; the inverse times keys (C × K × C) and values (C × V × C), from which
  what the state has already is taken (C × V × K); the state at the chunk's end (K × V × C); scores Q·Kᵀ (C × C × K), and the
  result from state (C × V × K) and scores (C × V × C): 6·C·K + 4·C·V + 6·K·V FLOPs per token in all;
* backward, keys and values times the inverse and the states are computed again. Then 4 products as large as the scores lead
  through them, 3 each through what is taken from the state and its update, and 9 through the inverse: 20·C·K + 10·C·V + 16·K·V
  + 4·C² FLOPs per token.

They are priced as batched products of these shapes and the bytes that they move, the inversion by its bytes: no profile has
measured the kernels, and that states pass from chunk to chunk one after the other is left out. Kept are the pieces of the first
matrix' result, normed queries and keys before and after they are copied, values, the inverse, decays, the result and the input
of the last matrix. tp ranks share heads. Counted FLOPs are `DeltaNet.scan_flops`.
"""

from __future__ import annotations

import math

from sim.program import Kernel
from strategies.layers.operators import Operator, column_linear, row_linear
from strategies.layers.rank_shapes import FLOAT, RankShapes
from strategies.layers.tensor_overlap import Items
from strategies.models.delta_net import DeltaNet


def delta_net(rank: RankShapes) -> list[Operator]:
    """The pieces of the mixer, in the order of the forward pass."""
    own = _sizes(rank)
    into = column_linear(rank, "delta net in", own.projected, bias=False)
    return [into, _convolution(rank), _rule(rank), _gate(rank), row_linear(rank, "delta net out", own.values, bias=False)]


def _sizes(rank: RankShapes) -> DeltaNet:
    own = rank.model.delta_net
    assert own is not None
    return own


def _convolution(rank: RankShapes) -> Operator:
    """Convolution with its activation, norms of queries and keys and their copies, decays and writing strengths."""
    own, tokens, element, tp = _sizes(rank), rank.tokens, rank.element, rank.tp
    convolved, values, heads = own.convolved // tp, own.values // tp, own.value_heads // tp
    pair, copies = 2 * own.keys // tp, 2 * own.value_heads * own.key_head_dim // tp
    copied = own.value_heads > own.key_heads
    size = element * tokens
    pieces, both = (element + FLOAT) * tokens * 2 * heads, size * (pair + copies)
    forward: list[Kernel] = [
        rank.memory("delta net pieces", "forward", 2 * size * (convolved + values)),
        rank.memory("delta net convolution", "forward", 2 * size * convolved),
        rank.reduction("delta net query and key norm", "forward", 2 * size * pair),
        rank.memory("delta net decay", "forward", pieces),
    ]
    backward: list[Kernel] = [
        rank.memory("delta net decay", "backward", 2 * pieces),
        rank.reduction("delta net query and key norm", "backward", 3 * size * pair),
        rank.memory("delta net convolution", "backward", 3 * size * convolved),
        rank.memory("delta net pieces", "backward", 2 * size * (convolved + values + 2 * heads)),
    ]
    if copied:
        forward.insert(3, rank.memory("delta net copies", "forward", both))
        backward.insert(1, rank.memory("delta net copies", "backward", both))
    normed = {"delta net queries and keys": float(size * pair)} if copied else {}
    # the norm of the result is in `_gate`; two numbers per value head and the convolution's weights are here
    shapes = tuple((count // tp, *rest) for count, *rest in own.vectors[:-1])
    return Operator(
        forward=tuple(forward),
        input_gradient=tuple(backward),
        weight_gradient=rank.vectors("delta net parameters", sum(map(math.prod, shapes))),
        saved={"delta net input": float(size * (convolved + 2 * heads)), **normed},
        temporary=float(size * convolved),
        shapes=shapes,
    )


def _rule(rank: RankShapes) -> Operator:
    """The delta rule of all chunks."""
    own, tokens, element = _sizes(rank), rank.tokens, rank.element
    (size, keys, values), chunks = _sides(rank), _chunks(rank)
    heads = own.value_heads // rank.tp
    states = float(element * chunks * heads * keys * values)
    pair, result = element * tokens * heads * keys, element * tokens * heads * values
    inverse = float(element * chunks * size * heads * size)
    return Operator(
        forward=(
            _product(rank, "delta rule keys", "forward", size, size, keys),
            rank.memory("delta rule inverse", "forward", inverse * (1 + FLOAT / element)),
            *_states(rank, "forward"),
            _product(rank, "delta rule scores", "forward", size, size, keys),
            _product(rank, "delta rule across chunks", "forward", size, values, keys),
            _product(rank, "delta rule within chunks", "forward", size, values, size),
        ),
        input_gradient=(*_states(rank, "backward"), *_gradients(rank)),
        saved={
            "delta rule queries and keys": 2.0 * pair,
            "delta rule values": float(result),
            "delta rule inverse": inverse,
            "delta rule decays": float((element + FLOAT) * tokens * heads),
        },
        temporary=pair + 2 * result + states,
        flops=own.scan_flops(tokens),
    )


def _states(rank: RankShapes, phase: str) -> Items:
    """Keys and values times the inverse; what the state has already; states."""
    size, keys, values = _sides(rank)
    return (
        _product(rank, "delta rule keys of inverse", phase, size, keys, size),
        _product(rank, "delta rule values of inverse", phase, size, values, size),
        _product(rank, "delta rule removal", phase, size, values, keys),
        _product(rank, "delta rule states", phase, keys, values, size),
    )


def _gradients(rank: RankShapes) -> Items:
    """By kernel of flash-linear-attention: of values within chunks; of states; of queries, keys and what is removed; of the
    inverse, and by way of it of keys and values.
    """
    size, keys, values = _sides(rank)

    def product(label: str, m: int, n: int, k: int) -> Kernel:
        return _product(rank, f"delta rule {label}", "backward", m, n, k)

    of_state = (product("state gradients", size, values, keys), *[product("state gradients", keys, values, size)] * 2)
    to_keys = product("state input gradients", size, keys, values)
    return (
        product("scores", size, size, keys),
        product("value gradients", size, values, size),
        *of_state,
        product("score gradients", size, size, values),
        *[to_keys] * 3,
        product("scores", size, size, keys),
        *[product("query and key gradients", size, keys, size)] * 2,
        product("inverse gradient", size, size, keys),
        product("inverse gradient", size, size, values),
        product("inverse key gradients", size, keys, size),
        product("inverse value gradients", size, values, size),
        *[product("inverse gradient", size, size, size)] * 2,
        product("keys", size, size, keys),
        *[product("key gradients", size, keys, size)] * 2,
    )


def _gate(rank: RankShapes) -> Operator:
    """The norm of each head's result and its gate, one kernel (FusedRMSNormGated of flash-linear-attention)."""
    own = _sizes(rank)
    size = float(rank.element * rank.tokens * own.values // rank.tp)
    return Operator(
        forward=(rank.reduction("delta net gate", "forward", 3 * size),),
        input_gradient=(
            rank.reduction("delta net gate", "backward", 5 * size),
            *rank.vectors("delta net gate", own.value_head_dim),
        ),
        saved={"delta net gate": size, "delta rule result": size},
        temporary=size,
        shapes=((own.value_head_dim,),),
        replicated=own.value_head_dim,
    )


def _product(rank: RankShapes, label: str, phase: str, m: int, n: int, k: int) -> Kernel:
    """A product of each chunk and value head in 16 bits, whatever linear layers are in."""
    return rank.gemm(label, phase, m, n, k, _chunks(rank) * _sizes(rank).value_heads // rank.tp)


def _sides(rank: RankShapes) -> tuple[int, int, int]:
    """Sides of the products: tokens of a chunk, features of a key, features of a value."""
    own = _sizes(rank)
    return min(own.chunk, rank.sequence), own.key_head_dim, own.value_head_dim


def _chunks(rank: RankShapes) -> int:
    """How many chunks there are; the last of a sequence is padded."""
    size, _, _ = _sides(rank)
    return rank.batch * -(-rank.sequence // size)
