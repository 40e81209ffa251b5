"""Shampoo: gradients of matrices are multiplied by roots of what has been summed up of their rows and columns."""

from __future__ import annotations

import math
from collections import Counter

from sim.program import Kernel, Run
from strategies.optimizers import FLOAT, Matrices, OfMatrices, Optimizer, Shape, optimizers, product
from strategies.optimizers.adam import ADAM

BLOCK, FREQUENCY = 8192, 100  # max_preconditioner_dim and precondition_frequency of the examples of facebookresearch/optimizers
ROOT = 4  # of each of the two factors of a matrix, G ↦ L^(-1/4) · G · R^(-1/4)
RIDGE = 1e-6  # of a factor's smallest eigenvalue relative to the largest (ridge_epsilon of google-research/scalable_shampoo)
QUADRATIC = 4  # iterations after that, until the error is less than fp32's rounding
PRODUCTS = 4  # of an iteration of the fourth root: two squares, and both iterates times the result


@optimizers("shampoo")
def shampoo() -> Optimizer:
    """Distributed Shampoo (Shi et al. 2023, arXiv:2309.06497; Anil et al. 2020, arXiv:2002.09018) with Adam's step sizes
    (grafting, which takes both norms of a step), in fp32, on blocks of at most 8,192 × 8,192 of each matrix between embedding
    and head; Adam updates the rest.

    Each step sums up G·Gᵀ and Gᵀ·G of every block, and multiplies the momentum by both roots; every 100 steps the roots are
    made anew, of which a step has the hundredth part here. They are made by the coupled Newton iteration, which is products
    alone; the eigendecomposition that is the other way has no price. Ranks that shard states share out the matrices and gather
    the updated parameters, as the paper's ranks gather their directions.
    """
    operators = (*ADAM, ("graft norms", 2), ("graft scale", 2))
    whole = OfMatrices(does="multiplies whole matrices by its preconditioners", kernels=preconditioned, states=preconditioners)
    return Optimizer(states=2 * FLOAT, operators=operators, fused=False, of_matrices=whole)


def iterations(root: int = ROOT, ridge: float = RIDGE) -> int:
    """Of the coupled Newton iteration for the p-th root of a factor whose eigenvalues are from `ridge` to 1: it begins with
    these times (p + 1)/2, and multiplies those that are small by ((p + 1) / p)^p.
    """
    return math.ceil(math.log(2 / (ridge * (root + 1))) / (root * math.log1p(1 / root))) + QUADRATIC


def blocks_of(matrices: Matrices) -> Matrices:
    """The blocks of all matrices, of at most BLOCK rows and columns."""
    blocks: Matrices = Counter()
    for shape, count in matrices.items():
        (rows, columns) = ([BLOCK] * (size // BLOCK) + [size % BLOCK] * (size % BLOCK > 0) for size in shape)
        for row in rows:
            for column in columns:
                blocks[min(row, column), max(row, column)] += count
    return blocks


def preconditioners(shape: Shape) -> float:
    """Bytes of the factors of a matrix' blocks and of their roots."""
    return float(
        sum(2 * FLOAT * count * (rows**2 + columns**2) for (rows, columns), count in blocks_of(Counter([shape])).items())
    )


def preconditioned(matrices: Matrices, ranks: int) -> list[Run]:
    """The kernels of one of `ranks` ranks among which blocks are dealt out. G of m × n: sums of G·Gᵀ and Gᵀ·G into the factors,
    and products with both roots, 4·m²·n + 4·m·n² FLOPs; of the roots the part of a step.
    """
    runs, roots = [], iterations() * PRODUCTS / FREQUENCY
    for (m, n), count in sorted(blocks_of(matrices).items()):
        sums, directions = ((m, m, n), (n, n, m)), ((m, n, m), (m, n, n))
        times = -(-count // ranks)
        factors = Kernel("memory", "shampoo factors", "optimizer", 0.0, 3.0 * FLOAT * (m**2 + n**2), "fp32")
        each = tuple(product("shampoo product", *size, "fp32") for size in (*sums, *directions))
        runs.append(Run(times, (*each, factors)))
        runs.append(Run(math.ceil(times * roots), tuple(product("shampoo root", size, size, size, "fp32") for size in (m, n))))
    return runs
