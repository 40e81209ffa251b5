"""Muon: the momentum of every matrix is made orthogonal before it is added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sim.program import Kernel, Run
from strategies.optimizers import FLOAT, Optimizer, optimizers

Shape = tuple[int, ...]


@optimizers("muon")
def muon() -> Optimizer:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon): momentum, then five Newton–Schulz
    iterations in bf16 on each matrix between embedding and head; Adam updates the rest.

    Ranks that shard its states orthogonalise whole matrices each (Liu et al. 2025, arXiv:2502.16982, section 2.3); what they
    exchange of matrices that lie on two of them is left out.
    """
    operators = (("decay", 2), ("momentum scale", 2), ("momentum", 3), ("nesterov", 3), ("update", 3))
    return Optimizer(states=FLOAT, operators=operators, fused=False, iterations=5)


def matrices_of(gradients: Iterable[Shape]) -> Counter[Shape]:
    """How many matrices there are of each shape, the smaller size first."""
    sizes = ((min(shape), max(shape)) for shape in gradients if len(shape) == 2)
    return Counter(sizes)


def orthogonalised(matrices: Counter[Shape], iterations: int, ranks: int) -> list[Run]:
    """The kernels of one of `ranks` ranks among which matrices are dealt out. X of m × n with m ≤ n: A = X·Xᵀ, then b·A + c·A·A,
    then a·X + that · X: 4·m²·n + 2·m³ FLOPs an iteration; a cast and a norm before.
    """
    runs = []
    for (rows, columns), count in sorted(matrices.items()):
        before = (_memory("cast", (FLOAT + 2) * rows * columns), _memory("norm", 3 * 2 * rows * columns))
        each = (_product(rows, rows, columns), _product(rows, rows, rows), _product(rows, columns, rows))
        runs.append(Run(-(-count // ranks), (*before, *each * iterations)))
    return runs


def _memory(name: str, moved: float) -> Kernel:
    return Kernel("memory", f"muon {name}", "optimizer", 0.0, float(moved), "bf16")


def _product(m: int, n: int, k: int) -> Kernel:
    return Kernel("gemm", "muon product", "optimizer", 2.0 * m * n * k, 2.0 * (m * k + k * n + 2 * m * n), "bf16", (1, m, n, k))
