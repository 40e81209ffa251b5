"""Gradients reduced by all-to-alls of 4-bit integers in two hops: ZeRO++'s qgZ, Wang et al. 2023, arXiv:2306.10209.

Ranks of a node exchange quantised gradients, each adds up its part in full precision and quantises the sum; the ranks with the
same place in all nodes exchange those: ½ byte per gradient leaves a node instead of 2. Quantising, adding up and turning back are
passes over memory on the compute stream, each behind the next pass of the model. Scales are left out. The groups of either hop
are communicators of their own (deepspeed/utils/groups.py, `_get_local_all_to_all_group`).
"""

from __future__ import annotations

from collections.abc import Iterator

from sim.program import COMPUTE, Block, Collective, Kernel, Memory, Op, Ref, Run
from strategies.lowering.stage import Stage

QUANTISED = 0.5  # bytes of a quantised gradient


class QuantisedReduction:
    """Reductions that are on their way."""

    def __init__(self) -> None:
        self._going: list[Iterator[None]] = []
        self._works: dict[tuple[str, float], Collective] = {}  # each distinct piece of work is priced once

    def reduce(self, stage: Stage, elements: int, completed: Ref) -> None:
        """Begin to reduce so many gradients; earlier reductions go on. Without overlap all of it happens now."""
        self._going = [reduction for reduction in self._going if next(reduction, True) is None]
        self._going.append(self._hops(stage, elements, completed))
        next(self._going[-1])
        if not stage.plan.overlap:
            self.finish()

    def finish(self) -> None:
        """Go on until everything is reduced."""
        while self._going:
            self._going = [reduction for reduction in self._going if next(reduction, True) is None]

    def _hops(self, stage: Stage, elements: int, completed: Ref) -> Iterator[None]:
        plan = stage.plan
        inner = plan.inner if plan.inner > 1 else plan.copies  # a node of one rank: all exchange at once
        outer = plan.copies // inner
        wide, own = plan.bytes_per_gradient, elements / inner
        narrow: Memory = (("temporary", QUANTISED * elements),)
        ref = _pass(stage, "quantise gradients", (wide + QUANTISED) * elements, completed, allocate=narrow)
        ref = self._exchange(stage, "dp", QUANTISED * elements, ref)
        yield
        if outer > 1:
            ref = _pass(stage, "add up gradients", QUANTISED * (elements + own), ref, free=narrow)
            ref, narrow = self._exchange(stage, "replica", QUANTISED * own, ref), ()
            yield
            elements = int(own)
        stage.reduced.append(_pass(stage, "add up gradients", QUANTISED * elements + wide * own / outer, ref, free=narrow))

    def _exchange(self, stage: Stage, axis: str, size: float, after: Ref) -> Ref:
        if (axis, size) not in self._works:
            algorithm = stage.plan.algorithm
            self._works[axis, size] = Collective("all_to_all", size, axis, "gradients", algorithm, 1, QUANTISED)
        return stage.add(Op(f"{axis} exchange", self._works[axis, size], (after,)))


def _pass(stage: Stage, label: str, moved: float, after: Ref, allocate: Memory = (), free: Memory = ()) -> Ref:
    kernel = Kernel("memory", label, "backward", 0.0, moved, stage.plan.precision)
    return stage.add(Op(COMPUTE, Block("backward", (Run(1, (kernel,)),)), (after,), allocate, free))
