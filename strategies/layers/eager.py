"""PyTorch's own operators, one by one, in place of Megatron-LM's fused kernels: `kernels: torch` in a plan.

What torch 2.13 runs and keeps for backward on a CPU (tests/calibration compare peaks with PyTorch's own):
* a layernorm is one operator and keeps its mean and deviation; an rmsnorm is written out (power, mean, reciprocal root, two
  products) and keeps what was normed before its weight too. On a GPU it is one kernel;
* a gated activation is an operator and a product: both of its factors and the product are kept;
* rotary positions are two products, a negation, a concatenation and a sum;
* the loss is log-softmax and a choice, of which the first is kept in fp32; backward both make a gradient of all logits;
* a matrix keeps its whole input, also what sequence parallelism gathered: nothing is gathered twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.program import Kernel
from strategies.layers.pieces import FLOAT, Piece, Share


def kernels(share: Share, label: str, phase: str, elements: int, passes: Sequence[float]) -> tuple[Kernel, ...]:
    """Kernels over so many elements; each of `passes` says how many times all of them are read or written."""
    return tuple(share.memory(label, phase, share.element * elements * times) for times in passes)


def gated(share: Share, columns: int) -> Piece:
    """silu(gate) · up of `columns` features each: one operator and a product."""
    elements = share.tokens * columns
    width = share.element * elements
    return Piece(
        forward=kernels(share, "activation", "forward", elements, (2, 3)),
        input_gradient=kernels(share, "activation", "backward", elements, (3, 3, 3)),
        saved={"mlp up output": 2 * width, "activated gate": width},
        temporary=4 * width,  # gradients of the product, of its two factors and of the gate
    )


def rotary(share: Share, elements: int) -> Piece:
    """Of queries and keys: x · cosine + rotated(x) · sine, each operator with its result; nothing is kept but tables."""
    return Piece(
        forward=kernels(share, "rotary", "forward", elements, (2, 1, 2, 2, 3)),
        input_gradient=kernels(share, "rotary", "backward", elements, (2, 2, 1, 1, 2, 2, 3, 3)),
        temporary=3 * share.element * elements,
    )


def loss(share: Share) -> Piece:
    """Cross-entropy in fp32. Logits of 16 bits are cast first, and their gradient last."""
    logits, cast = share.tokens * share.rows, share.element != FLOAT
    small = [share.collective("all_reduce", f"loss {name}", FLOAT * share.tokens, FLOAT) for name in ("maximum", "sum", "target")]
    casts = (share.element + FLOAT) * logits
    forward = [share.memory("log-softmax", "forward", 2 * FLOAT * logits)]
    backward = [share.memory("loss", "backward", FLOAT * logits), share.memory("log-softmax", "backward", 3 * FLOAT * logits)]
    return Piece(
        forward=(
            *((share.memory("logits in fp32", "forward", casts),) if cast else ()),
            *small[0], *forward, *small[1], *small[2],
        ),
        input_gradient=(*backward, *((share.memory("logits in fp32", "backward", casts),) if cast else ())),
        saved={"log-probabilities": FLOAT * logits},
        temporary=2 * FLOAT * logits,
    )  # fmt: skip
