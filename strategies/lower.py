"""From model, plan and cluster to a program: layer work × schedule × data parallel hook."""

from __future__ import annotations

from sim.program import Collective, Kernel, Op, Program, Ref, Send
from strategies.data_parallel import Hook, hooks
from strategies.layers import Part, Parts, parts
from strategies.model import Model
from strategies.plan import Resolved
from strategies.schedules import actions
from strategies.stage import Stage

Key = tuple[int, str, int]  # stage, "F" or "B", microbatch


def lower(model: Model, plan: Resolved) -> Program:
    """The program of one training step."""
    work = parts(model, plan)
    stages = [_stage(model, plan, work, number) for number in range(plan.plan.pp)]
    hook = hooks[plan.plan.data_parallel]()
    waits: list[tuple[int, int, Key]] = []  # op `1` of stage `0` waits for the transfer `2`
    transfers: dict[Key, Ref] = {}
    size = plan.plan.microbatch * plan.sequence * model.hidden * plan.plan.bytes_per_element
    if plan.plan.sequence_parallel:
        size //= plan.plan.tp  # each tp rank holds, and sends, its part of the sequence
    for stage in stages:
        _schedule(stage, hook, size, waits, transfers)
    for number, op, key in waits:
        waiting = stages[number].cohort.ops[op]
        waiting.after = (*waiting.after, transfers[key])
    for stage in stages:
        _finish(stage, hook, model, stages)
    return Program(plan.grid, [stage.cohort for stage in stages], *_flops(work, plan),
                   plan.plan.precision, float(plan.global_batch * plan.sequence), model.parameters)  # fmt: skip


def _stage(model: Model, plan: Resolved, work: Parts, number: int) -> Stage:
    first = sum(plan.layers[:number])
    chosen: list[Part] = [work.layer(i) for i in range(first, first + plan.layers[number])]
    if number == 0:
        chosen.insert(0, work.embedding)
    if number == plan.plan.pp - 1:
        chosen.append(work.head)
    stage = Stage(number, number, chosen, plan)
    if model.tied and plan.plan.pp > 1 and number == plan.plan.pp - 1:
        stage.tied = work.tied
    return stage


def _schedule(stage: Stage, hook: Hook, size: float, waits: list[tuple[int, int, Key]], transfers: dict[Key, Ref]) -> None:
    """Add the stage's passes in the schedule's order, each with the transfer of its result to the next stage."""
    plan, pp = stage.plan, stage.plan.plan.pp
    width, number = plan.plan.bytes_per_element, stage.number
    sends = {}  # one object per kind: each distinct piece of work is priced once
    if number < pp - 1:
        sends["F"] = "pp next", Send(size, number + 1, "activations", width=width)
    if number > 0:
        sends["B"] = "pp previous", Send(size, number - 1, "gradients", width=width)
    backwards, held_up = 0, ()  # type: int, tuple[Ref, ...]
    for kind, microbatch in actions(plan.plan.schedule, number, pp, plan.microbatches):
        forward = kind == "F"
        source = number - 1 if forward else number + 1
        op = len(stage.cohort.ops)
        if forward:
            ref = hook.forward(stage, microbatch, held_up)
        else:
            backwards += 1
            ref = hook.backward(stage, microbatch, held_up, backwards == plan.microbatches)
        if 0 <= source < pp:
            first = next(i for i in range(op, len(stage.cohort.ops)) if stage.cohort.ops[i].stream == "compute")
            waits.append((number, first, (source, kind, microbatch)))
        if kind in sends:
            stream, send = sends[kind]
            sent = transfers[number, kind, microbatch] = stage.add(Op(stream, send, (ref,), microbatch=microbatch))
            held_up = () if plan.plan.overlap_p2p else (sent,)


def _finish(stage: Stage, hook: Hook, model: Model, stages: list[Stage]) -> None:
    """Tied embeddings, the update, and what is resident all the time."""
    plan = stage.plan
    if model.tied and plan.plan.pp > 1 and stage.number in (0, plan.plan.pp - 1):
        width, last_stage = plan.plan.bytes_per_gradient, plan.plan.pp - 1
        size = stages[-1].tied * width / (plan.dp if "gradient" in hook.shards else 1)
        pair = Collective("all_reduce", size, "pp", "tied embedding", plan.plan.algorithm, 1, width, (0, last_stage))
        last = max(i for i, op in enumerate(stage.cohort.ops) if op.stream == "compute")
        stage.reduced.append(stage.add(Op("pp tied", pair, (Ref(stage.cohort_number, last), *stage.reduced[-1:]))))
    hook.update(stage)
    stage.cohort.resident = tuple(
        (kind, stage.parameters * width / (plan.dp if kind in hook.shards else 1))
        for kind, width in plan.plan.bytes_of_states.items()
    )


def _flops(work: Parts, plan: Resolved) -> tuple[float, float]:
    """(model FLOPs, hardware FLOPs) of the whole job: recomputation counts in the second, by the same rule."""
    passes = float(plan.microbatches * plan.dp)
    every = [work.embedding, *(work.layer(i) for i in range(sum(plan.layers))), work.head]
    model = sum(part.model_flops for part in every)
    again = sum(_counted(item) for part in every for item in part.recompute if isinstance(item, Kernel)) * plan.plan.tp
    return model * passes, (model + again) * passes


def _counted(kernel: Kernel) -> float:
    """FLOPs by the counting rule: causal attention counts in full, although a fused kernel executes about half."""
    if kernel.kind == "attention_forward":
        batch, heads, _, queries, keys, dim, _ = kernel.shape
        return 4.0 * batch * heads * queries * keys * dim
    return kernel.flops if kernel.kind == "gemm" else 0.0
