"""What of a job PyTorch can carry out; everything else is refused with the reason. No torch in here: a refusal is instant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from calibration.execute.traced import limits as traced
from calibration.execute.traced.limits import draws
from calibration.launch.launcher import under_launcher
from calibration.launch.place import available_cores
from calibration.launch.throttle import SLOWEST
from sim.engine.effects.speed import Speed
from sim.pricing.prices import SDPA
from strategies.job import Job
from strategies.models.model import Model
from strategies.plan.resolved import Resolved
from strategies.schedules import actions, schedules
from topologies.reading import Config, UserError

PLAIN = {
    "latent": None,
    "window": None,
    "mtp": 0,
    "state_space": None,
    "delta_net": None,
    "attention_gate": False,
    "chunk": None,
    "sinks": False,
    "rotary_dim": None,
    "norms": 2,
    "norm_weights": True,
    "norm_bias": True,
    "parallel": False,
    "embedding_scale": False,
    "logit_softcap": False,
    "patches": None,
    "pattern": (),
    "module": None,
    "qk_norm": False,
}

EXECUTED = {  # fields of a plan that PyTorch carries out; others must have their defaults
    "tp",
    "pp",
    "dp",
    "cp",
    "cp_method",
    "ep",
    "sequence_parallel",
    "schedule",
    "chunks",
    "data_parallel",
    "shard",
    "powersgd",
    "local_steps",
    "reshard",
    "gradient_sync",
    "reshard_after_backward",
    "microbatch",
    "global_batch",
    "accumulation",
    "sequence",
    "packing",
    "recompute",
    "recompute_method",
    "recompute_layers",
    "early_stop",
    "attention",
    "kernels",
    "precision",
    "master_weights",
    "gradients",
    "optimizer",
    "clip_gradients",
    "dropout",
    "lora",
    "freeze",
    "bucket",
    "overlap",
    "layers_per_stage",
    "order",
    "framework",
    "deepspeed",
}
EXECUTED_OPTIONS = {"set_to_none", "gradient_as_bucket_view", "root_unit", "keep_last_unit"}  # of the framework


EXECUTED_KERNELS = ("torch", "compiled")  # operator by operator, or each layer by torch.compile
# a GPU's fastest attention kernel may be faster than PyTorch's own, which is executed in its place; cores have one
FASTEST = "flash"
EXECUTED_ATTENTION = (FASTEST, SDPA, "materialised")


def check_model(model: Model) -> None:
    """Raise UserError for a model that is not a plain decoder or encoder such as GPT-2, Llama or BERT."""
    for field, value in PLAIN.items():
        own = getattr(model, field)
        if own != value:
            said = field if isinstance(own, Config) else f"{field}={own}"
            raise UserError(f"model {model.name}: {said} is not executed: only {field}={value} is")
    if not (model.head or model.classes or model.pooler_classes):
        raise UserError(f"model {model.name}: head=False is not executed without classes: there is no loss to train with")
    if model.pooler and not model.pooler_classes:
        raise UserError(f"model {model.name}: pooler=True is not executed without pooler_classes: nothing would train it")


def ready(job: Job, emulated: bool = False) -> Job:
    """The job as PyTorch runs it, with PyTorch's kernels; `emulated`: its nodes are parts of this machine.

    Raises UserError for what cannot be executed.
    """
    kernels = job.plan.kernels if "kernels" in job.plan.model_fields_set else EXECUTED_KERNELS[0]
    if kernels not in EXECUTED_KERNELS:
        raise UserError(f"{job.where}: kernels={kernels} is simulated only: PyTorch executes {' and '.join(EXECUTED_KERNELS)}")
    changed: dict[str, object] = {"kernels": kernels}
    if job.cluster.node.gpu.sms and job.plan.attention == FASTEST:
        changed["attention"] = SDPA
    if blocking(job):
        changed["overlap"] = False
    given, asked = job.plan.model_fields_set, job.plan.overlap
    job = replace(job, plan=job.plan.model_copy(update=changed))
    resolved = job.resolve()
    if job.model.module is None:
        check_model(job.model)
    if blocking(job) and "overlap" in given and asked:
        raise UserError(f"{job.where}: not executed: overlap=true: over gloo FSDP2 waits for every collective")
    for reason in _reasons(job, resolved, emulated):
        raise UserError(f"{job.where}: not executed: {reason}")
    return job


def blocking(job: Job) -> bool:
    """Whether FSDP2's collectives hold up the process that computes.

    It waits for each where there are no streams (torch 2.13: foreach_all_gather and foreach_reduce start them without async_op).
    """
    return job.plan.data_parallel == "zero3" and job.plan.deepspeed is None and job.cluster.node.gpu.sms == 0


def dropped(job: Job) -> bool:
    """Whether activations are dropped at random: with numbers that follow from step, microbatch and layer, so that one process
    drops the same.
    """
    if job.model.module is not None:
        return draws(job.model.module)
    asked, adapters = job.plan.dropout, job.plan.lora
    of_model = (job.model.dropout or job.model.attention_dropout) if asked is None else asked
    return of_model or (adapters is not None and adapters.dropout > 0)


def asynchronous(job: Job) -> bool:
    """Whether steps follow each other without a flush of the pipeline, so that passes of several versions are under way."""
    return job.plan.pp > 1 and schedules[job.plan.schedule].versions is not None


def compared_in_parts(job: Job) -> bool:
    """Whether one process that holds a layer at a time can do what ranks do."""
    return job.model.module is None and job.plan.packing is None and not asynchronous(job)


def splits(job: Job, resolved: Resolved) -> bool:
    """Whether the schedule makes weight gradients in passes of their own."""
    order = actions(job.plan.schedule, 0, job.plan.pp, resolved.microbatches, resolved.chunks)
    return job.plan.pp > 1 and any(action.kind == "W" for action in order)


def shares_embedding(job: Job, resolved: Resolved) -> bool:
    """Whether two stages of one rank, the first and the last, use the same matrix."""
    schedule, pp = schedules[job.plan.schedule], job.plan.pp
    ends = {0, len(resolved.layers) - 1}
    held = ({schedule.stage(rank, pp, chunk) for chunk in range(resolved.chunks)} for rank in range(pp))
    return job.model.tied and pp > 1 and any(ends <= mine for mine in held)


def _reasons(job: Job, resolved: Resolved, emulated: bool) -> Iterator[str]:
    plan, model = job.plan, job.model
    if plan.lora is not None and plan.lora.weights != "same":
        yield f"lora.weights={plan.lora.weights}: matrices are kept in the plan's precision"
    yield from traced.reasons(job)
    yield from _of_fields(job)
    yield from _of_schedule(job, resolved)
    yield from _of_compilation(job)
    yield from _of_context(job)
    yield from _of_packing(job)
    yield from _of_experts(job, resolved)
    yield from _of_effects(job)
    if dropped(job) and plan.tp > 1:
        yield f"dropout with tp={plan.tp}: each rank drops probabilities of its own heads; set plan.dropout=false"
    if dropped(job) and plan.data_parallel == "dataparallel":
        yield "dropout with data_parallel=dataparallel: its threads draw in any order; set plan.dropout=false"
    if model.positions in ("alibi", "relative"):
        yield f"the {model.positions} positions of {model.name} are not executed: only rotary and learned ones are"
    if plan.sequence_parallel and model.positions == "learned":
        yield f"sequence_parallel=true with the learned positions of {model.name}: each rank would need its own rows"
    if plan.bytes_per_element == 2 and plan.gradients == "fp32" and plan.data_parallel != "zero3":
        yield f"gradients=fp32 of 16-bit weights: only FSDP2 (zero3) reduces them so, and not {plan.data_parallel}"
    if plan.updates_16_bits and plan.precision == "fp16":
        yield "master_weights=false with precision=fp16: without a loss scale small gradients are lost, on each rank others"
    if job.cluster.nodes > 1 and not under_launcher() and not emulated:
        yield f"{job.cluster.nodes} nodes need a process launcher on each; see --print-launch"
    if job.cluster.node.gpu.sms == 0 and resolved.grid.world > 16 * len(available_cores()) and not under_launcher():
        yield f"{resolved.grid.world} processes on {len(available_cores())} cores"


def _of_compilation(job: Job) -> Iterator[str]:
    """What torch.compile would take apart, or do in another way than one process that is not compiled."""
    plan = job.plan
    if not plan.kernel_set.compiled:
        return
    for axis, degree in (("tp", plan.tp), ("cp", plan.cp), ("ep", plan.ep)):
        if degree > 1:
            yield f"kernels={plan.kernels} with {axis}={degree}: collectives inside of a layer are not compiled"
    if dropped(job):
        yield f"kernels={plan.kernels} with dropout: compiled layers draw other numbers; set plan.dropout=false"


def _of_packing(job: Job) -> Iterator[str]:
    """What documents one by one would not do in the same way."""
    plan, model = job.plan, job.model
    if plan.packing is None:
        return
    if dropped(job):
        yield "packing with dropout: documents one by one draw other numbers; set plan.dropout=false"
    if model.experts is not None:
        yield "packing with experts: whose turn it is follows from a token's place, which is another in a document by itself"
    if model.classes or model.pooler_classes:
        yield f"packing with the classes of {model.name}: they are of a sequence's first token, and a sequence has many documents"
    if plan.kernel_set.compiled:
        yield f"packing with kernels={plan.kernels}: each microbatch has other lengths, for which layers would be compiled anew"
    if plan.data_parallel == "ddp_powersgd":
        yield "packing with data_parallel=ddp_powersgd: the process it is compared with reduces after each document"


def _of_context(job: Job) -> Iterator[str]:
    """What cp ranks do not share."""
    plan = job.plan
    if plan.cp == 1:
        return
    if dropped(job):
        yield f"dropout with cp={plan.cp}: each rank drops of its own tokens; set plan.dropout=false"
    if plan.hook.local:
        yield f"data_parallel={plan.data_parallel} with cp={plan.cp}: dp ranks agree over groups without cp ranks"
    if plan.shard:
        yield f"shard={plan.shard} with cp={plan.cp}: sharded copies of ranks along two axes have no replicas"
    if plan.tp > 1:
        yield f"cp={plan.cp} with tp={plan.tp}: attention of heads on DTensors has no ring"
    if job.model.classes or job.model.pooler_classes:
        yield f"cp={plan.cp} with the classes of {job.model.name}: they are of the first token, which one rank has"


def _of_experts(job: Job, resolved: Resolved) -> Iterator[str]:
    """Mixtures of experts but those that all have equally many tokens."""
    plan, model = job.plan, job.model
    if model.experts is None:
        return
    copies = plan.microbatch * resolved.sequence * model.experts.chosen
    if copies % model.experts.experts:
        yield f"{copies} copies of a microbatch's tokens for {model.experts.experts} experts: all experts must have as many"
    if model.mlp_bias:
        yield f"model {model.name}: mlp_bias=true with experts: stacked matrices have no biases"
    for axis, degree in (("tp", plan.tp), ("cp", plan.cp)):
        if degree > 1:
            yield f"experts with {axis}={degree}: each rank sends whole tokens of its own sequences"


def throttled(job: Job) -> dict[int, float]:
    """By rank, the part of its usual speed that its process is throttled to."""
    result: dict[int, float] = {}
    for effect in job.effects:
        if isinstance(effect, Speed):
            result |= {rank: effect.speed * result.get(rank, 1.0) for rank in effect.gpus(job.cluster.topology()).tolist()}
    return result


def _of_effects(job: Job) -> Iterator[str]:
    """A core that is slower all the time is one that others compute on, too; nothing else can be made so here."""
    for effect in job.effects:
        if not isinstance(effect, Speed) or effect.start or effect.end is not None:
            yield f"of effects only a speed all the time is, on this machine's cores, and this job has '{effect}'"
    if job.effects and (job.cluster.node.gpu.sms or under_launcher()):
        yield f"'{job.effects[0]}': only processes on this machine's cores are throttled"
    if job.effects and job.resolve().grid.world > len(available_cores()):
        yield f"'{job.effects[0]}': a process that is throttled needs a core of its own, and there are {len(available_cores())}"
    for speed in throttled(job).values():
        if speed < SLOWEST:
            yield f"speed {speed:g} is less than the {SLOWEST:g} that a process is throttled to at most"


def _of_versions(job: Job) -> Iterator[str]:
    """What a pipeline without flushes, which is executed by plain sends, does not do."""
    plan, said = job.plan, f"schedule={job.plan.schedule}"
    if job.cluster.node.gpu.sms:
        yield f"{said} on GPUs: its last sends wait for passes of the next step, and whoever waits for a stream waits for them"
    for axis, degree in (("tp", plan.tp), ("cp", plan.cp), ("ep", plan.ep)):
        if degree > 1:
            yield f"{said} with {axis}={degree}: versions of parameters are of whole layers"
    if plan.recompute != "none":
        yield f"{said} with recompute={plan.recompute}: what runs again would have the newest parameters"
    if plan.precision == "fp16":
        yield f"{said} with precision=fp16: stages that are updated at different times have no common loss scale"


def _of_schedule(job: Job, resolved: Resolved) -> Iterator[str]:
    """Orders of passes that are not run."""
    plan = job.plan
    schedule, last = schedules[plan.schedule], len(resolved.layers) - 1
    if plan.pp == 1:
        return
    if asynchronous(job):
        yield from _of_versions(job)
        return
    if schedule.copies > 1:
        yield f"schedule={plan.schedule}: a stage of PyTorch's pipelines is on one rank"
        return
    if plan.schedule == "1f1b" and resolved.microbatches < plan.pp:
        yield f"schedule=1f1b with {resolved.microbatches} microbatches: PyTorch's takes at least as many as stages, {plan.pp}"
    for rank in range(plan.pp):
        order = actions(plan.schedule, rank, plan.pp, resolved.microbatches, resolved.chunks)
        ends = [
            action.microbatch for action in order if action.kind == "F" and schedule.stage(rank, plan.pp, action.chunk) == last
        ]
        if ends != sorted(ends):
            yield f"schedule={plan.schedule}: PyTorch counts losses in order, and stage {last} runs microbatches as {ends}"


def _of_fields(job: Job) -> Iterator[str]:
    """Fields that PyTorch has no part for."""
    plan, own = job.plan, job.model.module is not None
    if plan.optimizer not in ("adam", "momentum", "sgd"):
        yield f"optimizer={plan.optimizer} is simulated only: adam, momentum and sgd are executed"
    if plan.recompute == "selective":
        yield "recompute=selective: PyTorch's fused attention keeps nothing that selective recomputation would restore"
    if plan.attention not in EXECUTED_ATTENTION:
        yield f"attention={plan.attention} is simulated only: PyTorch executes its own, {SDPA}, or materialised"
    if plan.algorithm != "auto":
        yield f"algorithm={plan.algorithm}: gloo has one, and NCCL is told by its own variable NCCL_ALGO"
    if plan.pp > 1 and not plan.overlap_p2p:
        yield "overlap_p2p=false: which sends hold up compute is up to PyTorch's schedules"
    if plan.offload is not None:
        yield "offload: FSDP2 offloads parameters, gradients and states together, and cores have no other memory to offload to"
    for field in sorted(set(type(plan).model_fields) - EXECUTED - (traced.FIELDS if own else set())):
        if getattr(plan, field) != type(plan).model_fields[field].default:
            yield f"{field}={getattr(plan, field)} is simulated only"
    for option, value in plan.options:
        known = EXECUTED_OPTIONS | (traced.OPTIONS if own else set())
        if option not in known and value != type(plan.options).model_fields[option].default:
            yield f"{option}={value} is simulated only"
    if plan.data_parallel == "zero3" and "bucket" in plan.model_fields_set:
        yield f"bucket with data_parallel={plan.data_parallel}: FSDP2 reduces layer by layer"
