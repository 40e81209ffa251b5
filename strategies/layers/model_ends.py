"""What few models have before the first layer or after the last: patches of images, relative positions, a tanh of logits."""

from __future__ import annotations

from strategies.layers.operators import Operator, pointwise
from strategies.layers.rank_shapes import RankShapes


def patch_embedding(rank: RankShapes) -> list[Operator]:
    """A convolution whose stride is its size: a product of patches and a matrix, whole on every tp rank, and its bias; then the
    class token is put before them. Images have no gradient. PyTorch keeps the image, not the patches.
    """
    patches, hidden = rank.model.patches, rank.model.hidden
    assert patches is not None
    rows = rank.batch * patches.count
    size = rank.element * rows * hidden
    product = rank.gemm("patch embedding", "forward", rows, hidden, patches.pixels)
    copied = rank.memory("image patches", "forward", 2 * rank.element * rows * patches.pixels)
    bias = (rank.reduction("patch embedding bias", "backward", size), *rank.vectors("patch embedding bias", hidden))
    matrix = Operator(
        forward=(copied, product),
        weight_gradient=(*rank.weight_gemm("patch embedding weight", hidden, patches.pixels, rows), *bias),
        saved={"images": rank.element * rank.batch * patches.image_numbers},
        temporary=rank.element * rows * patches.pixels,
        shapes=((hidden, patches.pixels), (hidden,)),
        replicated=hidden * (patches.pixels + 1),
        flops=2.0 * rows * patches.pixels * hidden,
    )
    if not patches.class_token:
        return [matrix]
    joined = rank.memory("class token", "forward", 2 * size)
    gradient = (rank.memory("class token", "backward", rank.element * rank.batch * hidden), *rank.vectors("class token", hidden))
    return [matrix, Operator((joined,), weight_gradient=gradient, shapes=((hidden,),), replicated=hidden)]


def relative_positions(rank: RankShapes) -> Operator:
    """T5's learned numbers of distances, of which a matrix per head is made for each stack and kept for all its layers; tp ranks
    have their heads'.
    """
    model, buckets = rank.model, rank.model.position_rows or 0
    encoder = RankShapes(model.as_encoder, rank.resolved)
    pairs = rank.heads * (encoder.sequence**2 + rank.sequence**2)
    there, back = (rank.memory("relative positions", phase, 2 * rank.element * pairs) for phase in ("forward", "backward"))
    return Operator(
        forward=(there,),
        weight_gradient=(back,),
        saved={"relative positions": rank.element * pairs},
        shapes=((buckets, rank.heads),) * 2,
    )


def softcap(rank: RankShapes) -> list[Operator]:
    """Logits divided, through a tanh and multiplied: a kernel each in eager PyTorch, otherwise one; the tanh's result is kept."""
    logits = rank.tokens * rank.rows
    kept = "capped logits"
    if not rank.eager:
        return [pointwise(rank, "logit softcap", logits, logits, saved=kept)]
    return [
        pointwise(rank, "logit division", logits, logits),
        pointwise(rank, "logit tanh", logits, logits, saved=kept),
        pointwise(rank, "logit product", logits, logits),
    ]
