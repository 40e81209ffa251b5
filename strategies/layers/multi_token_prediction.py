"""Multi-token prediction: layers after the last that predict tokens further ahead (DeepSeek-V3, arXiv:2412.19437, section 2.2).

Each depth norms the hidden state of the one before and the embedding of the next token, joins them and maps 2 · hidden features
to hidden; a layer like the model's last follows, then a norm of its own, and the model's head and loss. Embedding and head are
the model's own matrices. Work follows Megatron-Core's --mtp-num-layers (megatron/core/transformer/multi_token_prediction.py): all
depths are on the last stage of a pipeline, which has a copy of the embedding where the first one is on another rank; the matrix
is cut by columns over tp ranks, and its result gathered. All tokens of a sequence pass, the rolled-over last ones too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from strategies.layers import gradients
from strategies.layers.embedding_and_head import head, token_embedding
from strategies.layers.layer_cost import LayerCost, part_of
from strategies.layers.operators import Operator, column_linear, norm, pointwise
from strategies.layers.rank_shapes import RankShapes


def with_prediction_layers(rank: RankShapes, layer: Sequence[Operator], recompute: str) -> LayerCost:
    """The head of a model with all its prediction layers before it. layer: the operators of its last layer."""
    costs: list[LayerCost] = []
    for depth in range(rank.model.mtp):
        own_layer = RankShapes(rank.model.layer_models[-1], rank.resolved)
        costs += [
            part_of("prediction input", _input(rank, first=not depth), rank, "none"),
            part_of("layer", layer, own_layer, recompute),
            part_of("head", _head(rank, first=not depth), rank, "none", int(rank.model.head)),
        ]
    last = part_of("head", _head(rank, first=False), rank, "none", int(rank.model.head))
    return in_sequence((*costs, last), rank.resolved.bytes_per_gradient)


def _input(rank: RankShapes, first: bool) -> list[Operator]:
    """What makes the input of a depth's layer."""
    hidden, tokens = rank.model.hidden, rank.tokens
    lookup = token_embedding(rank)
    # a copy of the embedding's matrix, where that is on another rank: one for all depths
    lookup = replace(lookup, shapes=(), tied=lookup.shapes if first else ())
    matrix = column_linear(rank, "prediction projection", hidden, False, inputs=2 * hidden)
    size = float(rank.element * tokens * hidden)
    gathered = rank.collective("all_gather", "prediction projection result", size)
    back = rank.gather("prediction projection gradient", "backward", fused=False)
    return [
        lookup,
        norm(rank, "prediction embedding norm"),
        norm(rank, "prediction hidden norm", residual=True),
        pointwise(rank, "prediction input", 2 * rank.stream, 2 * rank.stream),
        replace(
            matrix,
            forward=(*matrix.forward, *gathered),
            input_gradient=(*back, *matrix.input_gradient),
            both_gradients=(*back, *matrix.both_gradients) if matrix.both_gradients else (),
            temporary=matrix.temporary + size * (rank.tp > 1),
        ),
    ]


def _head(rank: RankShapes, first: bool) -> list[Operator]:
    """Norm, head and loss; the head's matrix counts once, where the backward pass completes its gradient: in the first depth."""
    matrix = (rank.rows, rank.model.hidden)
    own = [replace(operator, tied=()) for operator in head(rank)]
    if first:
        return own
    return [replace(each, shapes=tuple(shape for shape in each.shapes if shape != matrix)) for each in own]


def in_sequence(parts: Sequence[LayerCost], width: int) -> LayerCost:
    """Parts that follow each other as one, which is called as the last is. Each recomputes its own. width: bytes per parameter of
    gradients.
    """
    back, last = parts[::-1], parts[-1]
    completed: tuple[gradients.CompletedGradient, ...] = ()
    for part in back:
        completed = gradients.before(completed, len(part.backward), len(part.weight_gradient)) + part.gradients
    after = [sum(later.saved for later in parts[number + 1 :]) for number in range(len(parts))]  # not there yet, or gone
    unmade = [sum(earlier.parameters - earlier.experts for earlier in parts[:number]) for number in range(len(parts))]
    unheld = [sum(earlier.held for earlier in parts[:number]) for number in range(len(parts))]
    losses = [float("-inf") if part is last else part.loss_workspace for part in parts]  # the last one's begins the pass
    whole = [max(part.backward_workspace, loss) for part, loss in zip(parts, losses, strict=True)]
    making = [
        max(part.gradient_workspace, loss - width * (part.parameters - part.experts))
        for part, loss in zip(parts, losses, strict=True)
    ]
    halves = [max(part.input_gradient_workspace, loss) for part, loss in zip(parts, losses, strict=True)]

    def most(own: Sequence[float], besides: Sequence[float]) -> float:
        return max(size + part.restored - gone for part, size, gone in zip(parts, own, besides, strict=True))

    with_gradients = [gone + width * each for gone, each in zip(after, unmade, strict=True)]
    held = [gone + each for gone, each in zip(after, unheld, strict=True)]
    sums = "saved stranded parameters replicated experts fp8_parameters fp8_expert_parameters model_flops recomputed_flops"
    more = "held frozen_bytes partial spared_flops"
    return replace(
        last,
        forward=tuple(chain.from_iterable(part.forward for part in parts)),
        input_gradient=tuple(chain.from_iterable((*part.recompute, *part.input_gradient) for part in back)),
        weight_gradient=tuple(chain.from_iterable(part.weight_gradient for part in back)),
        recompute=(),
        backward=tuple(chain.from_iterable(part.backward for part in back)),
        gradients=completed,
        restored=0.0,
        temporary=max(part.temporary - gone for part, gone in zip(parts, after, strict=True)),
        backward_workspace=most(whole, after),
        gradient_workspace=most(making, with_gradients),
        input_gradient_workspace=most(halves, held),
        frozen_shapes=tuple(chain.from_iterable(part.frozen_shapes for part in parts)),
        **{name: sum(getattr(part, name) for part in parts) for name in f"{sums} {more}".split()},
    )
