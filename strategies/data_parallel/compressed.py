"""DDP whose gradients travel in 16 bits: half the bytes of fp32 gradients.

github.com/pytorch/pytorch torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py, `fp16_compress_hook`: each bucket is cast
into a 16-bit copy, which is divided by the number of ranks, all-reduced, and copied back. These are passes over memory on the
compute stream; here the way back is one pass before the update, where PyTorch has one per bucket beside the backward pass.
bf16_compress_hook costs the same.
"""

from __future__ import annotations

from sim.program import COMPUTE, Block, Kernel, Memory, Op, Ref, Run
from strategies.data_parallel import hooks
from strategies.data_parallel.buckets import Bucket
from strategies.data_parallel.ddp import DDP
from strategies.data_parallel.hook import Moves
from strategies.lowering.stage import Stage
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.reading import UserError

WIDTH = 2  # bytes of an element on its way


@hooks("ddp_fp16")
class CompressedDDP(DDP):
    """DDP that casts each bucket to 16 bits, all-reduces it and casts it back."""

    framework_buckets = whole_gradients = asynchronous = blocks = False

    @classmethod
    def check(cls, plan: Plan, nodes: int, where: str) -> None:
        """Only wider gradients that all ranks share can be compressed."""
        if plan.ep_of_copies > 1:
            raise UserError(
                f"{where}: data_parallel=ddp_fp16 does not compress gradients of experts that are spread over ep={plan.ep}"
            )
        if plan.bytes_per_gradient <= WIDTH:
            has = f"precision={plan.precision}, gradients={plan.gradients}"
            raise UserError(f"{where}: data_parallel=ddp_fp16 halves gradients of 4 bytes, and they have 2 ({has})")

    @classmethod
    def moves(cls, plan: Resolved) -> Moves:
        """An all-reduce of 16-bit gradients."""
        return Moves(WIDTH, WIDTH, late=True)

    def update(self, stage: Stage) -> None:
        """Cast back, then update."""
        if stage.plan.copies > 1:
            stage.add(Op(COMPUTE, self._cast(stage, stage.parameters, "optimizer"), tuple(stage.reduced)))
        super().update(stage)

    def reduce(self, stage: Stage, bucket: Bucket, completed: Ref) -> None:
        """Cast a bucket, and all-reduce it."""
        self.fill(stage, bucket, completed)
        size = float(WIDTH * bucket.elements)
        copy: Memory = (("temporary", size),)
        work = self._cast(stage, bucket.elements, "backward", averaged=True)
        cast = stage.add(Op(COMPUTE, work, (completed,), copy))
        stage.reduce("all_reduce", size, 1, (cast,), free=copy, width=WIDTH)

    def _cast(self, stage: Stage, elements: float, phase: str, averaged: bool = False) -> Block:
        """Read one type, write the other; and divide that by the number of ranks."""
        traffic = {"gradient cast": stage.plan.bytes_per_gradient + WIDTH} | ({"gradient average": 2 * WIDTH} if averaged else {})
        kernels = (Kernel("memory", name, phase, 0.0, float(each * elements), "fp32") for name, each in traffic.items())
        return Block(phase, (Run(1, tuple(kernels)),))
