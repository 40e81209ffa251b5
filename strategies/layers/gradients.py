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
    fp8: bool = False  # of a matrix whose products are in fp8


def completed(back: Sequence[Operator]) -> tuple[CompletedGradient, ...]:
    """Gradients of the parameters of operators, which are in the order of a backward pass, in the order of their completion."""
    passes = [operator.backward for operator in back]
    left, weights_left = sum(map(len, passes)), sum(len(operator.weight_gradient) for operator in back)
    result: list[CompletedGradient] = []
    for operator, items in zip(back, passes, strict=True):
        left -= len(items)
        weights_left -= len(operator.weight_gradient)
        shapes, tied = operator.tied + operator.shapes, list(operator.tied)
        both = zip(_completed(shapes, items), _completed(shapes, operator.weight_gradient), strict=True)
        for (shape, after), (_, weights_after) in both:
            another = bool(_take(tied, shape, 1))
            fp8 = bool(operator.fp8_parameters) and len(shape) > 1
            result.append(
                CompletedGradient(shape, left + after, weights_left + weights_after, operator.experts > 0, another, fp8)
            )
    return tuple(result)


def before(gradients: Sequence[CompletedGradient], items: int, weights: int) -> tuple[CompletedGradient, ...]:
    """Gradients, when so many more items of a backward pass, and of the second half of a split one, follow."""
    return tuple(
        gradient._replace(left=gradient.left + items, weights_left=gradient.weights_left + weights) for gradient in gradients
    )


def _completed(shapes: Sequence[Shape], items: Sequence[Item]) -> list[tuple[Shape, int]]:
    """Each shape with how many of `items` come after its gradient: after the product of that shape, what adds its result to what
    there is, and the sums of its bias, which is handed over first by the same function; or after all.
    """
    missing, pending, result, joined, label = list(shapes), list[Shape](), list[tuple[Shape, int]](), 0, ""
    for after, item in zip(range(len(items) - 1, -1, -1), items, strict=True):
        joined += isinstance(item, Start) - isinstance(item, Join)
        if isinstance(item, Kernel) and item.kind == "gemm" and item.label.endswith(" weight"):
            label, batch = item.label.removesuffix(" weight"), item.shape[0]
            pending += _take(missing, item.shape[1:3], batch)
            rows = item.shape[1:2]
        elif isinstance(item, Kernel) and label and item.label == f"{label} bias":
            pending = _take(missing, rows, batch) + pending
        following = items[-after] if after else None
        if isinstance(following, Kernel) and following.label.startswith((f"{label} weight ", f"{label} bias")):
            continue
        if not joined:
            result += [(shape, after) for shape in pending]
            pending = []
    return result + [(shape, 0) for shape in pending + missing]


def _take(missing: list[Shape], shape: Shape, batch: int) -> list[Shape]:
    """The first of the missing shapes that is this one, of a batch all; they are missing no longer."""
    same = [each for each in missing if each == shape]
    found = same if batch > 1 else same[:1]
    for each in found:
        missing.remove(each)
    return found
