"""Which weight matrices a part has on one rank; what is left of its parameters are vectors: norms and biases.

Matrices are this house's: queries, keys and values are one, gate and up are one (as in Megatron-LM), each expert has its own.
"""

from __future__ import annotations

from sim.program import Kernel
from strategies.layers import Part
from strategies.model import Model

Matrix = tuple[int, int]  # rows, columns


def matrices(part: Part, model: Model, tied: int = 0) -> dict[Matrix, int]:
    """Shape -> how many of them `part` has. tied: elements of its copy of the token embedding, where its own has none.

    The product that makes a weight's gradient has the weight's shape; embeddings, which are looked up, have no product.
    """
    found: dict[Matrix, int] = {}
    if part.name == "embedding":
        extra = (model.context if model.positions == "learned" else 0, model.token_types)
        for rows in (_vocabulary_rows(part, model, sum(extra)), *extra):
            if rows:
                found[rows, model.hidden] = found.get((rows, model.hidden), 0) + 1
        return found
    for item in part.weight_gradient:
        if isinstance(item, Kernel) and item.kind == "gemm" and not (_is_tied(item, model) and not tied):
            batch, rows, columns, _ = item.shape
            found[rows, columns] = found.get((rows, columns), 0) + batch
    return found


def _vocabulary_rows(part: Part, model: Model, others: int) -> int:
    """Of the vocabulary, on this rank: what other embeddings and a norm do not explain (a norm has at most 2 · hidden)."""
    norm = model.norm_parameters(model.hidden) if model.embedding_norm else 0
    return (part.parameters - others * model.hidden - norm) // model.hidden


def _is_tied(kernel: Kernel, model: Model) -> bool:
    """Whether it is the head's product, whose matrix is the token embedding's."""
    return model.tied and kernel.label == "head weight"


def size(found: dict[Matrix, int]) -> int:
    """Elements of all of them."""
    return sum(rows * columns * count for (rows, columns), count in found.items())
