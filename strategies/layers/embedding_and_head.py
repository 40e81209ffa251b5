"""What stands before the first layer and after the last: embeddings, and the final norm, the language-model head and the loss.

The vocabulary is cut over the tp ranks (arXiv:1909.08053 section 3). Token ids and labels are inputs of the step and not counted.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.frameworks import passes
from strategies.frameworks.megatron_2021.small_kernels import lookup, mean, targets
from strategies.frameworks.pytorch import operators as eager
from strategies.layers.model_ends import patch_embedding, relative_positions, softcap
from strategies.layers.operators import Operator, column_linear, norm, pointwise, replicated_linear
from strategies.layers.rank_shapes import FLOAT, RankShapes, called
from strategies.layers.tensor_overlap import Items


def embedding(rank: RankShapes) -> list[Operator]:
    """Token, position and segment embedding, the norm that may follow (BERT), and dropout."""
    model = rank.model
    operators = [lookup(rank), *(patch_embedding(rank) if model.patches else [token_embedding(rank)])]
    if model.family == "encoder_decoder":  # the same matrix for the decoder's tokens
        operators[1:] = [token_embedding(RankShapes(model.as_encoder, rank.resolved)), replace(token_embedding(rank), shapes=())]
        operators.append(relative_positions(rank))
    if model.embedding_scale:
        operators.append(pointwise(rank, "embedding scale", rank.stream, rank.stream))
    if model.positions == "learned":
        rows = rank.local_tokens // rank.batch  # positions of this rank
        operators.append(_added_rows(rank, "position embedding", rows, model.learned_rows))
    if model.token_types:
        operators.append(_added_rows(rank, "segment embedding", model.token_types, model.token_types))
    if model.embedding_norm:
        operators.append(norm(rank, "embedding norm"))
    if rank.dropout:
        moved = (2 * rank.element + 1) * rank.stream
        work = [(rank.memory("embedding dropout", phase, moved),) for phase in ("forward", "backward")]
        operators.append(Operator(work[0], work[1], saved={"embedding dropout mask": rank.stream}))
    return operators


def token_embedding(rank: RankShapes) -> Operator:
    """Every rank looks up all tokens, zero where another rank has the row; the sum is whole. The gradient is of all rows: zeros,
    to which the tokens' gradients are added (PyTorch's embedding_dense_backward), and is then added to earlier microbatches'.
    """
    parameters, size = rank.rows * rank.model.hidden, rank.element * rank.tokens * rank.model.hidden
    zeros = rank.memory("token embedding zeros", "backward", rank.element * parameters)
    scatter = rank.memory("token embedding", "backward", 3 * size)
    return Operator(
        forward=(rank.memory("token embedding", "forward", 2 * size), *rank.reduce("token embedding", "forward", fused=False)),
        weight_gradient=(
            *rank.gather("token embedding gradient", "backward", fused=False),
            *rank.fills("token embedding", "backward", rank.element * parameters),
            zeros,
            scatter,
            *rank.vectors("token embedding", parameters),
        ),
        temporary=size,
        shapes=((rank.rows, rank.model.hidden),),
    )


def _added_rows(rank: RankShapes, label: str, rows: int, parameters: int) -> Operator:
    """An embedding that is whole on every rank, added to the residual stream; `rows` of it are read."""
    hidden, size = rank.model.hidden, rank.element * rank.stream
    gradient = rank.memory(label, "backward", size + rank.accumulated(rows * hidden))
    forward = rank.memory(label, "forward", 2 * size + rank.element * rows * hidden)
    return Operator((forward,), weight_gradient=(gradient,), shapes=((parameters, hidden),), replicated=parameters * hidden)


def head(rank: RankShapes) -> list[Operator]:
    """Final norm, BERT's transform and pooler, the matrix hidden → vocabulary, the loss; each if the model has it."""
    model = rank.model
    operators = [norm(rank, "final norm")] if model.final_norm else []
    if model.pooler:  # on the first token of each sequence
        size = rank.batch * model.hidden
        operators += [
            replicated_linear(rank, "pooler", rank.batch, model.hidden),
            pointwise(rank, "pooler tanh", size, size, "pooler output"),
        ]
    if model.pooler_classes:
        operators.append(replicated_linear(rank, "classifier", rank.batch, model.pooler_classes))
    if model.classes:
        operators.append(replicated_linear(rank, "classifier", rank.batch, model.classes))
    if model.head_transform:
        gelu = pointwise(rank, "head activation", rank.stream, rank.stream, "head transform output")
        operators += [
            replicated_linear(rank, "head transform", rank.local_tokens, model.hidden, rank.tokens // rank.local_tokens),
            gelu,
            norm(rank, "head norm"),
        ]
    if model.head:
        matrix = column_linear(rank, "head", model.padded_vocabulary, model.head_bias, rank.rows)
        if model.tied:  # counted with the embedding
            matrix = replace(matrix, shapes=matrix.shapes[1:], tied=matrix.shapes[:1])
        made_by = rank.resolved.loss or ("torch" if rank.eager else "")
        loss = {"fused": _fused_loss, "torch": eager.loss}.get(made_by, _loss)(rank)
        before, after = targets(rank), mean(rank)
        forward = before.forward + loss.forward + after.forward + _metrics(rank)
        backward = after.input_gradient + loss.input_gradient + before.input_gradient
        loss_and_logits = replace(loss, forward=forward, input_gradient=backward)
        operators += [matrix, *(softcap(rank) if model.logit_softcap else []), loss_and_logits]
    return operators


def _fused_loss(rank: RankShapes) -> Operator:
    """Logits are kept as they are, and their gradient is as large; what is summed in fp32 is a number per token."""
    logits, ways = rank.tokens * rank.rows, passes.fused_loss(rank.element)
    forward, backward = rank.run("loss", "forward", logits, ways.forward), rank.run("loss", "backward", logits, ways.backward)
    size = float(rank.element * logits)
    return Operator(forward, backward, saved={"logits": size}, temporary=size, before=0.0)


def _metrics(rank: RankShapes) -> Items:
    """Cross-entropy that is only looked at: llm-foundry's come after the backward pass, when there is room for their copies."""
    logits, ways = rank.tokens * rank.rows, passes.pytorch_loss(rank.element)
    return rank.run("loss metrics", "forward", logits, ways.forward) * rank.kernels.loss_metrics


def _loss(rank: RankShapes) -> Operator:
    """Cross-entropy of logits that are cut over the vocabulary (Megatron-LM): three small all-reduces of a number per token.

    The three come between the passes over the logits; the probabilities stay for backward.
    """
    logits, computed = rank.tokens * rank.rows, rank.element if rank.kernels.fp16_loss else FLOAT
    cast = rank.element != computed
    small = {
        name: rank.collective("all_reduce", f"loss {name}", FLOAT * rank.tokens, FLOAT) for name in ("maximum", "target", "sum")
    }
    plan = rank.resolved
    by_operators = plan.loss == "operators" or plan.deterministic  # which Megatron-LM does not let be fused
    ways = passes.operator_loss(rank.element, computed) if by_operators else rank.kernels.loss(rank.element)
    fills = rank.fills("loss", "forward", computed * logits) if cast else ()
    forward, backward = rank.run("loss", "forward", logits, ways.forward), rank.run("loss", "backward", logits, ways.backward)
    if by_operators or rank.kernels.small_kernels:
        forward, backward = called(forward), called(backward)
    kernels = (*fills, *forward)
    gradient = rank.fills("loss", "backward", rank.element * logits) if cast else ()
    cut = 1 + next(place for place, kernel in enumerate(kernels) if kernel.kind == "reduction")  # the maximum
    return Operator(
        forward=(*kernels[:cut], *small["maximum"], *kernels[cut:], *small["target"], *small["sum"]),
        input_gradient=(*gradient, *backward),
        saved={"loss probabilities": computed * logits},
        temporary=rank.element * logits * cast,  # logits, later their gradient; without a cast both are made in place
    )
