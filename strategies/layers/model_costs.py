"""Layer work: what the embedding, one layer and the head cost on one rank for one microbatch.

`parts(model, plan)` gives kernels, collectives, activation bytes and parameters; `saved_tensors(model, plan)` lists the
activations of a layer by name. Which kernels there are and what they move is stated in `strategies.layers.operators`.

A kernel's FLOPs are what it executes: a causal flash kernel executes half of its products. `model_flops` follows the rule
of Megatron-LM and most papers (arXiv:2104.04473 appendix): matrix products only, attention in full even when causal (but within
a window or chunk), backward twice forward, no recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from strategies.frameworks.megatron_2021.small_kernels import batch
from strategies.layers import selective_recomputation
from strategies.layers.embedding_and_head import embedding, head
from strategies.layers.fine_tuning.parts import trained_end, trained_layer
from strategies.layers.layer_cost import LayerCost, Tensors, joined, part_of, tensors_of
from strategies.layers.multi_token_prediction import with_prediction_layers
from strategies.layers.operators import Operator
from strategies.layers.pipeline_scatter import received, returned
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items
from strategies.layers.traced.layer_costs import traced_parts
from strategies.layers.transformer import transformer_layer
from strategies.models.model import Model
from strategies.models.parts import Experts
from strategies.models.tracing.tracer import structure_of, trace_of
from strategies.plan.fine_tuning import Trained, trained_parts
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from strategies.plan.rules import refuse
from topologies.reading import UserError


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model under a plan: the embedding, one `LayerCost` per kind of layer, the head."""

    plan: Plan
    embedding: LayerCost
    layers: tuple[LayerCost, ...]  # one per kind
    kept: tuple[LayerCost, ...]  # layers without recomputation, where only some are recomputed
    kinds: tuple[int, ...]  # for each layer of the model, its index in `layers`
    head: LayerCost  # final norm, language-model head and loss; before them layers that predict tokens further ahead
    batch: Items  # before every forward pass of every stage
    received: Items  # before the forward pass of stages whose input comes from another rank
    returned: Items  # before the backward passes of those whose result went to another rank
    tied: int  # elements of the token embedding on this rank that the head's stage uses too; 0 when it has matrices of its own
    tied_is_frozen: bool = False  # whether that matrix is not trained
    handed_on: tuple[
        float, ...
    ] = ()  # bytes of what each layer is given for a microbatch, of a module whose blocks differ in that
    # by what tells pipeline stages apart, what stages have in common that are alike, whatever the number of microbatches: see
    # strategies.lowering.stage_parts
    stages: dict[Hashable, tuple[list[LayerCost], dict[Hashable, Any]]] = field(default_factory=dict, compare=False, repr=False)

    def layer(self, index: int) -> LayerCost:
        """Layer 0 … layers − 1 of the model."""
        return self.layers[self.kinds[index]]

    def stage(self, first: int, count: int) -> list[LayerCost]:
        """Layers first … first + count − 1 of the model as a stage runs them: which of them recompute their activations, and
        which do so together.
        """
        every = [self.layer(index) for index in range(first, first + count)]
        number = self.plan.recompute_layers
        if number is None:
            return every
        if self.plan.recompute_method == "uniform":
            return [joined(tuple(every[start : start + number])) for start in range(0, count, number)]
        again = range(number) if self.plan.recompute_method == "block" else range(number - 1, count, number)
        return [part if place in again else self.kept[self.kinds[first + place]] for place, part in enumerate(every)]


