"""What each part of a model holds on one rank, and the textbook's counts beside what is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sim.analysis.stage_memory import StageMemory
from sim.analysis.summary import Summary
from strategies.job import Job
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import ModelCosts, parts, saved_tensors
from strategies.lowering.optimizer_step import states_beside
from strategies.models.counting_rules import activations_by_megatron, activations_by_zero
from strategies.models.model import Model
from strategies.optimizers import FLOAT
from strategies.plan.resolved import Resolved
from strategies.schedules import schedules

TEXTBOOK = {2: {"parameter": 2, "gradient": 2, "optimizer": 12}, 4: {"parameter": 4, "gradient": 4, "optimizer": 8}}
SOURCE = "Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1"


@dataclass(frozen=True)
class PartMemory:
    """One part on one rank: bytes, and elements of its parameters before data parallel sharding."""

    name: str
    count: int  # how many the rank has
    parameters: int
    trained: int  # those of them that have gradients
    states: dict[str, float]  # parameter, gradient, optimizer: bytes of one
    activations: float  # of one, from the forward to the backward pass of a microbatch
    recomputed: float  # of one, that the backward pass makes again
    tensors: dict[str, float]  # name -> bytes of what one keeps, of layers


@dataclass(frozen=True)
class StateCount:
    """Bytes per parameter of a model state: the textbook's, the plan's before sharding, and what the rank holds at its peak."""

    kind: str
    textbook: float | None
    planned: float | None
    held: float
    why: str


@dataclass(frozen=True)
class ActivationCount:
    """Activations of one microbatch of the rank's layers by a rule."""

    rule: str
    bytes: float


@dataclass(frozen=True)
class ByLayer:
    """Of the fullest rank."""

    stage: int
    microbatches: float  # whose activations it holds at its peak
    parts: tuple[PartMemory, ...]
    states: tuple[StateCount, ...]
    activations: tuple[ActivationCount, ...]
    differences: tuple[str, ...]  # between the textbook's activations and those simulated

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def memory_by_layer(job: Job, summary: Summary) -> ByLayer:
    """What the parts of the fullest rank hold. Raises UserError where the job does not resolve."""
    plan, worst = job.resolve(), summary.worst
    work = parts(job.model, plan)
    mine = _parts(job.model, plan, work, worst.stage)
    layers = [each for each in mine if each.name.startswith("layer")]
    kept = sum(each.count * each.activations for each in mine)
    tokens = plan.sequence // plan.cp
    part = sum(each.count for each in layers) / job.model.layers / plan.tp
    rules = [
        ActivationCount("simulated, all that this rank keeps of a microbatch", kept),
        ActivationCount("simulated, its layers alone", sum(each.count * each.activations for each in layers)),
        ActivationCount(
            f"12·h·b·s·L elements of 2 bytes, /tp ({SOURCE[:-1]}2)",
            part * activations_by_zero(job.model, plan.microbatch, tokens),
        ),
        ActivationCount(
            "s·b·h·(34 + 5·a·s/h)·L bytes, /tp (Korthikanti et al. 2022, arXiv:2205.05198, equation 1)",
            part * activations_by_megatron(job.model, plan.microbatch, tokens),
        ),
    ]
    return ByLayer(
        stage=worst.stage,
        microbatches=worst.kinds.get("activation", 0.0) / kept if kept else 0.0,
        parts=tuple(mine),
        states=tuple(_states(plan, worst, mine)),
        activations=tuple(rules) if job.model.module is None else tuple(rules[:2]),
        differences=tuple(_differences(job.model, plan, work)),
    )


def _parts(model: Model, plan: Resolved, work: ModelCosts, rank: int) -> list[PartMemory]:
    """The parts of a pipeline rank, those alike together, in their order."""
    schedule, last = schedules[plan.schedule], len(plan.layers) - 1
    counts: dict[int, tuple[LayerCost, list[int]]] = {}
    ends: dict[str, LayerCost] = {}
    for chunk in range(plan.chunks):
        number = schedule.stage(rank, plan.pp, chunk) % len(plan.layers)
        first = sum(plan.layers[:number])
        ends |= {"embedding": work.embedding} if number == 0 else {}
        ends |= {"head": work.head} if number == last else {}
        for place, part in enumerate(work.stage(first, plan.layers[number])):
            counts.setdefault(id(part), (part, []))[1].append(first + place)
    result = [_held("embedding", ends["embedding"], 1, plan, {})] if "embedding" in ends else []
    for part, places in counts.values():
        tensors = dict(saved_tensors(model, plan, places[0])) if model.module is None else {}
        result.append(_held(f"layer {_ranges(places)}", part, len(places), plan, tensors))
    return result + ([_held("head and loss", ends["head"], 1, plan, {})] if "head" in ends else [])


def _ranges(places: list[int]) -> str:
    """`0–2, 5`; of many `0, 2, 4 … 30`."""
    runs: list[list[int]] = []
    for place in sorted(places):
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    texts = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(texts) if len(texts) < 5 else f"{', '.join(texts[:3])} … {texts[-1]}"


