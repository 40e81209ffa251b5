"""DDP whose gradients travel as products of two thin matrices. Vogels et al. 2019, arXiv:1905.13727.

github.com/pytorch/pytorch torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py, `powerSGD_hook` after its first, plain
iterations. Of each bucket: vectors, and matrices too small to gain, are all-reduced as they are; of every other n × m gradient M
the n × r matrix P = MQ is all-reduced and orthogonalised, the m × r matrix Q = MᵀP is all-reduced, and the gradient is PQᵀ. With
error feedback what was lost is added to the next gradient: a copy of all gradients stays, and one of the bucket is kept on the
way. A step sends 2 (Σ uncompressed + Σ (n + m) r) · (copies − 1)/copies elements.

The hook's kernels run on the compute stream: of one bucket those before the sums of P and Q when the next bucket's gradients are
made, those after when the one after that's are. Not simulated: that the hook makes the host wait for the GPU in every bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sim.program import COMPUTE, Block, Kernel, Memory, Op, Ref, Run
from strategies.data_parallel import hooks
from strategies.data_parallel.buckets import Bucket
from strategies.data_parallel.ddp import DDP
from strategies.data_parallel.hook import Moves
from strategies.layers.weight_matrices import Matrix, size
from strategies.lowering.stage import Stage
from strategies.plan.options import PowerSGD
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.reading import UserError

Shaped = Callable[[int, int, int], tuple[int, int, int]]


@hooks("ddp_powersgd")
class PowerSGDDDP(DDP):
    """DDP that all-reduces low-rank approximations of gradients, with error feedback."""

    framework_buckets = whole_gradients = asynchronous = blocks = False
    powersgd = True

    @classmethod
    def check(cls, plan: Plan, nodes: int, where: str) -> None:
        """Only gradients that all ranks share are compressed."""
        if plan.ep_of_copies > 1:
            raise UserError(
                f"{where}: data_parallel=ddp_powersgd does not compress gradients of experts that are spread over ep={plan.ep}"
            )

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """How much depends on the shapes of all matrices; bounds leave it out."""
        return Moves()

    def resident(self, stage: Stage) -> Memory:
        """What the hook keeps from step to step: the errors, and with a warm start P and Q."""
        options = _options(stage)
        kept = stage.parameters if options.use_error_feedback else 0
        if options.warm_start:
            kept += sum(_Bucket.of(stage, bucket).thin for bucket in stage.buckets())
        own = (("buffer", float(kept * stage.plan.bytes_per_gradient)),) if stage.plan.copies > 1 else ()
        return super().resident(stage) + own

    def backward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], last: bool, weights_only: bool = False) -> Ref:
        """Each bucket goes through the hook's three parts while later ones are made; without overlap, all at the end."""
        if stage.plan.copies == 1 or not last:
            return stage.whole_backward(microbatch, after, weights_only)
        going: list[Iterator[None]] = []

        def reduce(bucket: Bucket, completed: Ref) -> None:
            self.fill(stage, bucket, completed)
            going[:] = [hook for hook in going if next(hook, True) is None]
            going.append(self._hook(stage, _Bucket.of(stage, bucket), completed))
            next(going[-1])
            if not stage.plan.overlap:
                list(going.pop())

        ref = stage.backward_in_buckets(microbatch, after, reduce, weights_only)
        while going:
            going = [hook for hook in going if next(hook, True) is None]
        return ref

    def _hook(self, stage: Stage, bucket: _Bucket, completed: Ref) -> Iterator[None]:
        """The hook of one bucket; between its parts it waits for the network."""
        width = stage.plan.bytes_per_gradient

        def compute(kernels: list[Kernel], after: tuple[Ref, ...], allocate: Memory = (), free: Memory = ()) -> Ref:
            return stage.add(Op(COMPUTE, Block("backward", (Run(1, tuple(kernels)),)), after, allocate, free))

        def reduce(elements: float, after: Ref) -> Ref:
            return stage.reduce("all_reduce", elements * width, 1, (after,)) if elements else after

        kept: Memory = (("temporary", float(bucket.elements * width)),) if bucket.feedback else ()
        begun = compute(bucket.before(), (completed,), kept)
        plain, p = reduce(bucket.plain, begun), reduce(bucket.rows, begun)
        yield
        summed = compute(bucket.between(), (p,)) if bucket.thin else p
        q = reduce(bucket.columns, summed)
        yield
        stage.reduced.append(compute(bucket.after(), (plain, q), (), kept))


