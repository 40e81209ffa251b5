"""Mamba-2's mixer on one rank: a matrix in, a convolution, the scan in chunks, gate and norm, a matrix out.

The scan is the chunked algorithm of Dao and Gu 2024 (arXiv:2405.21060, section 6), whose products `state-spaces/mamba` has as
Triton kernels (mamba_ssm/ops/triton/ssd_combined.py, mamba_split_conv1d_scan_combined, which Megatron-LM's MambaMixer calls). Of
each chunk of Q tokens, with state N, heads of P channels and groups that share B and C:

* scores C·Bᵀ of a group (Q × Q × N); each head's state at its end, Bᵀ·X (P × N × Q); states passed from chunk to chunk, in fp32;
  the result, scores·X (Q × P × Q) and C·state (Q × P × N);
* backward twice as many products, besides the convolution, the scores and the states, which are computed again: kept are the
  result of the first matrix, of the scan, and the input of the last matrix.

They are priced as batched products of these shapes and the bytes that they move: no profile has measured the kernels. Megatron-LM
cuts heads and groups over tp ranks. Counted FLOPs are `StateSpace.scan_flops`.
"""

from __future__ import annotations

import math

from sim.program import Kernel
from strategies.layers.operators import Operator, column_linear, row_linear
from strategies.layers.rank_shapes import FLOAT, RankShapes
from strategies.layers.state_space.selective_scan import selective_scan
from strategies.layers.tensor_overlap import Items


def state_space(rank: RankShapes, source: str = "") -> list[Operator]:
    """The pieces of the mixer, in the order of the forward pass. source: name of its input where others read it too."""
    own = rank.model.state_space
    assert own is not None
    if own.step_rank is not None:
        return selective_scan(rank, source)
    into = column_linear(rank, "state space in", own.projected, own.bias, own.projected // rank.tp, source=source)
    return [into, _scan(rank), row_linear(rank, "state space out", own.channels, own.output_bias)]


def _scan(rank: RankShapes) -> Operator:
    """What is between the matrices."""
    own, tp = rank.model.state_space, rank.tp
    assert own is not None
    tokens, element = rank.tokens, rank.element
    channels, convolved, projected = own.channels // tp, own.convolved // tp, own.projected // tp
    first, states = _recomputed(rank, "forward")
    again, _ = _recomputed(rank, "backward")
    result = rank.reduction if own.norm else rank.memory
    passed = rank.memory("scan states passed", "backward", 3 * states)
    convolution = rank.memory("scan convolution", "backward", element * tokens * 3 * convolved)
    shapes = tuple((size // tp, *rest) for size, *rest in own.vectors)
    elements = sum(map(math.prod, shapes))
    return Operator(
        forward=(
            *first,
            *_results(rank, "forward"),
            result("scan gate", "forward", element * tokens * 3 * channels),  # the scan's result, the gate, their product
        ),
        input_gradient=(
            result("scan gate", "backward", element * tokens * 5 * channels),
            *again,
            *_gradients(rank),
            passed,
            convolution,
        ),
        weight_gradient=rank.vectors("scan parameters", elements),
        saved={"scan input": float(element * tokens * projected), "scan result": float(element * tokens * channels)},
        temporary=float(element * tokens * convolved + states),
        shapes=shapes,
        flops=own.scan_flops(tokens),
    )


def _recomputed(rank: RankShapes, phase: str) -> tuple[Items, float]:
    """What the backward pass computes again, and bytes of all chunks' states."""
    own, tp = rank.model.state_space, rank.tp
    assert own is not None
    size, chunks = _chunks(rank)
    heads = own.heads // tp
    states = float(FLOAT * chunks * heads * own.head_dim * own.state)
    items = (
        rank.memory("scan convolution", phase, rank.element * rank.tokens * 2 * own.convolved // tp),
        rank.memory("scan steps", phase, (rank.element + 2 * FLOAT) * rank.tokens * heads),
        _product(rank, "scan states", phase, own.head_dim, own.state, size, chunks * heads),
        rank.memory("scan states passed", phase, 2 * states),
        _product(rank, "scan scores", phase, size, size, own.state, chunks * own.groups // tp),
    )
    return items, states


def _results(rank: RankShapes, phase: str) -> Items:
    """The products with scores and with states."""
    own = rank.model.state_space
    assert own is not None
    size, chunks = _chunks(rank)
    batch = chunks * own.heads // rank.tp
    return (
        _product(rank, "scan within chunks", phase, size, own.head_dim, size, batch),
        _product(rank, "scan across chunks", phase, size, own.head_dim, own.state, batch),
    )


def _gradients(rank: RankShapes) -> Items:
    """Products of the gradients of states; of X, B and C by way of the states; of scores; of B and C by way of these."""
    own = rank.model.state_space
    assert own is not None
    size, chunks = _chunks(rank)
    batch, groups = chunks * own.heads // rank.tp, chunks * own.groups // rank.tp
    states = _product(rank, "scan states", "backward", own.head_dim, own.state, size, batch)
    turned = _product(rank, "scan B and C", "backward", size, own.state, own.head_dim, batch)
    scores = _product(rank, "scan scores", "backward", size, size, own.head_dim, batch)
    shared = _product(rank, "scan B and C", "backward", size, own.state, size, groups)
    return (states, *_results(rank, "backward"), turned, turned, scores, shared, shared)


def _product(rank: RankShapes, label: str, phase: str, m: int, n: int, k: int, batch: int) -> Kernel:
    """A batched product in 16 bits, whatever linear layers are in."""
    return rank.gemm(label, phase, m, n, k, batch)


def _chunks(rank: RankShapes) -> tuple[int, int]:
    """Tokens of a chunk, and how many chunks there are; the last of a sequence is padded."""
    own = rank.model.state_space
    assert own is not None
    size = min(own.chunk, rank.sequence)
    return size, rank.batch * -(-rank.sequence // size)
