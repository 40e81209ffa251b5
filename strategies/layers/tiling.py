"""Memory-centric tiling: a matrix cut by its outputs into tiles that are multiplied one after the other.

Rajbhandari et al. 2021, arXiv:2104.07857, section 5.1.3; github.com/deepspeedai/DeepSpeed deepspeed/runtime/zero/tiling.py,
TiledLinear with out_splits. Forward, each tile's result is copied, and the copies are joined in one tensor (torch.cat). Backward,
autograd goes from tile to tile: each makes a gradient of the input, which is added to that of the tiles before, and its own
weight's gradient. With ZeRO-3 a tile's parameters are there only meanwhile (`strategies.frameworks.deepspeed.tiles`). Tiles are
as equal as can be; biases stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from sim.program import Item, Kernel
from strategies.layers.operators import Operator
from strategies.layers.rank_shapes import RankShapes


def cut(size: int, tiles: int) -> list[int]:
    """Rows of each tile of `size` rows; no tile is empty."""
    tiles = min(tiles, size)
    return [size // tiles + (number < size % tiles) for number in range(tiles)]


def in_tiles(rank: RankShapes, operators: Sequence[Operator]) -> Sequence[Operator]:
    """Operators of a layer, whose matrices are in as many tiles as the plan says."""
    options = rank.resolved.deepspeed
    if options is None or options.tiles == 1:
        return operators
    return [_tiled(rank, operator, options.tiles) for operator in operators]


def _tiled(rank: RankShapes, operator: Operator, tiles: int) -> Operator:
    trained = {item.label for item in operator.weight_gradient if isinstance(item, Kernel) and item.kind == "gemm"}
    label = next((label.removesuffix(" weight") for label in trained if label.endswith(" weight")), "")
    forward = [item for item in operator.forward if isinstance(item, Kernel) and _is_product(item, label)]
    if not forward:
        return operator
    _, tokens, _, inputs = forward[0].shape
    rows = list(chain.from_iterable(cut(item.shape[2], tiles) for item in forward))
    result, gradient = (rank.element * tokens * size for size in (sum(rows), inputs))
    products = [rank.gemm(label, "forward", tokens, size, inputs) for size in rows]
    joined = rank.memory(f"{label} tiles", "forward", 4 * result)

    back: list[tuple[Kernel, ...]] = [(rank.gemm(label, "backward", tokens, inputs, size),) for size in rows]
    added = (rank.memory(f"{label} gradients", "backward", 3 * gradient),)
    back[1:] = [(*product, *added) for product in back[1:]]
    weights = [rank.weight_gemm(f"{label} weight", size, inputs, tokens) for size in rows]
    before, after = _around(operator.input_gradient, label)
    rest = tuple(item for item in operator.weight_gradient if not _of(item, f"{label} weight"))
    in_turn = chain.from_iterable((*product, *weight) for product, weight in zip(back, weights, strict=True))

    first, last = _around(operator.forward, label)
    matrices = [(size, inputs) for size in rows]
    return replace(
        operator,
        forward=(*first, *products, joined, *last),
        input_gradient=(*before, *chain.from_iterable(back), *after),
        weight_gradient=(*chain.from_iterable(weights), *rest),
        both_gradients=(*before, *in_turn, *after, *rest),
        temporary=operator.temporary + max(result, gradient),  # the copies; the gradient to which a tile's is added
        shapes=(*matrices, *(shape for shape in operator.shapes if len(shape) == 1)),
    )


def _is_product(item: Item, label: str) -> bool:
    return isinstance(item, Kernel) and item.kind == "gemm" and item.label == label


def _of(item: Item, label: str) -> bool:
    return isinstance(item, Kernel) and item.label.startswith(label)


def _around(items: Sequence[Item], label: str) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """What comes before the products of that label, and after them, without sums of their results."""
    at = [number for number, item in enumerate(items) if _is_product(item, label)]
    return tuple(items[: at[0]]), tuple(item for item in items[at[-1] + 1 :] if not _of(item, f"{label} gradients"))
