"""When in a part's backward pass the gradients of its parameters are complete.

PyTorch's autograd accumulates a gradient as soon as it is made, and hooks of DDP, Megatron-LM and DeepSpeed hear of it then
(AccumulateGrad's post hooks). What `LinearWithGradAccumulationAndAsyncCommunication` of Megatron-LM makes beside a collective is
complete when that is over: the function waits for it before it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.program import Item, Join, Kernel, Start
from strategies.layers.operators import Operator, Shape


class CompletedGradient(NamedTuple):
    """A parameter whose gradient is complete when `left` items of the part's backward pass are still to run, or `weights_left`
    items of the second half of a split one.
    """

    shape: Shape
    left: int
    weights_left: int
    spread: bool  # of an expert that is spread over ep ranks
    tied: bool  # a copy of a matrix that the embedding has too


def completed(back: Sequence[Operator]) -> tuple[CompletedGradient, ...]:
    """Gradients of the parameters of operators, which are in the order of a backward pass, in the order of their completion."""
    passes = [operator.backward for operator in back]
    left, weights_left = sum(map(len, passes)), sum(len(operator.weight_gradient) for operator in back)
    result: list[CompletedGradient] = []
    for operator, items in zip(back, passes, strict=True):
        left -= len(items)
        weights_left -= len(operator.weight_gradient)
        shapes = operator.tied + operator.shapes
        both = zip(_completed(shapes, items), _completed(shapes, operator.weight_gradient), strict=True)
        for number, ((shape, after), (_, weights_after)) in enumerate(both):
            tied = number < len(operator.tied)
            result.append(CompletedGradient(shape, left + after, weights_left + weights_after, operator.experts > 0, tied))
    return tuple(result)


def before(gradients: Sequence[CompletedGradient], items: int, weights: int) -> tuple[CompletedGradient, ...]:
    """Gradients, when so many more items of a backward pass, and of the second half of a split one, follow."""
    return tuple(
        gradient._replace(left=gradient.left + items, weights_left=gradient.weights_left + weights) for gradient in gradients
    )


def _completed(shapes: Sequence[Shape], items: Sequence[Item]) -> list[tuple[Shape, int]]:
    """Each shape with how many of `items` come after its gradient: after the product of that shape and what adds its result to
    what there is, or after all.
    """
    missing, pending, result, joined, label = list(shapes), list[Shape](), list[tuple[Shape, int]](), 0, ""
    for after, item in zip(range(len(items) - 1, -1, -1), items, strict=True):
        joined += isinstance(item, Start) - isinstance(item, Join)
        if isinstance(item, Kernel) and item.kind == "gemm" and item.label.endswith(" weight"):
            label, batch = item.label, item.shape[0]
            same = [shape for shape in missing if shape == item.shape[1:3]]
            for shape in same if batch > 1 else same[:1]:
                missing.remove(shape)
                pending.append(shape)
        following = items[-after] if after else None
        if isinstance(following, Kernel) and following.label.startswith(f"{label} "):
            continue
        if not joined:
            result += [(shape, after) for shape in pending]
            pending.clear()
    return result + [(shape, 0) for shape in pending + missing]
