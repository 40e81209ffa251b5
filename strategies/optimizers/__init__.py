"""Optimizers: what each keeps per parameter, and what its update runs. A function in a file of this folder is one more.

An update is priced by the bytes that it moves (and Muon's and Shampoo's by their products): in one kernel where frameworks have
one, otherwise an operator at a time, as PyTorch's single-tensor loops and, with as many bytes, its foreach kernels run it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from sim.program import Kernel, Run
from topologies.registry import Registry

FLOAT = 4  # bytes of fp32
Shape = tuple[int, ...]
Matrices = Counter[Shape]  # how many there are of each shape, the smaller size first


def matrices_of(gradients: Iterable[Shape]) -> Matrices:
    """The matrices among gradients."""
    return Counter((min(shape), max(shape)) for shape in gradients if len(shape) == 2)


def product(label: str, m: int, n: int, k: int, dtype: str) -> Kernel:
    """A product of (m, k) by (k, n) in an update, of operands of 16 bits or in fp32."""
    width = FLOAT if dtype == "fp32" else 2
    moved = float(width * (m * k + k * n + 2 * m * n))
    return Kernel("gemm", label, "optimizer", 2.0 * m * n * k, moved, dtype, (1, m, n, k))


@dataclass(frozen=True, kw_only=True)
class OfMatrices:
    """What an optimizer runs on every matrix between embedding and head, whole, and what it keeps of it."""

    does: str  # to whole matrices: "orthogonalises whole matrices"
    kernels: Callable[[Matrices, int], list[Run]]  # of one of so many ranks among which the matrices are dealt out
    states: Callable[[Shape], float] = lambda shape: 0.0  # bytes of a matrix besides those of each parameter
    rest: int = 0  # bytes per parameter that Adam, which updates all else, keeps more there


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What an optimizer keeps and runs for each parameter; masters of 16-bit weights are not among its states."""

    states: float  # bytes
    operators: tuple[tuple[str, int], ...]  # of an update in operators: name, fp32 numbers read and written
    fused: bool = True  # frameworks have the update in one kernel
    after: tuple[tuple[str, int], ...] = ()  # kernels after that one: name, bytes read and written
    whole_tensors: bool = False  # sums over whole tensors are part of it, which flat shards of them do not have
    of_matrices: OfMatrices | None = None


optimizers: Registry[Callable[[], Optimizer]] = Registry("optimizer", package="strategies.optimizers")


@lru_cache(maxsize=64)
def optimizer_called(name: str) -> Optimizer:
    """The optimizer of that name. Raises UserError for an unknown one."""
    return optimizers[name]()
