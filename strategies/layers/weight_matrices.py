"""Which weight matrices a part has on one rank; what is left of its parameters are vectors: norms and biases.

Matrices are this house's: queries, keys and values are one, gate and up are one (as in Megatron-LM), each expert has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sim.program import Kernel
from strategies.layers.layer_cost import LayerCost
from strategies.models.model import Model

Matrix = tuple[int, int]  # rows, columns


class Weight(NamedTuple):
    """`copies` matrices of one shape."""

    label: str
    rows: int
    columns: int
    copies: int


def tensors(parts: Sequence[LayerCost], model: Model, tied: int, apart: bool) -> list[int]:
    """Elements of every parameter of `parts`. Vectors count as if each had the width of the model.

    apart: queries, keys, values, gate and up are matrices of their own, as in models that are plain PyTorch.
    """
    result = []
    for position, part in enumerate(parts):
        own = tied if position == len(parts) - 1 else 0
        matrix = [elements for weight in weights(part, model, own) for elements in _elements(weight, model, apart)]
        norms, rest = divmod(part.parameters + own - sum(matrix), model.hidden)
        result += matrix + [model.hidden] * norms + [rest] * (rest > 0)
    return result


def _elements(weight: Weight, model: Model, apart: bool) -> list[int]:
    """Elements of the matrices that a weight is."""
    rows = [weight.rows]
    if apart and weight.label == "qkv weight":
        features = model.kv_heads * model.head_dim
        keys = weight.rows * features // (model.query_features + 2 * features)
        rows = [weight.rows - 2 * keys, keys, keys]
    if apart and weight.label == "mlp up weight" and model.gated:
        rows = [weight.rows // 2] * 2
    return [count * weight.columns for count in rows] * weight.copies


def vectors(part: LayerCost, model: Model) -> int:
    """Biases and norms of a part, roughly: each matrix of a layer has a bias or none has one."""
    of_norm = 2 if model.norm == "layernorm" else 1
    if part.name == "embedding":
        return of_norm * model.embedding_norm
    if part.name == "head":
        return of_norm * model.final_norm
    return of_norm * (model.norms + 2 * (model.qk_norm is True)) + model.mlp_bias * sum(
        weight.copies for weight in weights(part, model, 0)
    )


def weights(part: LayerCost, model: Model, tied: int) -> Iterator[Weight]:
    """The matrices of a part; the matrix of a product has the label of the product that makes its gradient."""
    if part.name == "embedding" and not part.parameters:  # it is frozen
        return
    if part.name == "embedding":
        extra = (model.learned_rows, model.token_types)
        for rows in (_vocabulary_rows(part, model, sum(extra)), *extra):
            if rows:
                yield Weight("embedding", rows, model.hidden, 1)
        return
    heads, elsewhere = 0, [gradient.shape for gradient in part.gradients if gradient.tied and part.name == "layer"]
    for item in part.weight_gradient:
        if isinstance(item, Kernel) and item.kind == "gemm" and not (_is_tied(item, model) and not tied):
            batch, rows, columns, _ = item.shape
            if (rows, columns) in elsewhere:  # of a block that another layer has
                elsewhere.remove((rows, columns))
                continue
            heads += item.label == "head weight"
            if item.label == "head weight" and heads > 1:  # layers that predict tokens further ahead use the same matrix
                continue
            yield Weight(item.label, rows, columns, batch)


def _vocabulary_rows(part: LayerCost, model: Model, others: int) -> int:
    """Rows of the vocabulary on this rank: what other embeddings and a norm do not explain (a norm has at most 2 · hidden)."""
    norm = model.norm_parameters(model.hidden) if model.embedding_norm else 0
    return (part.parameters - others * model.hidden - norm) // model.hidden


def _is_tied(kernel: Kernel, model: Model) -> bool:
    """Whether it is the head's product, whose matrix is the token embedding's."""
    return model.tied and kernel.label == "head weight"


def size(shapes: dict[Matrix, int]) -> int:
    """Elements of all of them."""
    return sum(rows * columns * count for (rows, columns), count in shapes.items())
