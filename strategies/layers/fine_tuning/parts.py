"""Parts of a model as far as a plan trains them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from strategies.layers.embedding_and_head import embedding
from strategies.layers.fine_tuning.adapted_matrices import adapter_parameters
from strategies.layers.fine_tuning.adapters import adapted
from strategies.layers.fine_tuning.frozen import forward_only, frozen, label_of, lowest
from strategies.layers.operators import Operator
from strategies.layers.rank_shapes import RankShapes
from strategies.models.model import Model
from strategies.plan.fine_tuning import Trained, trained_parts
from strategies.plan.plan import Plan


def trained_layer(rank: RankShapes, operators: list[Operator], trained: Trained) -> list[Operator]:
    """The operators of a layer of which `trained` is trained; rank: with `frozen` where its own weights are not."""
    if not trained.weights:
        operators = [frozen(rank, _kept_result(rank, operator), linear=True) for operator in operators]
    if trained.adapters:
        operators = adapted(rank, operators)
    if trained.gradient == "parameters":
        return lowest(operators, keeps_input=rank.resolved.recompute != "none")
    return [forward_only(operator) for operator in operators] if trained.gradient == "none" else list(operators)


def trained_parameters(model: Model, plan: Plan) -> int:
    """Elements that have gradients, of the whole model and its adapters."""
    if plan.lora is not None:
        return adapter_parameters(plan, model)
    trained = trained_parts(plan, model.layers)
    embedding = model.embedding_parameters if trained.embedding.weights else 0
    layers = sum(model.layer_parameters(layer) for layer, part in enumerate(trained.layers) if part.weights)
    return embedding + layers + (model.head_parameters if trained.head.weights else 0)


def trained_end(
    rank: RankShapes, operators: Callable[[RankShapes], list[Operator]], trained: Trained, shared: bool = True
) -> list[Operator]:
    """The operators of the embedding or the head. shared: whether the embedding's matrix, which the head may use, is trained."""
    if trained.weights:
        own = operators(rank)
        own = own if shared else [frozen(rank, operator) if operator.tied else operator for operator in own]
        is_last = trained.gradient == "parameters" and operators is not embedding
        return lowest(own, keeps_input=False) if is_last else own
    base = replace(rank, frozen=True)
    still = [frozen(base, operator) for operator in operators(base)]
    return [forward_only(operator) for operator in still] if trained.gradient == "none" else still


def _kept_result(rank: RankShapes, operator: Operator) -> Operator:
    """A fused attention kernel needs its result for its own backward pass, whether or not the product after it keeps it."""
    plan = rank.resolved
    keeps = label_of(operator) in ("attention output", "cross output") and plan.fused_attention
    by_itself = plan.fp8 is not None and not rank.kernels.torchao  # `strategies.layers.attention.self_attention` keeps it then
    return replace(operator, for_weights=()) if keeps and not by_itself else operator