@lru_cache(maxsize=1024)
def parts(model: Model, plan: Resolved) -> ModelCosts:
    """Work of `model` under `plan`. Raises UserError for layers that are not simulated yet."""
    check(model, plan)
    rank, recompute = RankShapes(model, plan), plan.recompute
    if model.module is not None:
        traced = traced_parts(rank)
        trace = structure_of(model.module)
        tied = sum(math.prod(trace.parameters[name]) for name in trace.tied)
        handed_on = trace_of(model.module, plan.microbatch, plan.precision, plan.fused_attention, plan.tp).handed_on
        return ModelCosts(plan, *traced, batch=(), received=(), returned=(), tied=tied, handed_on=tuple(handed_on))
    trained = trained_parts(plan, model.layers)
    every = [(*_kind(model, plan, layer), trained.layers[layer]) for layer in range(model.layers)]
    kinds = {kind: every.index(kind) for kind in every}  # one layer of each
    layers, kept = (
        tuple(_layer_cost(model, plan, layer, trained.layers[layer], again) for layer in kinds.values() if needed)
        for again, needed in ((recompute, True), ("none", plan.recompute_layers is not None))
    )
    places = {kind: place for place, kind in enumerate(kinds)}
    tied = rank.rows * model.hidden if model.head and (model.tied or model.mtp) else 0
    last = part_of("head", trained_end(rank, head, trained.head, trained.embedding.weights), rank, "none", int(model.head))
    if model.mtp:
        last = with_prediction_layers(rank, _operators(model, plan, model.layers - 1), recompute)
    return ModelCosts(
        plan=plan,
        embedding=part_of("embedding", trained_end(rank, embedding, trained.embedding), rank, "none"),
        layers=layers,
        kept=kept,
        kinds=tuple(places[kind] for kind in every),
        head=last,
        batch=batch(rank),
        received=received(rank),
        returned=returned(rank),
        tied=tied,
        tied_is_frozen=not trained.embedding.weights,
    )


def _layer_cost(model: Model, plan: Resolved, layer: int, trained: Trained, recompute: str) -> LayerCost:
    rank = _rank_of_layer(model, plan, layer, trained)
    operators = trained_layer(rank, _layer(rank, _experts(model, layer)), trained)
    return part_of("layer", operators, rank, "none" if trained.gradient == "none" else recompute)


def _layer(rank: RankShapes, moe: Experts | None) -> list[Operator]:
    operators = transformer_layer(rank, moe)
    return selective_recomputation.chosen(rank, operators) if rank.resolved.recompute == "operators" else operators


def _experts(model: Model, layer: int) -> Experts | None:
    """The experts of a layer; None when it is dense."""
    return model.experts if model.is_mixture(layer) else None


def _kind(model: Model, plan: Resolved, layer: int) -> tuple[int, bool, bool]:
    """What tells layers of the model apart."""
    return id(model.layer_models[layer]), model.is_mixture(layer), _in_bf16(model, plan, layer)


def _in_bf16(model: Model, plan: Resolved, layer: int) -> bool:
    """Whether a layer is multiplied in 16 bits where others have fp8."""
    return plan.fp8 is not None and plan.fp8.stays_in_bf16(layer, model.layers)


def _rank_of_layer(model: Model, plan: Resolved, layer: int, trained: Trained) -> RankShapes:
    """What a rank sees of a layer."""
    own = plan.model_copy(update={"fp8": None}) if _in_bf16(model, plan, layer) else plan
    return RankShapes(model.layer_models[layer], own, frozen=not trained.weights)


def _operators(model: Model, plan: Resolved, layer: int) -> list[Operator]:
    """The pieces of a layer. Raises UserError for a traced module."""
    if model.module is not None:
        raise UserError(f"model {model.name}: tensors of a traced module have no names")
    check(model, plan)
    trained = trained_parts(plan, model.layers).layers[layer]
    rank = _rank_of_layer(model, plan, layer, trained)
    return trained_layer(rank, _layer(rank, _experts(model, layer)), trained)


def saved_tensors(model: Model, plan: Resolved, layer: int = 0) -> Tensors:
    """Activations of a layer that a rank keeps from forward to backward of a microbatch: name -> bytes.

    As arXiv:2205.05198 counts them, section 4: tensors of tokens × features and masks of a byte per element; the mean and
    deviation of a norm are left out. A gated activation is one kernel that keeps gate and up, and the next matrix its product.
    """
    return tensors_of(_operators(model, plan, layer), plan.recompute, plan.recomputed_modules)[0]


