"""From model, plan and cluster to a program: layer work × schedule × data parallel hook."""

from __future__ import annotations

from dataclasses import replace

from sim.program import COMPUTE, Cohort, Collective, Op, Program, Ref, Send
from strategies.data_parallel import hooks
from strategies.layers import Part, Parts, parts
from strategies.model import Model
from strategies.plan import Resolved
from strategies.schedules import actions, schedules
from strategies.stage import Stage

STEPS = 4  # of an asynchronous schedule: two fill the pipeline and settle, the third is the answer, the fourth keeps it full
Key = tuple[str, int, int]  # "F" or "B", virtual stage, microbatch


def lower(model: Model, plan: Resolved) -> Program:
    """The program of one training step."""
    work = parts(model, plan)
    model_flops, hardware_flops = _flops(work, plan)
    program = hooks[plan.plan.data_parallel]().program(model, plan, work)
    if program is not None:
        return replace(program, model_flops=model_flops, hardware_flops=hardware_flops)
    return _Lowering(model, plan, work).program(model_flops, hardware_flops)


class _Lowering:
    """Stages of all ranks, and what each pass of them waits for."""

    def __init__(self, model: Model, plan: Resolved, work: Parts) -> None:
        self.plan, self.hook = plan, hooks[plan.plan.data_parallel]()
        self.model, self.schedule = model, schedules[plan.plan.schedule]
        self.steps = STEPS if self.schedule.versions else 1  # played
        ranks = plan.plan.pp
        self.cohorts = [Cohort({"pp": rank}) for rank in range(ranks)]
        self.stages: dict[int, Stage] = {}
        for rank in range(ranks):
            for chunk in range(plan.chunks):
                number = self.schedule.stage(rank, ranks, chunk)
                self.stages[number] = Stage(number, rank, chunk, self.cohorts[rank], self._parts(work, number), plan, model)
        self.last = len(self.stages) - 1
        # a head that shares the embedding's matrix has a copy of it when it lives on another rank
        if model.tied and self.stages[0].rank != self.stages[self.last].rank:
            self.stages[self.last].tied = work.tied
        self.waits: list[tuple[Op, Key]] = []
        self.results: dict[Key, Ref] = {}  # the transfer, or on the same rank the pass itself, that makes a result available

    def _parts(self, work: Parts, number: int) -> list[Part]:
        first = sum(self.plan.layers[:number])
        chosen: list[Part] = [work.layer(i) for i in range(first, first + self.plan.layers[number])]
        if number == 0:
            chosen.insert(0, work.embedding)
        if number == len(self.plan.layers) - 1:
            chosen.append(work.head)
        return chosen

    def program(self, model_flops: float, hardware_flops: float) -> Program:
        """Add every rank's passes, connect them, and end the step."""
        plan, pp = self.plan, self.plan.plan.pp
        size = plan.plan.microbatch * (plan.sequence // plan.plan.cp) * self.model.hidden * plan.plan.bytes_per_element
        if plan.plan.sequence_parallel:
            size //= plan.plan.tp  # each tp rank holds, and sends, its part of the sequence
        for _ in range(plan.local_steps):
            self._step(pp, size)
        for stage in self.stages.values():
            self.hook.synchronise(stage)
        tokens, psi = float(plan.global_batch * plan.sequence), self.model.parameters
        flops = model_flops, hardware_flops
        return Program(plan.grid, self.cohorts, *flops, plan.plan.precision, tokens, psi, steps=plan.local_steps)

    def _step(self, ranks: int, size: float) -> None:
        """Every rank's passes and updates, after those of the step before."""
        self.waits.clear()
        for stage in self.stages.values():
            stage.reduced.clear()
        for rank in range(ranks):
            self._passes(rank, size)
        for op, key in self.waits:
            op.after = (*op.after, self.results[key])
        for rank in range(ranks):
            self._finish([stage for number, stage in sorted(self.stages.items()) if stage.rank == rank])

    def _passes(self, rank: int, size: float) -> None:
        """Add the rank's passes in the schedule's order, each with the transfer of its result to the next stage."""
        plan, ops = self.plan, self.cohorts[rank].ops
        sends = self._sends(rank, size)
        total = self.steps * plan.microbatches
        left = dict.fromkeys(range(plan.chunks), total)  # backward passes still to come
        ends: list[int] = []  # of steps
        held_up: tuple[Ref, ...] = ()
        for kind, microbatch, chunk in actions(plan.plan.schedule, rank, plan.plan.pp, total, plan.chunks):
            stage, position = self.stages[self.schedule.stage(rank, plan.plan.pp, chunk)], len(ops)
            if kind == "F":
                ref = self.hook.forward(stage, microbatch, held_up)
            elif kind == "I":
                ref = self.hook.input_gradient(stage, microbatch, held_up)
            else:
                left[chunk] -= 1
                last = not left[chunk] % (1 if self.schedule.every_microbatch else plan.microbatches)
                ref = self.hook.backward(stage, microbatch, held_up, last, kind == "W")
            # without overlap the next pass waits for the gradients that this one reduces
            held_up = tuple(stage.reduced[-1:]) if kind in "BW" and not plan.plan.overlap else ()
            if kind == "W":
                continue
            way = "F" if kind == "F" else "B"
            source, key = stage.number + (-1 if way == "F" else 1), (way, stage.number, microbatch)
            if 0 <= source <= self.last:
                while ops[position].stream != COMPUTE:  # gathers do not wait for the stage before
                    position += 1
                self.waits.append((ops[position], (way, source, microbatch)))
            self.results[key] = ref
            if key[:2] in sends:
                stream, send = sends[key[:2]]
                sent = self.results[key] = stage.add(Op(stream, send, (ref,), microbatch=microbatch))
                held_up += () if plan.plan.overlap_p2p else (sent,)
            if self.schedule.versions and kind == "B" and last:
                self.hook.update(stage)
                stage.reduced.clear()
                if not left[chunk] % plan.microbatches:
                    ends.append(len(ops))
        if self.schedule.versions:
            self.cohorts[rank].steady = ends[STEPS - 3], ends[STEPS - 2]

    def _sends(self, rank: int, size: float) -> dict[tuple[str, int], tuple[str, Send]]:
        """(direction, virtual stage) -> stream and send; one object each: every distinct piece of work is priced once."""
        result, width = {}, self.plan.plan.bytes_per_element
        for number, stage in self.stages.items():
            for way, step, stream, label in (("F", 1, "pp next", "activations"), ("B", -1, "pp previous", "gradients")):
                target = self.stages.get(number + step)
                if stage.rank == rank and target is not None and target.rank != rank:
                    result[way, number] = stream, Send(size, target.rank, label, width=width)
        return result

    def _finish(self, stages: list[Stage]) -> None:
        """Tied embeddings, the update, and what is resident all the time."""
        plan, ends = self.plan, (self.stages[0], self.stages[self.last])
        for stage in stages:
            if self.model.tied and stage in ends and ends[0].rank != ends[1].rank:
                self._tie(stage, (ends[0].rank, ends[1].rank))
        for stage in stages:
            if not self.schedule.versions:
                self.hook.update(stage)
        states = dict(plan.plan.bytes_of_states)
        states["optimizer"] += self.hook.outer
        if self.schedule.versions:
            states["parameter"] *= self.schedule.versions(stages[0].rank, plan.plan.pp)
        for kind in stages[0].host.takes(self.hook.shards):
            states[kind] = 0
        resident = tuple(
            (kind, width * sum(stage.sharded(plan.shards if kind in self.hook.shards else 1) for stage in stages))
            for kind, width in states.items()
        )
        stages[0].cohort.resident = resident + sum((self.hook.resident(stage) for stage in stages), ())
        stages[0].cohort.hosted = sum((stage.host.held(plan.shards) for stage in stages), ())

    def _tie(self, stage: Stage, ranks: tuple[int, int]) -> None:
        """First and last rank sum the gradients of the embedding that they share."""
        width, shards = self.plan.plan.bytes_per_gradient, self.plan.shards if "gradient" in self.hook.shards else 1
        size = self.stages[self.last].tied * width / shards
        pair = Collective("all_reduce", size, "pp", "tied embedding", self.plan.plan.algorithm, 1, width, ranks)
        computed = stage.last_compute()
        assert computed is not None
        stage.reduced.append(stage.add(Op("pp tied", pair, (computed, *stage.reduced[-1:]))))


def _flops(work: Parts, plan: Resolved) -> tuple[float, float]:
    """(model FLOPs, hardware FLOPs) of the whole job: recomputation counts in the second, by the same rule."""
    passes = float(plan.microbatches * plan.dp)
    every = [work.embedding, *(work.layer(i) for i in range(sum(plan.layers))), work.head]
    model = sum(part.model_flops for part in every)
    again = sum(part.recomputed_flops for part in every)
    return model * passes, (model + again) * passes
