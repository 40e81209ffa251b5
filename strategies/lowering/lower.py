"""From model, plan and cluster to a program: layer work × schedule × data parallel hook."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from sim.program import Cohort, Collective, Memory, Op, Program
from strategies.data_parallel.hook import hook_of
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import ModelCosts, parts
from strategies.lowering.allotments import merged, with_last
from strategies.lowering.optimizer_step import states_beside
from strategies.lowering.pipeline import Flow, Passes
from strategies.lowering.stage import Stage, in_buckets
from strategies.models.model import Model
from strategies.plan.resolved import Resolved
from strategies.schedules import schedules


def lower(model: Model, plan: Resolved, microbatches: int | None = None) -> Program:
    """The program of one training step, or of a step that has only so many of its microbatches, each as in the whole step: FLOPs
    and tokens are then of the whole step.
    """
    if plan.dealt and microbatches is None:
        return _unevenly(model, plan)
    work = parts(model, plan)
    model_flops, hardware_flops = _flops(work, plan)
    played = plan if microbatches is None else plan.with_microbatches(microbatches)
    program = hook_of(plan.data_parallel).for_plan(played).program(model, played, work)
    if program is None:
        program = _Lowering(model, played, work, plan.microbatches).program()
    masked = _masked_flops(model, plan, model_flops)
    return replace(
        program,
        tokens=program.tokens if microbatches is None else float(plan.global_batch * plan.sequence),
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        masked_flops=masked,
        eager=not plan.kernel_set.compiled,
        launching=plan.kernel_set.launching,
        blocking=plan.options.blocking_launches,
        graphed=plan.kernel_set.graphed,
        expandable=plan.options.expandable_segments,
    )


def given_of(model: Model, plan: Resolved) -> float:
    """Bytes of a microbatch that a stage is given by the one before it, where all blocks are given the same."""
    size = plan.microbatch * (plan.sequence // plan.cp) * model.hidden * plan.bytes_per_element
    return size // plan.tp if plan.sequence_parallel else size  # each tp rank holds, and sends, its part of the sequence


def _unevenly(model: Model, plan: Resolved) -> Program:
    """The program of a step in which dp ranks have different numbers of microbatches, or last ones that are not full."""
    kinds = sorted(set(plan.dealt))
    programs = [_ending(model, plan.with_microbatches(count), last) for count, last in kinds]
    flops = _flops(parts(model, plan), plan)
    return replace(
        merged(programs, [kinds.index(each) for each in plan.dealt], plan) if len(kinds) > 1 else programs[0],
        tokens=float(plan.global_batch * plan.sequence),
        model_flops=flops[0],
        hardware_flops=flops[1],
        masked_flops=_masked_flops(model, plan, flops[0]),
    )


def _ending(model: Model, plan: Resolved, last: int) -> Program:
    """The program of a step whose last microbatch has `last` sequences."""
    shorter = lower(model, plan.with_fields(plan, {"microbatch": last}))
    if plan.microbatches == 1 or last == plan.microbatch:
        return shorter
    return with_last(lower(model, plan), shorter, plan.microbatches - 1)


class _Lowering:
    """Stages of all ranks, and what each pass of them waits for. microbatches: of the whole step."""

    def __init__(self, model: Model, plan: Resolved, work: ModelCosts, microbatches: int) -> None:
        self.microbatches = microbatches
        self.plan, self.hook = plan, hook_of(plan.data_parallel).for_plan(plan)
        self.model, self.schedule = model, schedules[plan.schedule]
        ranks = plan.pp
        self.cohorts = [Cohort({"pp": rank}) for rank in range(ranks)]
        self.stages: dict[int, Stage] = {}
        places = [(rank, chunk, self.schedule.stage(rank, ranks, chunk)) for rank in range(ranks) for chunk in range(plan.chunks)]
        self.rank_of = {number: rank for rank, _, number in places}
        for rank, chunk, number in places:
            chosen, alike = self._parts(work, number)
            self.stages[number] = Stage(number, rank, chunk, self.cohorts[rank], chosen, plan, model, alike)
        self.last = len(plan.layers) - 1
        # a head's stage that uses the embedding's matrix has a copy of it when no stage of its rank has the embedding
        self.tied = bool(work.tied) and self.stages[0].rank != self.stages[self.last].rank and self.schedule.copies == 1
        if self.tied and work.tied_is_frozen:
            self.stages[self.last].tied_frozen, self.tied = work.tied, False
        if self.tied:
            self.stages[self.last].tied, self.stages[0].shared_embedding = work.tied, True
        self.handed_on = work.handed_on
        self.flow = Flow(plan, self.hook, self.schedule, self.stages)
        self.buffers: dict[int, Memory] = {}  # of pipeline ranks: held for transfers

    def _parts(self, work: ModelCosts, stage: int) -> tuple[list[LayerCost], dict[Hashable, Any]]:
        """The parts of a stage, and what it has in common with stages that are alike."""
        own, last = self.rank_of[stage], len(self.plan.layers) - 1
        number = stage % len(self.plan.layers)  # of a second copy of the model
        first, count = sum(self.plan.layers[:number]), self.plan.layers[number]
        received = bool(number) and self.rank_of[stage - 1] != own
        returned = number < last and self.rank_of[stage + 1] != own
        key = work.kinds[first : first + count], number == 0, number == last, received, returned
        if key not in work.stages:
            chosen = [
                *([work.embedding] if number == 0 else []),
                *work.stage(first, count),
                *([work.head] if number == last else []),
            ]
            ahead = work.batch + (work.received if received else ())
            if ahead and chosen:
                chosen[0] = replace(chosen[0], forward=ahead + chosen[0].forward)
            if work.returned and returned and chosen:
                end, back = chosen[-1], work.returned
                chosen[-1] = replace(end, backward=back + end.backward, input_gradient=back + end.input_gradient)
            work.stages[key] = chosen, {}
        return work.stages[key]

    def program(self) -> Program:
        """Add every rank's passes, connect them, and end the step; its FLOPs are filled in later."""
        plan, pp = self.plan, self.plan.pp
        size = given_of(self.model, plan)
        sizes = {number: self._given(number, size) for number in self.stages}
        if plan.kernel_set.pipeline_buffers and pp > 1:
            self._buffers(sizes)
        elif plan.pipeline_engine:
            self._keep_results(sizes)
        for _ in range(plan.local_steps):
            self._step(pp, sizes)
        for stage in self.stages.values():
            self.hook.synchronise(stage)
        tokens, psi = float(plan.global_batch * plan.sequence), self.model.parameters
        return Program(
            plan.grid,
            self.cohorts,
            0.0,
            0.0,
            plan.precision,
            tokens,
            psi,
            steps=plan.local_steps,
        )

    def _given(self, stage: int, size: float) -> float:
        """Bytes of a microbatch that a stage is given by the one before it: `size` unless blocks differ in that."""
        first = sum(self.plan.layers[: stage % len(self.plan.layers)])
        return self.handed_on[first] if first < len(self.handed_on) else size

    def _buffers(self, sizes: dict[int, float]) -> None:
        """What PyTorch's pipeline stages hold for transfers, besides activations. sizes: that each stage is given."""
        for number, stage in self.stages.items():
            near = [self.stages.get(number + step) for step in (-1, 1)]
            before, after = (other is not None and other.rank != stage.rank for other in near)
            received, sent = sizes[number] if before else 0.0, sizes[number + 1] if after else 0.0
            self.buffers[stage.rank] = (*self.buffers.get(stage.rank, ()), *stage.buffers(received, sent, self.microbatches))

    def _keep_results(self, sizes: dict[int, float]) -> None:
        """Stages of DeepSpeed's pipeline engine keep their results until the backward pass (_exec_backward_pass: "Free up the
        memory from the output of forward()"), of what tp ranks send in parts a part. sizes: that each stage is given.
        """
        for number in range(self.last):
            if self.rank_of[number + 1] != self.rank_of[number]:
                self.stages[number].output = sizes[number + 1] / (self.plan.tp if self.plan.partitioned else 1)

    def _step(self, ranks: int, sizes: dict[int, float]) -> None:
        """Every rank's passes and updates, after the step before."""
        for stage in self.stages.values():
            stage.reduced.clear()
        for rank in range(ranks):
            Passes(self.flow, rank, self.cohorts[rank], sizes).add()
        self.flow.connect()
        for rank in range(ranks):
            self._finish([stage for number, stage in sorted(self.stages.items()) if stage.rank == rank])

    def _finish(self, stages: list[Stage]) -> None:
        """Tied embeddings and copies of a stage, the update, and what is resident all the time."""
        plan, ends = self.plan, (self.stages[0], self.stages[self.last])
        for stage in stages:
            if self.tied and stage in ends:
                self._tie(stage, (ends[0].rank, ends[1].rank))
        if self.schedule.copies > 1:
            for stage in sorted(stages, key=lambda stage: stage.number % len(plan.layers)):  # in the same order on both ranks
                self._add_copies(stage)
        for stage in stages:
            if not self.schedule.versions:
                self.hook.update(stage)
        states = plan.bytes_that_stay
        states["optimizer"] += self.hook.outer
        if self.schedule.versions:
            states["parameter"] *= self.schedule.versions(stages[0].rank, plan.pp)
        for kind in stages[0].host.takes(self.hook.shards):
            states[kind] = 0
        resident = tuple((kind, width * sum(self._elements(stage, kind) for stage in stages)) for kind, width in states.items())
        shards = plan.shards if "optimizer" in self.hook.shards else 1
        beside = sum(states_beside(plan, stage.parts).sharded(plan, shards) for stage in stages)
        resident += (("optimizer", beside),) if beside else ()
        frozen = sum(stage.frozen_bytes for stage in stages)
        resident += (("parameter", frozen),) if frozen else ()
        held = float(sum(width * elements for stage in stages for width, elements in stage.module_buffers))
        resident += (("buffer", held),) if held else ()
        beside_states = (self.hook.resident(stage) + stage.cached + stage.kept_logits for stage in stages)
        more = sum(beside_states, self.buffers.get(stages[0].rank, ()))
        stages[0].cohort.resident = resident + more
        stages[0].cohort.hosted = sum(
            (stage.host.held(plan.shards, stage.sharded(plan.shards), stage.parts) for stage in stages), ()
        )

    def _elements(self, stage: Stage, kind: str) -> float:
        """Elements of a stage of whose states of that kind a rank has some."""
        shares = self.hook.shares(stage, kind)
        return stage.updated(shares) if kind == "optimizer" else stage.sharded(shares)

    def _tie(self, stage: Stage, ranks: tuple[int, int]) -> None:
        """First and last rank sum the gradients of the embedding that they share."""
        width, shards = self.plan.bytes_per_gradient, self.plan.shards if "gradient" in self.hook.shards else 1
        size = self.stages[self.last].tied * width / shards
        pair = Collective("all_reduce", size, "pp", "tied embedding", self.plan.algorithm, 1, width, ranks)
        computed = stage.last_compute()
        assert computed is not None
        stage.reduced.append(stage.add(Op("pp tied", pair, (computed, *stage.reduced[-1:]))))

    def _add_copies(self, stage: Stage) -> None:
        """The two ranks that have a copy of a stage sum its gradients, as soon as its last microbatch has come back."""
        plan, count = self.plan, len(self.plan.layers)
        width, shards = plan.bytes_per_gradient, plan.shards if self.hook.scatters else 1
        size = stage.sharded(shards) * width
        ranks = self.stages[stage.number % count].rank, self.stages[stage.number % count + count].rank
        pieces = in_buckets(size, stage.limits.size * width)
        label = f"copies of stage {stage.number % count}"
        pair = Collective("all_reduce", size / pieces, "pp", label, plan.algorithm, pieces, width, ranks)
        stage.reduced.append(stage.add(Op("pp copies", pair, (self.flow.ended[stage.number], *stage.reduced[-1:]))))


def _flops(work: ModelCosts, plan: Resolved) -> tuple[float, float]:
    """(model FLOPs, hardware FLOPs) of the whole job: recomputation counts in the second, by the same rule."""
    passes = float(plan.passes)
    every = [work.embedding, work.head]
    for number, count in enumerate(plan.layers):
        every += work.stage(sum(plan.layers[:number]), count)
    model = sum(part.model_flops for part in every)
    again = sum(part.recomputed_flops for part in every)
    return model * passes, (model + again) * passes


def _masked_flops(model: Model, plan: Resolved, flops: float) -> float | None:
    """Model FLOPs of the job that a causal mask leaves; None without a mask."""
    if model.family != "decoder" or plan.packing is not None:
        return None
    full, left = (model.forward_flops(plan.global_batch, plan.sequence, causal) for causal in (False, True))
    return flops - 3.0 * (full - left)
