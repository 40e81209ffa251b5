"""Mixture of experts in place of the MLP: router, dispatch, experts, combine, and shared experts beside them.

Shazeer et al. 2017, arXiv:1701.06538. Work follows Megatron-LM's all-to-all dispatcher without dropping
(megatron/core/transformer/moe/token_dispatcher.py):
* the router's matrix is whole on every rank; its scores are a softmax, of which the `chosen` largest are kept;
* dispatch copies each token once per chosen expert, in the order of experts; combine adds the copies, weighted, and keeps them
  for the gradient of the weights;
* experts are cut by tp as an MLP is; their products are batched, one per expert, and tokens spread evenly over the experts.
  Rows per expert are rounded up for the price, not for the FLOPs.

Expert parallelism (GShard, arXiv:2006.16668): the experts of a layer are spread over ep of the dp ranks. An all-to-all takes the
copies to the ranks of their experts and another takes the results back: chosen · tokens · hidden elements each, forward and
backward. `plan.imbalance` is what the busiest rank has relative to the mean: all ranks are played as if they had so much.
With sequence parallelism a tp rank routes its own tokens; copies are gathered over tp before the experts and reduce-scattered
after them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sim.program import Kernel
from strategies.layers.overlap import Items
from strategies.layers.pieces import Piece, Share, column_linear, pointwise, row_linear, whole_linear
from strategies.model import Experts

INPUT = "mlp input"


def mixture(share: Share, moe: Experts) -> list[Piece]:
    """The pieces of a layer's mixture, in the order of the forward pass, after its norm."""
    model, rows = share.model, _Rows(share, moe)
    width = moe.ffn * (2 if model.gated else 1)
    elements = rows.held * moe.ffn // share.tp
    router = whole_linear(share, "router", share.parted, moe.experts, share.tokens // share.parted, moe.router_bias, INPUT)
    scores = share.parted * moe.experts
    routed = [
        router,
        pointwise(share, "router softmax", scores, scores, saved="router scores"),
        _dispatch(share, rows),
        _experts(share, rows, "expert up", model.hidden, width, columns=True),
        pointwise(share, "expert activation", elements * width // moe.ffn, elements, saved="expert up output"),
        _experts(share, rows, "expert down", moe.ffn, model.hidden, columns=False),
        _combine(share, rows),
    ]
    return [*routed, *_shared(share, moe), _sums(share, branches=2 + bool(moe.shared))]


class _Rows:
    """Copies of tokens: `own` that this rank dispatches, `held` by its experts (at ep > 1 of the busiest rank)."""

    def __init__(self, share: Share, moe: Experts) -> None:
        plan = share.resolved.plan
        self.moe, self.experts = moe, moe.experts // plan.ep
        self.own, whole = share.parted * moe.chosen, share.tokens * moe.chosen
        self.held = math.ceil(whole * plan.imbalance)
        self.busy = max(1, min(self.experts, self.held))  # experts that have anything to do
        self.each = math.ceil(self.held / self.busy)  # copies of one of them


def _moved(share: Share, rows: _Rows, label: str) -> tuple[Items, Items]:
    """(copies to their experts, results back); the gradients' ways are the same the other way round."""
    plan, hidden = share.resolved.plan, share.element * share.model.hidden
    swap = share.along("ep", plan.ep, "all_to_all", label, rows.own * hidden * plan.imbalance)
    if not plan.sequence_parallel:
        return swap, swap
    gather = share.collective("all_gather", label, rows.held * hidden)
    return (*swap, *gather), (*share.collective("reduce_scatter", label, rows.held * hidden), *swap)


def _dispatch(share: Share, rows: _Rows) -> Piece:
    """Copy each token for each of its experts; backward, add the gradients of the copies."""
    hidden = share.model.hidden
    moved = share.element * hidden * (share.parted + rows.own)
    there, back = _moved(share, rows, "dispatch")
    whole = () if share.resolved.plan.sequence_parallel else share.reduce("dispatch gradient")
    return Piece(
        forward=(share.memory("dispatch", "forward", moved), *there),
        input_gradient=(*back, share.memory("dispatch", "backward", moved), *whole),
        temporary=share.element * hidden * (rows.own + rows.held),
    )


def _combine(share: Share, rows: _Rows) -> Piece:
    """Add the results of each token's experts, weighted; backward, copy the gradient and weigh it (two reads, one write)."""
    hidden = share.model.hidden
    copies, tokens = share.element * hidden * rows.own, share.element * hidden * share.parted
    there, back = _moved(share, rows, "combine")
    whole = () if share.resolved.plan.sequence_parallel else share.reduce("combine")
    return Piece(
        forward=(*back, share.memory("combine", "forward", copies + tokens), *whole),
        input_gradient=(share.memory("combine", "backward", 2 * copies + tokens), *there),
        saved={"expert results": copies},
        temporary=share.element * hidden * (rows.own + rows.held),
    )


def _experts(share: Share, rows: _Rows, label: str, inputs: int, outputs: int, columns: bool) -> Piece:
    """A matrix of every expert on this rank, cut by columns or rows: one batched product."""
    bias, tp = share.model.mlp_bias, share.tp
    k, n = (inputs, outputs // tp) if columns else (inputs // tp, outputs)
    weight = share.weight_gemm(f"{label} weight", n, k, rows.each, rows.busy)
    sums = (share.memory(f"{label} bias", "backward", share.element * rows.held * n),) if bias else ()
    parameters, whole = rows.experts * n * (k + bias), rows.experts * n * (bias and not columns)
    return Piece(
        forward=(_exact(share.gemm(label, "forward", rows.each, n, k, rows.busy), rows),),
        input_gradient=(_exact(share.gemm(label, "backward", rows.each, k, n, rows.busy), rows),),
        weight_gradient=(_exact(weight, rows), *sums),
        saved={f"{label} input": share.element * rows.held * k},
        temporary=share.element * rows.held * k,
        parameters=parameters,
        replicated=whole,
        experts=parameters if share.resolved.plan.ep > 1 else 0,
        flops=2.0 * share.tokens * rows.moe.chosen * inputs * outputs,
    )


def _exact(kernel: Kernel, rows: _Rows) -> Kernel:
    """The kernel with the FLOPs of the copies that there are, without those that rounding up has added."""
    return replace(kernel, flops=kernel.flops / (rows.each * rows.busy) * rows.held)


def _shared(share: Share, moe: Experts) -> list[Piece]:
    """Shared experts are one MLP of their joint size."""
    model, ffn = share.model, moe.shared * moe.shared_ffn
    if not ffn:
        return []
    width, elements = ffn * (2 if model.gated else 1), share.tokens * ffn // share.tp
    return [
        column_linear(share, "shared up", width, model.mlp_bias, source=INPUT),
        pointwise(share, "shared activation", elements * width // ffn, elements, saved="shared up output"),
        row_linear(share, "shared down", ffn, model.mlp_bias),
    ]


def _sums(share: Share, branches: int) -> Piece:
    """Results of routed and shared experts are added; backward, the gradients of all that read the norm's output."""
    add = share.memory("mixture sum", "forward", 3 * share.element * share.stream)
    back = share.memory("mixture sum", "backward", 3 * share.element * share.stream)
    return Piece((add,) * (branches - 2), (back,) * (branches - 1))
