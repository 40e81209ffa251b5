"""The passes of a pipeline's ranks, in the schedule's order, and the transfers of their results between stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import zip_longest

from sim.program import COMPUTE, PIPELINE_PASS, Block, Cohort, Collective, Kernel, Op, Ref, Send
from strategies.data_parallel.hook import Hook
from strategies.layers.layer_cost import LayerCost
from strategies.lowering.blocks import called, taking_turns
from strategies.lowering.stage import Stage
from strategies.plan.resolved import Resolved
from strategies.schedules import actions
from strategies.schedules.order import Action, Schedule

MAXIMUM = 4.0  # bytes of a tensor's, in fp32
STEPS = 4  # of an asynchronous schedule: two fill the pipeline and settle, the third is the answer, the fourth keeps it full
Key = tuple[str, int, int]  # "F" or "B", virtual stage, microbatch


def _in_fp8(part: LayerCost) -> int:
    """Matrices of a part that are multiplied in fp8."""
    products = (item for item in part.forward if isinstance(item, Kernel) and item.kind == "gemm" and item.dtype == "fp8")
    return len({product.label for product in products})


@dataclass
class Flow:
    """Stages of all ranks, what their passes wait for, and where results are."""

    plan: Resolved
    hook: Hook
    schedule: Schedule
    stages: dict[int, Stage]
    waits: list[tuple[Op, Key]] = field(default_factory=list)
    results: dict[Key, Ref] = field(default_factory=dict)  # the transfer, or on the same rank the pass, that makes them available
    asked: dict[Key, Ref] = field(default_factory=dict)  # the pass after which the receiver asks for a result, where it asks late
    ended: dict[int, Ref] = field(default_factory=dict)  # the latest backward pass of a stage
    pairs: dict[tuple[int, int, str], Block] = field(default_factory=dict)

    def neighbour(self, stage: Stage, step: int) -> Stage | None:
        """The stage after (1) or before (−1), of the same copy of the model."""
        other, count = stage.number + step, len(self.plan.layers)
        return self.stages[other] if other // count == stage.number // count else None

    def connect(self) -> None:
        """Let passes wait for the results that they need."""
        for op, key in self.waits:
            op.after = (*op.after, self.results[key])
        for key, before in self.asked.items():
            rank, number = self.results[key]
            if rank != before.cohort:
                sending = self.stages[key[1]].cohort.ops[number]
                sending.after = (*sending.after, before)
        self.waits.clear()
        self.asked.clear()


class Passes:
    """One rank's passes being added to its cohort."""

    def __init__(self, flow: Flow, rank: int, cohort: Cohort, sizes: dict[int, float]) -> None:
        self.flow, self.rank, self.cohort, self.ops, self.plan = flow, rank, cohort, cohort.ops, flow.plan
        self.total = flow.plan.microbatches * (STEPS if flow.schedule.versions else 1)
        self.order = actions(flow.plan.schedule, rank, flow.plan.pp, self.total, flow.plan.chunks)
        self.left = dict.fromkeys(range(flow.plan.chunks), 0)  # backward passes still to come
        for action in self.order:
            self.left[action.chunk] += action.kind in "BW"
        self.mine = [flow.stages[flow.schedule.stage(rank, flow.plan.pp, chunk)] for chunk in range(flow.plan.chunks)]
        self.near = {(stage.number, step): flow.neighbour(stage, step) for stage in self.mine for step in (-1, 1)}
        self.sends = self._sends(sizes)
        self.maxima = self._maxima()
        self.ends: list[int] = []  # of steps
        self.held_up: tuple[Ref, ...] = ()  # what the next pass waits for
        plan = self.plan
        self.every = 1 if flow.schedule.every_microbatch else plan.microbatches  # backward passes of a chunk between its updates
        framework = plan.kernel_set if plan.deepspeed is None else None
        self.asks_late = framework is not None and plan.schedule in framework.asks_late
        self.waits_for_sends = framework is not None and plan.schedule in framework.waits_for_sends
        self.gathers_wait = flow.hook.gathers_wait(plan)
        waits = plan.kernel_set.waits_before_passes or (plan.pp > 1 and not plan.overlap_p2p)
        self.host_waits = waits and not plan.kernel_set.graphed

    def add(self) -> None:
        """Add every pass, each with the transfer of its result to the next stage."""
        before: tuple[Action, int, Ref] | None = None  # the first pass of a pair
        for action, following in zip_longest(self.order, self.order[1:]):
            position = len(self.ops)
            self.cohort.passes.append(position)
            stage, ref, last = self._pass(action)
            if before is not None:
                earlier, ref = self._turns(*before, action, position, ref)
                self._send(before[0], self._stage(before[0]), self._agree(before[0], self._stage(before[0]), earlier))
            if action.beside:
                before = action, position, ref
                continue
            before = None
            self._send(action, stage, self._agree(action, stage, ref), following)
            if self.flow.schedule.versions and action.kind == "B" and last:
                self.flow.hook.update(stage)
                stage.reduced.clear()
                if not self.left[action.chunk] % self.plan.microbatches:
                    self.ends.append(len(self.ops))
        if self.flow.schedule.versions:
            self.cohort.steady = self.ends[STEPS - 3], self.ends[STEPS - 2]

    def _stage(self, action: Action) -> Stage:
        return self.mine[action.chunk]

    def _pass(self, action: Action) -> tuple[Stage, Ref, bool]:
        """Add a pass; (its stage, the op that ends it, whether it is the last one back before an update)."""
        flow, ops, (kind, microbatch, chunk, _) = self.flow, self.ops, action
        stage, position, last = self.mine[chunk], len(ops), False
        held_up, self.held_up = self.held_up, ()
        before = stage.last_compute() if self.asks_late else None
        if kind == "F":
            ref = flow.hook.forward(stage, microbatch, held_up)
        elif kind == "I":
            ref = flow.hook.input_gradient(stage, microbatch, held_up)
        else:
            self.left[chunk] -= 1
            last = not self.left[chunk] % self.every
            ref = flow.ended[stage.number] = flow.hook.backward(stage, microbatch, held_up, last, kind == "W")
            # without overlap the next pass waits for the gradients that this one reduces
            self.held_up = () if self.plan.overlap else tuple(stage.reduced[-1:])
        if kind != "W":
            while ops[position].stream != COMPUTE and not self.gathers_wait:  # gathers go ahead of what the stage before sends
                position += 1
            source = self.near[stage.number, -1 if kind == "F" else 1]
            if source is not None:
                key = "F" if kind == "F" else "B", source.number, microbatch
                flow.waits.append((ops[position], key))
                if before is not None:
                    flow.asked[key] = before
            if self.host_waits:
                ops[position].held = True
        return stage, ref, last

    def _agree(self, action: Action, stage: Stage, ref: Ref) -> Ref:
        """Let ranks agree on the maxima of a pass (see `strategies.layers.fp8`), before anything that waits for it begins; the op
        that ends it.
        """
        work = self.maxima.get(action.kind)
        if work is None:
            return ref
        ref = stage.add(Op("fp8 maxima", work, (ref,), microbatch=action.microbatch))
        self.held_up += (ref,)
        return ref

    def _send(self, action: Action, stage: Stage, ref: Ref, following: Action | None = None) -> None:
        """Pass the result on. following: the next pass, which waits for that where the transfer is one with its receive."""
        if action.kind == "W":
            return
        way = "F" if action.kind == "F" else "B"
        sending = self.sends.get((way, stage.number))
        if sending is not None:
            stream, send = sending
            ref = stage.add(Op(stream, send, (ref,), microbatch=action.microbatch))
            joint = self.waits_for_sends and following is not None and following.kind != action.kind
            self.held_up += (ref,) if joint or not self.plan.overlap_p2p else ()
        self.flow.results[way, stage.number, action.microbatch] = ref

    def _turns(self, first: Action, start: int, ended: Ref, second: Action, position: int, ref: Ref) -> tuple[Ref, Ref]:
        """Make one op of two passes, if each is one; (the op that ends the first, the one that ends the second)."""
        if len(self.ops) - position != 1 or position - start != 1:
            return ended, ref
        other, op = self.ops.pop(), self.ops[start]
        forward, backward = (first, second) if first.kind == "F" else (second, first)
        there, back = self._stage(forward), self._stage(backward)
        key = there.number, back.number, backward.kind
        if key not in self.flow.pairs:
            pair = taking_turns(there.parts, back.parts, full=backward.kind == "B")
            if there.piped:
                pair = replace(pair, runs=called(called(pair.runs, PIPELINE_PASS), PIPELINE_PASS))
            self.flow.pairs[key] = pair
        op.work, op.after = self.flow.pairs[key], op.after + other.after
        op.allocate, op.free = op.allocate + other.allocate, op.free + other.free
        if self.flow.waits and self.flow.waits[-1][0] is other:  # what the second one waits for was noted last
            self.flow.waits[-1] = op, self.flow.waits[-1][1]
        if self.flow.ended.get(back.number) == ref:
            self.flow.ended[back.number] = ended
        return ended, ended

    def _maxima(self) -> dict[str, Collective]:
        """By kind of pass, what ranks agree on its maxima with: one object each."""
        plan, fp8 = self.plan, self.plan.fp8
        if fp8 is None or fp8.scaling != "delayed" or fp8.amax_reduction == "none":
            return {}
        among = [axis for axis, degree in plan.grid.sizes if degree > 1 and axis != "pp"]
        if fp8.amax_reduction == "tp":
            among = [axis for axis in among if axis in ("tp", *plan.attending)]
        products = sum(_in_fp8(part) for stage in self.mine for part in stage.parts)
        if not among or not products:
            return {}
        axis = "dp" if "dp" in among else among[-1]
        sizes = {"F": 3 * MAXIMUM * products, "B": 2 * MAXIMUM * products, "I": 2 * MAXIMUM * products}
        return {
            kind: Collective("all_reduce", size, axis, "fp8 maxima", plan.algorithm, 1, MAXIMUM, along=tuple(among))
            for kind, size in sizes.items()
        }

    def _sends(self, sizes: dict[int, float]) -> dict[tuple[str, int], tuple[str, Send]]:
        """(direction, virtual stage) -> stream and send; one object each: every distinct piece of work is priced once. sizes:
        bytes of a microbatch that each stage is given, whose gradient it gives back.
        """
        result, width = {}, self.plan.bytes_per_element
        for stage in self.mine:
            for way, step, stream, label in (("F", 1, "pp next", "activations"), ("B", -1, "pp previous", "gradients")):
                target = self.near[stage.number, step]
                if target is not None and target.rank != self.rank:
                    size = sizes[target.number if way == "F" else stage.number]
                    part = size / self.plan.tp if self.plan.splits(way) else size
                    result[way, stage.number] = stream, Send(part, target.rank, label, width=width)
        return result
