"""Muon: the momentum of every matrix is made orthogonal before it is added."""

from __future__ import annotations

from sim.program import Kernel, Run
from strategies.optimizers import FLOAT, Matrices, OfMatrices, Optimizer, optimizers, product

ITERATIONS = 5


@optimizers("muon")
def muon() -> Optimizer:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon): momentum, then five Newton–Schulz
    iterations in bf16 on each matrix between embedding and head; Adam updates the rest.

    Ranks that shard its states orthogonalise whole matrices each (Liu et al. 2025, arXiv:2502.16982, section 2.3); what they
    exchange of matrices that lie on two of them is left out.
    """
    operators = (("decay", 2), ("momentum scale", 2), ("momentum", 3), ("nesterov", 3), ("update", 3))
    whole = OfMatrices(does="orthogonalises whole matrices", kernels=orthogonalised, rest=FLOAT)
    return Optimizer(states=FLOAT, operators=operators, fused=False, of_matrices=whole)


def orthogonalised(matrices: Matrices, ranks: int) -> list[Run]:
    """The kernels of one of `ranks` ranks among which matrices are dealt out. X of m × n with m ≤ n: A = X·Xᵀ, then b·A + c·A·A,
    then a·X + that · X: 4·m²·n + 2·m³ FLOPs an iteration; a cast and a norm before.
    """
    runs = []
    for (rows, columns), count in sorted(matrices.items()):
        before = (_memory("cast", (FLOAT + 2) * rows * columns), _memory("norm", 3 * 2 * rows * columns))
        sizes = ((rows, rows, columns), (rows, rows, rows), (rows, columns, rows))
        each = tuple(product("muon product", *size, "bf16") for size in sizes)
        runs.append(Run(-(-count // ranks), (*before, *each * ITERATIONS)))
    return runs


def _memory(name: str, moved: float) -> Kernel:
    return Kernel("memory", f"muon {name}", "optimizer", 0.0, float(moved), "bf16")