@dataclass(frozen=True)
class _Bucket:
    """What the hook does to a bucket of `elements` gradients: compressed matrices as (shape, rank) → how many."""

    compressed: dict[tuple[Matrix, int], int] = field(hash=False)
    elements: int
    width: int
    dtype: str
    feedback: bool
    warm: bool

    @classmethod
    def of(cls, stage: Stage, bucket: Bucket) -> _Bucket:
        """What the plan says of it."""
        plan, options = stage.plan, _options(stage)
        compressed: dict[tuple[Matrix, int], int] = {}
        for n, m in ((shape[0], math.prod(shape[1:])) for shape in bucket.shapes if len(shape) > 1):
            rank = min(n, m, options.matrix_approximation_rank)
            if (n + m) * rank * options.min_compression_rate < n * m:
                compressed[(n, m), rank] = compressed.get(((n, m), rank), 0) + 1
        return cls(
            compressed, bucket.elements, plan.bytes_per_gradient, plan.precision, options.use_error_feedback, options.warm_start
        )

    @property
    def plain(self) -> int:
        """Elements that are reduced as they are."""
        return self.elements - size({shape: count for (shape, _), count in self.compressed.items()})

    @property
    def rows(self) -> int:
        """Elements of all P."""
        return sum(n * rank * count for ((n, _), rank), count in self.compressed.items())

    @property
    def columns(self) -> int:
        """Elements of all Q."""
        return sum(m * rank * count for ((_, m), rank), count in self.compressed.items())

    @property
    def thin(self) -> int:
        """Elements of both."""
        return self.rows + self.columns

    def before(self) -> list[Kernel]:
        """Add the error, keep a copy, gather what is not compressed; orthogonalise Q, multiply P = MQ."""
        moved = (5 * self.elements if self.feedback else 0) + 2 * self.plain
        added = [self._pass("error feedback", moved)] if moved else []
        return [*added, *self._orthogonal("Q", 1), *self._products("P", lambda n, m, rank: (n, rank, m))]

    def between(self) -> list[Kernel]:
        """Orthogonalise P, multiply Q = MᵀP."""
        return [*self._orthogonal("P", 0), *self._products("Q", lambda n, m, rank: (m, rank, n))]

    def after(self) -> list[Kernel]:
        """Multiply PQᵀ, put back what was not compressed, note the error."""
        moved = 2 * self.plain + (3 * self.elements if self.feedback else 0)
        last = [self._pass("compression error", moved)] if moved else []
        return [*self._products("gradient", lambda n, m, rank: (n, m, rank)), *last]

    def _pass(self, label: str, elements: float) -> Kernel:
        return Kernel("memory", f"PowerSGD {label}", "backward", 0.0, float(elements * self.width), self.dtype)

    def _products(self, label: str, shaped: Shaped) -> list[Kernel]:
        """A product per matrix; equal shapes are one batched product, as the hook does by default."""
        result = []
        for ((rows, columns), rank), count in self.compressed.items():
            m, n, k = shaped(rows, columns, rank)
            moved = float(self.width * count * (m * k + k * n + m * n))
            flops, dtype = 2.0 * count * m * n * k, "fp32" if self.width == 4 else self.dtype
            # a matrix by a vector is bound by memory: cuBLAS has a kernel for it (github.com/ROCm/rocBLAS/issues/1238)
            kind, shape = ("memory", ()) if n == 1 else ("gemm", (count, m, n, k))
            result.append(Kernel(kind, f"PowerSGD {label}", "backward", flops, moved, dtype, shape))
        return result

    def _orthogonal(self, label: str, side: int) -> list[Kernel]:
        """Gram-Schmidt of tall matrices: each column is read and written to normalise it, and taken from all later ones, which
        are read, and read and written: 3r(r + 1)/2 passes over a column. Assumed also for the QR of fp32.
        """
        moved = sum(shape[side] * count * 1.5 * rank * (rank + 1) for (shape, rank), count in self.compressed.items())
        return [self._pass(f"orthogonalisation of {label}", moved)] if moved else []


def _options(stage: Stage) -> PowerSGD:
    return stage.plan.powersgd or PowerSGD.model_validate({})