def _held(name: str, part: LayerCost, count: int, plan: Resolved, tensors: dict[str, float]) -> PartMemory:
    dense, experts = part.parameters - part.experts, part.experts
    states = {}
    offloaded = {
        "optimizer": plan.offload is not None and plan.offload.optimizer is not None,
        "parameter": plan.offload is not None and plan.offload.parameters is not None,
    }
    for kind, width in plan.bytes_of_states.items():
        sharded = kind in plan.hook.shards
        elements = dense / (plan.shards if sharded else 1)
        elements += experts / (plan.expert_sharers(plan.shards) if sharded else 1)
        states[kind] = 0.0 if offloaded.get(kind) else width * elements
    if part.name in plan.outside_optimizer:
        states["optimizer"] = 0.0
    elif "optimizer" in states:
        states["optimizer"] += states_beside(plan, [part]).sharded(plan, plan.shards if "optimizer" in plan.hook.shards else 1)
    states["parameter"] += part.frozen_bytes / (plan.shards if "parameter" in plan.hook.shards else 1)
    return PartMemory(name, count, part.parameters + part.frozen, part.parameters, states, part.saved, part.restored, tensors)


def _states(plan: Resolved, worst: StageMemory, mine: list[PartMemory]) -> Iterator[StateCount]:
    """The model states that the rank holds at its peak, per parameter that it has before sharding."""
    textbook, parameters = TEXTBOOK[plan.bytes_per_element], sum(each.count * each.parameters for each in mine)
    trained = sum(each.count * each.trained for each in mine) / parameters if parameters else 1.0
    for kind, width in textbook.items():
        held = worst.kinds.get(kind, 0.0) / parameters if parameters else 0.0
        planned = plan.bytes_of_states[kind] * trained
        reasons = [f"{100 * trained:.3g} % of the parameters are trained"] if trained < 1 and kind != "parameter" else []
        if kind == "optimizer" and plan.outside_optimizer:
            planned = sum(each.count * each.states[kind] for each in mine) / parameters
            reasons.append(f"the optimizer is not given the {' and the '.join(plan.outside_optimizer)}")
        if kind == "parameter" and trained < 1:  # frozen ones may be narrower
            shards = plan.shards if kind in plan.hook.shards else 1
            planned = sum(each.count * each.states[kind] for each in mine) * shards / parameters
        narrow = plan.lora is not None and plan.lora.bytes_per_weight is not None and kind == "parameter"
        reasons += [f"frozen matrices of layers in {plan.lora.weights}"] if narrow and plan.lora else []
        yield StateCount(kind, width, planned, held, "; ".join([*reasons, *_reasons(plan, kind, width)]))
    if buffers := worst.kinds.get("buffer", 0.0):
        why = "what DDP's buckets hold beside the gradients, or pipelines hold for what they receive"
        yield StateCount("buffer", None, None, buffers / parameters, why)


def _reasons(plan: Resolved, kind: str, textbook: int) -> Iterator[str]:
    """Why a state takes more or fewer bytes than the textbook has."""
    planned = plan.bytes_of_states[kind]
    if kind == "gradient" and planned != textbook:
        yield "gradients are accumulated in fp32" if planned == FLOAT else "gradients have the type of weights"
    if kind == "parameter" and planned != textbook:
        yield "what is sharded is the fp32 master, cast when it is gathered"
    if kind == "optimizer" and planned != textbook:
        more = ", without the master, which is the parameter" if plan.masters_only else ""
        more = more or ", without masters" * plan.updates_16_bits
        yield f"optimizer={plan.optimizer}{more}"
    if kind in plan.hook.shards and plan.shards > 1:
        yield f"sharded over {plan.shards} ranks ({plan.data_parallel})"
    if kind == "gradient" and plan.frees_gradients:
        yield "freed after the update, so that only those of the moment are there"
    if plan.offload is not None and getattr(plan.offload, f"{kind}s" if kind == "parameter" else kind, None):
        yield "offloaded"


def _differences(model: Model, plan: Resolved, work: ModelCosts) -> Iterator[str]:
    """What the rules of activations do not know."""
    if plan.recompute != "none":
        yield f"recompute={plan.recompute}: what the backward pass makes again is not kept"
    if plan.fused_attention and model.module is None:
        yield "fused attention keeps no scores: without the term 5·a·s/h"
    if not (model.dropout if plan.dropout is None else plan.dropout) and model.module is None:
        yield "without dropout there are no masks, which are 2 + a·s/h of the second rule's 34 + 5·a·s/h"
    if model.gated:
        yield "a gated feed-forward block keeps three tensors of its intermediate size where the rules have two of 4·h"
    if plan.bytes_per_element == FLOAT:
        yield "fp32: four bytes an element where the rules have two"
    if work.head.saved:
        yield f"head and loss keep {work.head.saved / 1e9:.3g} GB, probabilities of all tokens among them: no rule has them"