def restored_tensors(model: Model, plan: Resolved, layer: int = 0) -> Tensors:
    """Activations of a layer that recomputation makes anew in the backward pass: name -> bytes."""
    return tensors_of(_operators(model, plan, layer), plan.recompute, plan.recomputed_modules)[1]


def check(model: Model, plan: Resolved) -> None:
    """Raise UserError for layers that are not simulated under the plan."""
    if model.module is not None:
        return
    refuse(f"model {model.name}", _unknown(model, plan))
    if plan.recompute == "operators":
        selective_recomputation.check(RankShapes(model, plan))


def _unknown(model: Model, plan: Resolved) -> Iterator[str]:
    """What of the model is not written down."""
    if plan.kernel_set.eager:
        yield from _unknown_eager(model, plan)
    if model.state_space is not None or model.delta_net is not None:
        yield from _unknown_recurrence(model, plan)
    if model.shared_blocks is not None:
        yield from _unknown_shared_blocks(model, plan)
    if model.attention_gate and plan.recompute == "operators":
        yield f"recompute=operators is not simulated with the attention_gate of {model.name}"
    if model.mtp and plan.shards_parameters:
        rule = "is not simulated: prediction layers are on the head's stage, and would be gathered with it as one part"
        yield f"mtp={model.mtp} with data_parallel={plan.data_parallel} {rule}"
    if model.mtp and not plan.trains_all:
        yield f"mtp={model.mtp} with lora or freeze is not simulated: remove the prediction layers (model.mtp=0)"
    if model.norms not in ((1, 2) if model.parallel else (2, 4)):
        yield f"norms={model.norms} is not simulated: layers must have 2 or 4 norms, parallel ones 1 or 2"
    narrow = min((own.window or own.chunk or plan.sequence for own, _ in model.distinct_layers), default=plan.sequence)
    if narrow < plan.sequence and plan.cp > 1 and plan.cp_method != "ulysses":
        rule = "windows are simulated with cp_method=ulysses only: some ranks of a ring lie outside"
        yield f"window={narrow} with cp={plan.cp}: {rule}"


def _unknown_recurrence(model: Model, plan: Resolved) -> Iterator[str]:
    """What state-space mixers and delta nets are not written down for."""
    scan = model.state_space
    said = f"{'state-space' if scan else 'delta-net'} layers of {model.name}"
    selective = scan is not None and scan.step_rank is not None
    unknown = {
        f"tp={plan.tp}": selective and plan.tp > 1,
        "fp8": selective and plan.fp8 is not None,
        f"kernels={plan.kernels}": plan.kernel_set.eager or plan.kernel_set.early_cublas,
        f"cp={plan.cp}": plan.cp > 1,
        "packing": plan.packing is not None,
        f"recompute={plan.recompute}": plan.recompute == "operators",
        "lora": plan.lora is not None,
        "deterministic=true": plan.deterministic,
    }
    yield from (f"{said} are not simulated with {what}" for what, there in unknown.items() if there)


def _unknown_shared_blocks(model: Model, plan: Resolved) -> Iterator[str]:
    """What layers that share parameters are not written down for."""
    unknown = {
        f"tp={plan.tp}": plan.tp > 1,
        f"pp={plan.pp}": plan.pp > 1,
        f"data_parallel={plan.data_parallel}": plan.shards_parameters,
        "freeze": not plan.trains_all,
    }
    said = f"blocks that layers of {model.name} share are not simulated with"
    yield from (f"{said} {what}: use data_parallel=zero1 or zero2, tp=1, pp=1" for what, there in unknown.items() if there)


def _unknown_eager(model: Model, plan: Resolved) -> Iterator[str]:
    """What PyTorch's own operators are not written down for."""
    unknown = {
        "latent attention": model.latent is not None,
        "qk_norm": model.qk_norm,
        "recompute=selective": plan.recompute == "selective",
    }
    yield from (
        f"kernels={plan.kernels} is not simulated with {what}: use kernels=megatron" for what, there in unknown.items() if there
    )
