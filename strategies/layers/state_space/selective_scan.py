"""Mamba's mixer (Gu and Dao 2023, arXiv:2312.00752): a matrix in, a convolution, matrices that choose steps, B and C of it, the
selective scan, a matrix out.

The scan is one kernel, which keeps states in registers and goes over the tokens once (section 3.3.2: what it moves grows
with tokens and channels, not with states): it is priced as a streaming operator of the tensors that it reads and writes
(`state-spaces/mamba`, mamba_ssm/ops/selective_scan_interface.py and csrc/selective_scan):

* forward it reads convolved channels, steps, gate, B and C, and writes the scan's result, and that times the gate;
* backward it reads these, the result and the result's gradient, and writes the gradients of channels, steps and gate, and in
  fp32 those of B and C.

The exponentials, one per channel, state and token, may bound it instead, which is left out. Mamba and Falcon Mamba run all
of it as one operator (MambaInnerFn, checkpoint_lvl=1): kept are the results of the first matrix, of the second and of the
scan; convolution, steps and the gated result are computed again. With norms that have weights (Jamba) they are operators of
their own, whose results are kept.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.layers.operators import Operator, column_linear, row_linear
from strategies.layers.rank_shapes import FLOAT, RankShapes

CONVOLVED, STEPS = "state space choice input", "scan steps"


def selective_scan(rank: RankShapes, source: str = "") -> list[Operator]:
    """The pieces of the mixer, in the order of the forward pass. source: name of its input where others read it too."""
    own = rank.model.state_space
    assert own is not None
    assert own.step_rank is not None
    apart = own.step_norms is True
    tokens, element = rank.tokens, rank.element
    into = column_linear(rank, "state space in", own.projected, own.bias, source=source)
    choice = column_linear(rank, "state space choice", own.chosen, bias=False, inputs=own.channels)
    steps = column_linear(rank, "state space steps", own.channels, bias=False, inputs=own.step_rank)
    out = row_linear(rank, "state space out", own.channels, own.output_bias)
    if not apart:  # computed again: the convolution's result, the steps, what is multiplied by the gate
        choice, out = replace(choice, saved={}, for_weights=()), replace(out, saved={}, for_weights=())
    normed = [_norms(rank)] if own.step_norms else []
    saved = {"scan input": float(element * tokens * own.projected)}
    convolution = Operator(
        forward=(rank.memory("scan convolution", "forward", element * tokens * 2 * own.channels),),
        input_gradient=(rank.memory("scan convolution", "backward", element * tokens * 3 * own.channels),),
        saved=saved,
    )
    return [into, convolution, choice, *normed, steps, _scan(rank, apart), out]


def _norms(rank: RankShapes) -> Operator:
    """Norms of what steps are made of, of B and of C."""
    own = rank.model.state_space
    assert own is not None
    size = rank.element * rank.tokens * own.chosen
    there, back = rank.reduction("scan norms", "forward", 2 * size), rank.reduction("scan norms", "backward", 3 * size)
    return Operator((there,), (back,), saved={"scan norms input": float(size)} if own.step_norms is True else {})


def _scan(rank: RankShapes, apart: bool) -> Operator:
    """The scan, with all parameters that are no matrices. apart: nothing is computed again."""
    own = rank.model.state_space
    assert own is not None
    assert own.step_rank is not None
    tokens, channels, both = rank.tokens, rank.element * own.channels, 2 * rank.element * own.state
    again = (
        rank.memory("scan convolution", "backward", tokens * 2 * channels),
        rank.gemm("state space steps", "backward", tokens, own.channels, own.step_rank),
    )
    written = 3 * channels + 2 * FLOAT * own.state + (0 if apart else channels)
    result, kept = float(tokens * channels), float(tokens * both)
    return Operator(
        forward=(rank.memory("selective scan", "forward", tokens * (5 * channels + both)),),
        input_gradient=(
            *(() if apart else again),
            rank.memory("selective scan", "backward", tokens * (5 * channels + both + written)),
        ),
        weight_gradient=rank.vectors("scan parameters", sum(_elements(shape) for shape in own.vectors)),
        saved={"scan B and C": kept, "scan result": result} | ({STEPS: result} if apart else {}),
        temporary=3.0 * result,
        shapes=own.vectors,
        flops=own.scan_flops(tokens),
    )


def _elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)
