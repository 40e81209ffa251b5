"""What stands before the first layer and after the last: embeddings, and the final norm, the language-model head and the loss.

The vocabulary is cut over the tp ranks (arXiv:1909.08053 section 3). Token ids and labels are inputs of the step and not counted.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.frameworks import passes
from strategies.frameworks.megatron_2021.small_kernels import lookup, mean, targets
from strategies.frameworks.pytorch import operators as eager
from strategies.layers.operators import Operator, column_linear, norm, pointwise, whole_linear
from strategies.layers.rank_shapes import FLOAT, RankShapes
from strategies.layers.tensor_overlap import Items


def embedding(share: RankShapes) -> list[Operator]:
    """Token, position and segment embedding, the norm that may follow (BERT), and dropout."""
    model = share.model
    pieces = [lookup(share), _tokens(share)]
    if model.positions == "learned":
        rows = share.parted // share.batch  # positions of this rank
        pieces.append(_added_rows(share, "position embedding", rows, model.context))
    if model.token_types:
        pieces.append(_added_rows(share, "segment embedding", model.token_types, model.token_types))
    if model.embedding_norm:
        pieces.append(norm(share, "embedding norm"))
    if share.dropout:
        moved = (2 * share.element + 1) * share.stream
        work = [(share.memory("embedding dropout", phase, moved),) for phase in ("forward", "backward")]
        pieces.append(Operator(work[0], work[1], saved={"embedding dropout mask": share.stream}))
    return pieces


def _tokens(share: RankShapes) -> Operator:
    """Every rank looks up all tokens, zero where another rank has the row; the sum is whole. The gradient is of all rows: zeros,
    to which those of the tokens are added (PyTorch's embedding_dense_backward), and is then added to what there is of it.
    """
    parameters, size = share.rows * share.model.hidden, share.element * share.tokens * share.model.hidden
    zeros = share.memory("token embedding zeros", "backward", share.element * parameters)
    scatter = share.memory("token embedding", "backward", 3 * size)
    return Operator(
        forward=(share.memory("token embedding", "forward", 2 * size), *share.reduce("token embedding", "forward", fused=False)),
        weight_gradient=(
            *share.gather("token embedding gradient", "backward", fused=False),
            *share.made("token embedding", "backward", share.element * parameters),
            zeros,
            scatter,
            *share.vectors("token embedding", parameters),
        ),
        temporary=size,
        shapes=((share.rows, share.model.hidden),),
    )


def _added_rows(share: RankShapes, label: str, rows: int, parameters: int) -> Operator:
    """An embedding that is whole on every rank, added to the residual stream; `rows` of it are read."""
    hidden, size = share.model.hidden, share.element * share.stream
    gradient = share.memory(label, "backward", size + share.accumulated(rows * hidden))
    forward = share.memory(label, "forward", 2 * size + share.element * rows * hidden)
    return Operator((forward,), weight_gradient=(gradient,), shapes=((parameters, hidden),), replicated=parameters * hidden)


def head(share: RankShapes) -> list[Operator]:
    """Final norm, BERT's transform and pooler, the matrix hidden → vocabulary, the loss; each if the model has it."""
    model = share.model
    pieces = [norm(share, "final norm")] if model.final_norm else []
    if model.pooler:  # on the first token of each sequence
        size = share.batch * model.hidden
        pieces += [
            whole_linear(share, "pooler", share.batch, model.hidden),
            pointwise(share, "pooler tanh", size, size, "pooler output"),
        ]
    if model.pooler_classes:
        pieces.append(whole_linear(share, "classifier", share.batch, model.pooler_classes))
    if model.head_transform:
        gelu = pointwise(share, "head activation", share.stream, share.stream, "head transform output")
        pieces += [
            whole_linear(share, "head transform", share.parted, model.hidden, share.tokens // share.parted),
            gelu,
            norm(share, "head norm"),
        ]
    if model.head:
        matrix = column_linear(share, "head", model.padded_vocabulary, model.head_bias, share.rows)
        if model.tied:  # counted with the embedding
            matrix = replace(matrix, shapes=matrix.shapes[1:], tied=matrix.shapes[:1])
        made_by = share.resolved.loss or ("torch" if share.eager else "")
        loss = {"fused": _fused_loss, "torch": eager.loss}.get(made_by, _loss)(share)
        before, after = targets(share), mean(share)
        forward = before.forward + loss.forward + after.forward + _metrics(share)
        backward = after.input_gradient + loss.input_gradient + before.input_gradient
        whole = replace(loss, forward=forward, input_gradient=backward)
        pieces += [matrix, whole]
    return pieces


def _fused_loss(share: RankShapes) -> Operator:
    """Logits are kept as they are, and their gradient is as large; what is summed in fp32 is a number per token."""
    logits, ways = share.tokens * share.rows, passes.fused_loss(share.element)
    forward, backward = share.run("loss", "forward", logits, ways.forward), share.run("loss", "backward", logits, ways.backward)
    size = float(share.element * logits)
    return Operator(forward, backward, saved={"logits": size}, temporary=size, before=0.0)


def _metrics(share: RankShapes) -> Items:
    """Cross-entropy that is only looked at: llm-foundry's come after the backward pass, when there is room for their copies."""
    logits, ways = share.tokens * share.rows, passes.pytorch_loss(share.element)
    return share.run("loss metrics", "forward", logits, ways.forward) * share.kernels.loss_metrics


def _loss(share: RankShapes) -> Operator:
    """Cross-entropy of logits that are cut over the vocabulary (Megatron-LM): three small all-reduces of a number per token.

    The three come between the passes over the logits; the probabilities stay for backward.
    """
    logits, cast = share.tokens * share.rows, share.element != FLOAT
    small = {
        name: share.collective("all_reduce", f"loss {name}", FLOAT * share.tokens, FLOAT) for name in ("maximum", "target", "sum")
    }
    plan = share.resolved
    operators = plan.loss == "operators" or plan.deterministic  # which Megatron-LM does not let be fused
    ways = passes.operator_loss(share.element) if operators else share.kernels.loss(share.element)
    made = share.made("loss", "forward", FLOAT * logits) if cast else ()
    kernels = (*made, *share.run("loss", "forward", logits, ways.forward))
    gradient = share.made("loss", "backward", share.element * logits) if cast else ()
    cut = 1 + next(place for place, kernel in enumerate(kernels) if kernel.kind == "reduction")  # the maximum
    return Operator(
        forward=(*kernels[:cut], *small["maximum"], *kernels[cut:], *small["target"], *small["sum"]),
        input_gradient=(*gradient, *share.run("loss", "backward", logits, ways.backward)),
        saved={"loss probabilities": FLOAT * logits},
        temporary=share.element * logits * cast,  # logits, later their gradient; in fp32 both are made in place
    )
