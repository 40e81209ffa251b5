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


class Made(NamedTuple):
    """A parameter whose gradient is complete when `left` items of the part's backward pass are still to run, or `weights_left`
    items of the second half of a split one.
    """

    shape: Shape
    left: int
    weights_left: int
    spread: bool  # of an expert that is spread over ep ranks
    tied: bool  # a copy of a matrix that the embedding has too


def made(back: Sequence[Operator]) -> tuple[Made, ...]:
    """Of pieces in the order of a backward pass, every parameter in the order in which gradients are complete."""
    wholes = [piece.whole or piece.input_gradient + piece.weight_gradient for piece in back]
    left, weights_left, result = sum(map(len, wholes)), sum(len(piece.weight_gradient) for piece in back), list[Made]()
    for piece, whole in zip(back, wholes, strict=True):
        left -= len(whole)
        weights_left -= len(piece.weight_gradient)
        shapes = piece.tied + piece.shapes
        both = zip(_completed(shapes, whole), _completed(shapes, piece.weight_gradient), strict=True)
        for number, ((shape, after), (_, weights_after)) in enumerate(both):
            tied = number < len(piece.tied)
            result.append(Made(shape, left + after, weights_left + weights_after, piece.experts > 0, tied))
    return tuple(result)


def before(gradients: Sequence[Made], items: int, weights: int) -> tuple[Made, ...]:
    """The same when so many items of a backward pass, and of the second half of a split one, follow."""
    return tuple(one._replace(left=one.left + items, weights_left=one.weights_left + weights) for one in gradients)


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
