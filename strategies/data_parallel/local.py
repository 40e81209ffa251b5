"""Local SGD and DiLoCo: dp ranks train by themselves for H = `plan.local_steps` steps, then agree.

A round of H steps is played, and the step that is reported is its mean: the volume is 2Ψ·(n−1)/n / H per step. What H does to
convergence is not simulated. The cp ranks of a dp rank work on the same sequences: they sum their gradients in every step.
"""

from __future__ import annotations

from functools import partial

from sim.program import COMPUTE, Block, Collective, Kernel, Memory, Op, Ref, Run
from strategies.data_parallel import hooks
from strategies.data_parallel.hook import Hook
from strategies.lowering.stage import Stage
from strategies.plan.plan import Plan
from topologies.reading import UserError

FLOAT = 4  # bytes of an outer momentum, and of a parameter's value at the start of the round


@hooks("local_sgd")
class LocalSGD(Hook):
    """Parameters are averaged after H steps. Stich 2018, arXiv:1805.09767. Optimizer states stay each rank's own."""

    local = True

    @classmethod
    def check(cls, plan: Plan, nodes: int, where: str) -> None:
        """Ranks that exchange tokens in every layer do not train by themselves."""
        if plan.ep_of_copies > 1:
            said = f"{where}: data_parallel={plan.data_parallel} with ep={plan.ep}"
            raise UserError(f"{said} is not simulated: dp ranks that share experts cannot train by themselves")

    def backward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], last: bool, weights_only: bool = False) -> Ref:
        """No gradient leaves its dp rank."""
        if stage.plan.cp == 1 or not last:
            return stage.whole_backward(microbatch, after, weights_only)
        return stage.backward_in_buckets(microbatch, after, partial(stage.reduce_bucket, "all_reduce"), weights_only)

    def update(self, stage: Stage) -> None:
        """Every rank updates its own parameters."""
        stage.update(1, tuple(stage.reduced))

    def synchronise(self, stage: Stage) -> None:
        """All-reduce the parameters in buckets."""
        if stage.plan.dp > 1:
            self._all_reduce(stage, "parameters")

    def _all_reduce(self, stage: Stage, label: str) -> Ref:
        """The buckets of gradients, of parameters: one all-reduce each."""
        plan, ref = stage.plan, stage.last_compute()
        assert ref is not None
        for bucket in stage.buckets():
            size = float(bucket.elements * plan.bytes_per_element)
            all_reduce = Collective("all_reduce", size, "dp", label, plan.algorithm, 1, plan.bytes_per_element)
            ref = stage.add(Op("dp", all_reduce, (ref,), *2 * (self._beside(stage, size),)))
        return ref

    def _beside(self, stage: Stage, size: float) -> Memory:
        """What is there while ranks agree: a flat copy of a bucket of whole parameters, and the last step's gradients, which
        nothing frees before the next backward pass (torch 2.13, PostLocalSGDOptimizer.step averages right after the update).
        """
        kept = stage.parameters * stage.plan.bytes_of_states["gradient"] if stage.plan.frees_gradients else 0
        return ("buffer", size), ("gradient", float(kept))


@hooks("diloco")
class DiLoCo(LocalSGD):
    """The mean change of the parameters is the gradient of an outer Nesterov momentum. Douillard et al. 2023, arXiv:2311.08105.

    Each rank keeps the parameters of the start of the round and the outer momentum, in fp32: 8 bytes per parameter more.
    """

    outer = 2 * FLOAT

    def synchronise(self, stage: Stage) -> None:
        """Subtract, all-reduce, update: passes over memory of start and weight; of change, start, momentum and weight."""
        if stage.plan.dp == 1:
            return
        width = stage.plan.bytes_per_element
        stage.add(Op(COMPUTE, self._pass(stage, "outer gradient", FLOAT + 2 * width)))
        reduced = self._all_reduce(stage, "outer gradients")
        stage.add(Op(COMPUTE, self._pass(stage, "outer update", 2 * width + 4 * FLOAT), (reduced,)))

    def _pass(self, stage: Stage, label: str, width: int) -> Block:
        kernel = Kernel("optimizer", label, "optimizer", 0.0, width * stage.parameters, "fp32")
        return Block("optimizer", (Run(1, (kernel,)),))
