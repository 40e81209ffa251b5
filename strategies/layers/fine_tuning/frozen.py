"""Operators whose parameters have no gradients, and operators that gradients do not reach.

What PyTorch's autograd does where `requires_grad` is off: no product makes the weight's gradient, and the input that it would
read is not kept; the gradient of the input is made as before. Below the lowest parameter that is trained nothing requires a
gradient: only the forward pass runs, and nothing is kept. Megatron-LM's layers do the same (LinearWithFrozenWeight in
megatron/core/tensor_parallel/layers.py), and so do Transformer Engine's, which cast one copy of an operand in place of two.

Frozen matrices in 4 bits (bitsandbytes' Linear4bit): a kernel reads numbers and scales and writes the matrix in 16 bits,
before the product of the forward pass and again before that of the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sim.program import Kernel
from strategies.layers.operators import Operator, Shape
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items
from strategies.plan.fine_tuning import Lora

FORWARD_ONLY = 1  # passes of an operator that gradients do not reach


def label_of(operator: Operator) -> str:
    """The label of its matrix product; nothing where it has none."""
    return next((item.label for item in operator.forward if isinstance(item, Kernel) and item.kind == "gemm"), "")


def frozen(rank: RankShapes, operator: Operator, linear: bool = False) -> Operator:
    """The operator without gradients of its parameters. linear: of a layer, whose frozen matrices `plan.lora` may keep
    narrower.
    """
    shapes = operator.tied + operator.shapes
    if not shapes:
        return operator
    lora = rank.resolved.lora if linear else None
    still = replace(
        operator,
        weight_gradient=(),
        both_gradients=(),
        saved={name: size for name, size in operator.saved.items() if name not in operator.for_weights},
        shapes=(),
        tied=(),
        replicated=0,
        experts=0,
        passes=operator.passes - bool(operator.weight_gradient),
        frozen_shapes=operator.shapes,
        frozen_bytes=_size(rank, operator.shapes, lora),
    )
    stored = lora.bytes_per_weight if lora is not None and lora.weights == "nf4" else None
    return still if stored is None else _dequantised(rank, still, stored)


def _size(rank: RankShapes, shapes: Sequence[Shape], lora: Lora | None) -> float:
    """Bytes that parameters take."""
    matrix = rank.element if lora is None or lora.bytes_per_weight is None else lora.bytes_per_weight
    if lora is not None and lora.weights == "fp8" and rank.resolved.fp8 is not None:
        matrix *= rank.resolved.fp8.width
    return float(sum(math.prod(shape) * (matrix if len(shape) == 2 else rank.element) for shape in shapes))


def _dequantised(rank: RankShapes, operator: Operator, stored: float) -> Operator:
    """A kernel for each matrix before the products that take it."""
    elements = [math.prod(shape) for shape in operator.frozen_shapes if len(shape) == 2]
    label, width = label_of(operator), stored + rank.element

    def kernels(phase: str) -> Items:
        return tuple(rank.memory(f"{label} dequantisation", phase, width * count) for count in elements)

    return replace(
        operator,
        forward=(*kernels("forward"), *operator.forward),
        input_gradient=(*kernels("backward"), *operator.input_gradient),
        temporary=operator.temporary + rank.element * sum(elements),
    )


def forward_only(operator: Operator) -> Operator:
    """The operator where nothing below it is trained, and neither is it."""
    return replace(
        operator,
        input_gradient=(),
        weight_gradient=(),
        both_gradients=(),
        saved={},
        inner={},
        kept_results={},
        passes=FORWARD_ONLY,
    )


def _without_input_gradient(operator: Operator) -> Operator:
    """An operator whose input requires no gradient: of a parameter, or of what only passes the input on."""
    if not (operator.shapes or operator.tied):
        return forward_only(operator)
    if not operator.weight_gradient:
        return operator
    return replace(operator, input_gradient=(), both_gradients=(), passes=operator.passes - 1)


def lowest(operators: Sequence[Operator], keeps_input: bool) -> list[Operator]:
    """Operators of the lowest part that is trained: what stands before its first parameter only runs forward, and the product of
    that one has no gradient of its input. A norm's one kernel makes both gradients. keeps_input: the first tensor is kept
    whatever needs it, as recomputation begins with it.
    """
    first = next(number for number, operator in enumerate(operators) if operator.shapes or operator.tied)
    result = [forward_only(operator) for operator in operators[:first]]
    reads = operators[first].beside
    for number, operator in enumerate(operators[first:]):
        same = not number or (reads and operator.beside == reads)  # as the first parameter's product
        result.append(_without_input_gradient(operator) if same else operator)
    if keeps_input and first:
        begin = next((operator.saved for operator in operators if operator.saved), {})
        result[0] = replace(result[0], saved=dict(list(begin.items())[:1]))
    return result
