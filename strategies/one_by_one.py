"""DeepSpeed's ZeRO-3 of 2021 (0.3.13 to 0.5.4): parameters are gathered and gradients reduced one tensor at a time.

deepspeed/runtime/zero/stage3.py (PartitionedParameterCoordinator, PrefetchCoordinator, reduce_ipg_grads) and
partition_parameters.py (_allgather_param, _allgather_params, _reduce_scatter_gradient) of these releases, contiguous_gradients on:

* `torch.distributed.all_gather` and `reduce_scatter` over a list with a piece per rank. The host makes every piece, a view, and
  launches a copy of each between the list and the flat buffer that NCCL knows (torch 1.8, ProcessGroupNCCL.cpp): its time grows
  with tensors times ranks (`Collective.pieces`). The buffer is filled with zeros before.
* The host waits for the whole GPU (torch.cuda.synchronize) before each gather, and for the gathers of a module before it launches
  the module. The next parameters are gathered beside the module only when nothing is on its way and fewer than
  stage3_max_live_parameters are there, until there are stage3_prefetch_bucket_size of them: mostly one tensor.
* A recomputed layer gathers for its second forward pass, and again for its backward pass what that has released.
* Parameters that are never released are gathered in one list after the update, and copied from there piece by piece.

Since 0.6 (2022) each of these is one collective over flat buffers, and the host waits for events only: `strategies.prefetch`.
Its unit is a tensor; here passes are of parts: what is gathered ahead is beside the part before, not the tensor before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from sim.program import Collective, Memory, Op, Ref
from strategies.gathering import Gathering
from strategies.options import DeepSpeed
from strategies.stage import Stage

Tensor = tuple[int, int]  # number of its part, number in it


@dataclass
class Turn:
    """A pass of a part: sizes of the tensors that are gathered for it when they are needed, and ahead, beside what comes before;
    elements of the part that stay after it.
    """

    part: int
    needed: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    left: int = 0


def turns(parts: Sequence[Sequence[int]], again: Sequence[bool], limits: DeepSpeed) -> list[Turn]:
    """Turns of a forward pass over parts with tensors of these sizes, and of the backward pass.

    again: whether a part runs forward once more just before its backward pass.
    """
    count = len(parts)
    found = [Turn(part) for part in [*range(count), *reversed(range(count))]]
    trace: list[tuple[int, Tensor]] = []
    for number, turn in enumerate(found):
        order = [(turn.part, place) for place in range(len(parts[turn.part]))]
        uses = order if number < count else [*(order if again[turn.part] else ()), *reversed(order)]
        trace += [(number, tensor) for tensor in uses]
    coming = _distances(trace, parts)
    live: dict[Tensor, int] = {}
    flying: set[Tensor] = set()
    for now, (number, tensor) in enumerate(trace):
        if tensor not in live:
            found[number].needed.append(parts[tensor[0]][tensor[1]])
            live[tensor] = parts[tensor[0]][tensor[1]]
            flying.clear()  # the host waits for all that is on its way
        elif tensor in flying:
            flying.clear()
        if not flying and sum(live.values()) < limits.stage3_max_live_parameters:
            taken = 0
            for later, other in trace[now + 1 :]:
                if other not in live:
                    size = live[other] = parts[other[0]][other[1]]
                    flying.add(other)
                    found[later].ahead.append(size)
                    taken += size
                    if taken >= limits.stage3_prefetch_bucket_size:
                        break
        if coming[now] >= limits.stage3_max_reuse_distance:
            del live[tensor]
        found[number].left = sum(size for (part, _), size in live.items() if part == tensor[0])
    return found


def _distances(trace: Sequence[tuple[int, Tensor]], parts: Sequence[Sequence[int]]) -> list[float]:
    """Elements used between each use of a tensor and its next one; infinitely many after the last."""
    result, before, used = [inf] * len(trace), dict[Tensor, tuple[int, int]](), 0
    for now, (_, tensor) in enumerate(trace):
        if tensor in before:
            earlier, then = before[tensor]
            result[earlier] = used - then
        used += parts[tensor[0]][tensor[1]]
        before[tensor] = now, used
    return result


class OneByOne:
    """Gathers of a stage in turns."""

    def __init__(self, stage: Stage, gathering: Gathering) -> None:
        plan = stage.plan.plan
        self.stage, self.gathering = stage, gathering
        again = [plan.recompute == "full" and bool(part.recompute) for part in stage.parts]
        parts = [gathering.tensors(part) for part in range(len(stage.parts))]
        self.turns = turns(parts, again, gathering.options)
        self._works: dict[tuple[int, ...], Collective] = {}  # each distinct piece of work is priced once

    def passes(self, backward: bool, after: tuple[Ref, ...], compute: Callable[[int, tuple[Ref, ...]], Ref]) -> Ref:
        """Add the turns of a forward or of a backward pass. The host waits for each gather, and before it for everything."""
        count, overlap = len(self.stage.parts), self.stage.plan.plan.overlap
        for number in range(count, 2 * count) if backward else range(count):
            turn, gathers = self.turns[number], self.stage.last("dp")
            if turn.needed:
                gathers = self._gather(turn.needed, self._moving(number) - self._early(number))
            if number + 1 < len(self.turns) and self.turns[number + 1].ahead:
                self._gather(self.turns[number + 1].ahead, self._early(number + 1))
            ref = compute(turn.part, (*after, *((gathers,) if gathers else ())))
            self.stage.cohort.ops[ref.op].held = True
            if turn.needed or turn.ahead:
                self.gathering.filled(turn.part, sum(turn.needed + turn.ahead), ref, backward)
            after = () if overlap else tuple(self.stage.reduced[-1:])
        return ref

    def released(self, part: int, backward: bool) -> Memory:
        """What the part's pass gives back."""
        turn = self.turns[2 * len(self.stage.parts) - 1 - part if backward else part]
        gone = self.gathering.moving(part) - turn.left
        return (("temporary", gone * self.gathering.width(part)),) if gone else ()

    def _moving(self, number: int) -> int:
        """Elements for which a turn takes memory."""
        turn, count = self.turns[number], len(self.stage.parts)
        return self.gathering.moving(turn.part) - (self.turns[turn.part].left if number >= count else 0)

    def _early(self, number: int) -> int:
        """Of them, those that are gathered ahead."""
        return min(sum(self.turns[number].ahead), self._moving(number))

    def _gather(self, sizes: Sequence[int], taken: int) -> Ref:
        """Gather tensors of these sizes, for which so many elements more are held."""
        stage, plan, key = self.stage, self.stage.plan.plan, tuple(sizes)
        width = plan.bytes_per_element
        if key not in self._works:
            mean = sum(sizes) / len(sizes) * width
            self._works[key] = Collective("all_gather", mean, "dp", "parameters", plan.algorithm, len(sizes), width,
                                          along=stage.plan.sharing, pieces=stage.plan.shards)  # fmt: skip
        everything = tuple(ref for ref in (stage.last_compute(), stage.last("dp")) if ref is not None)
        return stage.add(Op("dp", self._works[key], everything, (("temporary", float(taken * width)),), held=True))
