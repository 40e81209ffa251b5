"""Small kernels of Megatron-LM of 2020 to 2022 (`kernels: apex`) besides the layers' own: each a launch, of hardly any bytes.

Each is an operator in a function of those sources, counted there:
* every forward pass of every stage gets its batch (pretrain_gpt.py get_batch): its sizes are copied to the GPU, broadcast over
  the tp ranks and copied back, then the tokens are copied and broadcast (megatron/mpu/data.py broadcast_data); tokens and labels
  are cut apart; mask, loss mask and positions are made (megatron/utils.py get_ltor_masks_and_position_ids);
* with tp, tokens of other ranks' rows are masked before the embedding and after it (megatron/mpu/layers.py);
* the loss looks up the logit of each target, masks logits of other ranks and subtracts it, and backward its gradient
  (megatron/mpu/cross_entropy.py); the mean over tokens is taken, divided by the number of microbatches, averaged over the dp
  ranks for the log, and scaled (pretrain_gpt.py loss_func, megatron/utils.py average_losses_across_data_parallel_group).

Broadcasts and the average of the logged loss count as launches; what these few bytes take on the links is left out.
"""

from __future__ import annotations

from sim.program import Kernel
from strategies.layers.operators import Operator
from strategies.layers.rank_shapes import FLOAT, RankShapes, called

INDEX = 8  # bytes of a token's number
COPIES, BROADCASTS = 3, 2  # sizes there and back and the tokens; the sizes and the tokens


def batch(rank: RankShapes) -> tuple[Kernel, ...]:
    """What a stage runs before a forward pass."""
    if not rank.kernels.small_kernels:
        return ()
    tokens, mask = INDEX * rank.tokens, FLOAT * rank.sequence**2
    moved = (
        *(tokens,) * (COPIES + BROADCASTS),
        2 * tokens,
        2 * tokens,  # tokens and labels
        mask,
        2 * mask,
        mask,
        tokens,
        tokens,  # ones, the lower triangle, its comparison; loss mask, positions
    )
    return called(tuple(rank.memory("batch", "forward", each) for each in moved))


def lookup(rank: RankShapes) -> Operator:
    """Masks of the embedding's tokens: two comparisons and their union, copy, difference, fill; and a fill of the result."""
    if not rank.kernels.small_kernels or rank.tp == 1:
        return Operator()
    moved = (*(2 * INDEX * rank.tokens,) * 6, rank.element * rank.tokens)
    return Operator(called(tuple(rank.memory("token mask", "forward", each) for each in moved)))


def targets(rank: RankShapes) -> Operator:
    """Targets of the cross-entropy: the embedding's six on targets, their places, two reads, a copy, a fill, logarithm and
    difference; backward places, two of the mask, read, difference and write.
    """
    return _launches(rank, "loss targets", 12, 6, INDEX * rank.tokens)


def mean(rank: RankShapes) -> Operator:
    """The mean of the loss: product with its mask, two sums, quotient, its part of the step, scale; copy, join, sum and quotient
    for the log; backward quotient, quotient, product.
    """
    return _launches(rank, "mean loss", 10, 3, FLOAT * rank.tokens)


def _launches(rank: RankShapes, label: str, forward: int, backward: int, moved: int) -> Operator:
    if not rank.kernels.small_kernels:
        return Operator()
    there, back = (called((rank.memory(label, phase, moved),)) for phase in ("forward", "backward"))
    return Operator(there * forward, back * backward)
