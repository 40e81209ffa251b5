"""Mixture of experts in place of the MLP: router, dispatch, experts, combine, and shared experts beside them.

Shazeer et al. 2017, arXiv:1701.06538. Work follows Megatron-LM's all-to-all dispatcher without dropping
(megatron/core/transformer/moe/token_dispatcher.py):
* the router's matrix is whole on every rank; its scores are a softmax, of which the `chosen` largest are kept;
* dispatch copies each token once per chosen expert, in the order of experts; combine adds the copies. Their weights are factors
  of the experts' activation (TEGroupedMLP in megatron/core/transformer/moe/experts.py, since 2025); other kernels than
  Megatron-LM's weigh the results in combine, and keep them for the gradient of the weights;
* experts are cut by tp as an MLP is; their products are batched, one per expert, and tokens spread evenly over the experts.
  Rows per expert are rounded up for the price, not for the FLOPs.

Expert parallelism (GShard, arXiv:2006.16668): the experts of a layer are spread over ep of the dp ranks. An all-to-all takes the
copies to the ranks of their experts and another takes the results back: chosen · tokens · hidden elements each, forward and
backward. `plan.imbalance` is what the busiest rank has relative to the mean: all ranks are played as if they had so much.
With sequence parallelism a tp rank routes its own tokens; copies are gathered over tp before the experts and reduce-scattered
after them. With `expert_tp: 1` experts are whole, the tp ranks are among the ep ranks, and the all-to-all takes that gather's
place.

With a capacity factor (GShard; Switch, arXiv:2101.03961) an expert takes no more than that many times the mean, and what is above
is dropped; padded to capacity, all experts compute as much. Counted FLOPs of the model are of all copies, dropped or not.

With `ep_nodes` the exchange has two steps (DeepSeek-V3, arXiv:2412.19437, section 3.2.2): a token goes once to each of its
`routed_nodes` nodes, to the rank with the same place in it, and copies go on from there to the ranks of their experts. What has
come over the network is passed on at once: both steps run beside each other (DeepEP's kernels for training do so); how long the
first piece takes is left out.

With `fp8.dispatch` tokens on their way to experts, forward, and gradients of their results on theirs, backward, are cast to fp8
before they are sent; what comes back has 16 bits (the same, section 3.3.2).
"""

from __future__ import annotations

import math
from dataclasses import replace

from sim.program import Collective, Kernel
from strategies.layers.fp8 import Fp8Products
from strategies.layers.operators import Operator, activation, column_linear, pointwise, row_linear, whole_linear
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items, pipelined
from strategies.models.model import Experts
from strategies.plan.options import FP8_WIDTH
from strategies.plan.resolved import NODES

INPUT = "mlp input"


def mixture(share: RankShapes, moe: Experts) -> list[Operator]:
    """The pieces of a layer's mixture, in the order of the forward pass, after its norm."""
    model, rows = share.model, _Rows(share, moe)
    width = moe.ffn * (2 if model.gated else 1)
    elements = rows.held * moe.ffn // rows.tp
    router = whole_linear(share, "router", share.parted, moe.experts, share.tokens // share.parted, moe.router_bias, INPUT)
    scores = share.parted * moe.experts
    routed = [
        _part(router, "router scores"),
        _part(pointwise(share, "router softmax", scores, scores, saved="router scores")),
        _part(_dispatch(share, rows), "expert up input"),
        _part(_experts(share, rows, "expert up", model.hidden, width, columns=True), "expert up output"),
        _part(activation(share, "expert activation", elements, saved="expert up output"), "expert down input", of="moe_act"),
        _part(_experts(share, rows, "expert down", moe.ffn, model.hidden, columns=False), "expert results"),
        _part(_combine(share, rows)),
    ]
    return [*routed, *_shared(share, moe), _part(_sums(share, branches=2 + bool(moe.shared)))]


def _part(piece: Operator, *makes: str, of: str = "") -> Operator:
    """Part of Megatron-LM's module moe, and of a module in it."""
    return replace(piece, modules=("moe", of) if of else ("moe",), makes=makes)


class _Rows:
    """Copies of tokens: `own` that this rank dispatches, `held` by its experts (at ep > 1 of the busiest rank)."""

    def __init__(self, share: RankShapes, moe: Experts) -> None:
        plan = share.resolved
        self.whole = plan.whole_experts
        self.moe, self.tp, self.experts = moe, (1 if self.whole else plan.tp), moe.experts // plan.ep
        limit = plan.capacity_factor or math.inf
        self.load = limit if plan.pad_to_capacity else min(plan.imbalance, limit)  # of the busiest rank, relative to the mean
        self.own = math.ceil(share.parted * moe.chosen * (limit if plan.pad_to_capacity else min(1.0, limit)))
        self.sent = share.parted * moe.chosen * self.load
        self.held = math.ceil((share.parted if self.whole else share.tokens) * moe.chosen * self.load)
        self.busy = max(1, min(self.experts, self.held))  # experts that have anything to do
        self.each = math.ceil(self.held / self.busy)  # copies of one of them


def _moved(share: RankShapes, rows: _Rows, label: str) -> tuple[Items, Items]:
    """(copies to their experts, results back); the gradients' ways are the same the other way round."""
    plan, hidden, narrow = share.resolved, share.model.hidden, _narrow(share)
    there, back = (_swapped(share, rows, label, width) for width in (narrow, share.element))
    if not plan.sequence_parallel or rows.whole:
        return there, back
    gather = share.collective("all_gather", label, narrow * rows.held * hidden, narrow)
    return (*there, *gather), (*share.collective("reduce_scatter", label, share.element * rows.held * hidden), *back)


def _narrow(share: RankShapes) -> int:
    """Bytes of an element on its way to an expert."""
    fp8 = share.resolved.fp8
    return FP8_WIDTH if fp8 is not None and fp8.dispatch else share.element


def _swapped(share: RankShapes, rows: _Rows, label: str, width: int) -> Items:
    """Copies of tokens, in elements of `width` bytes, exchanged between the ranks that have them and those of their experts."""
    plan, size = share.resolved, rows.sent * width * share.model.hidden
    if rows.whole:
        return (Collective("all_to_all", size, "ep", label, plan.algorithm, width=width, along=("tp", "ep")),)
    swap = share.along("ep", plan.ep // plan.ep_nodes, "all_to_all", label, size, width=width)
    if not plan.routed_nodes:
        return swap
    once, across = size / rows.moe.chosen * plan.routed_nodes, f"{label} across nodes"
    return pipelined(Collective("all_to_all", once, "ep", across, plan.algorithm, width=width, along=(NODES,)), swap)


def _dispatch(share: RankShapes, rows: _Rows) -> Operator:
    """Copy each token for each of its experts; backward, add the gradients of the copies."""
    hidden, copies = share.model.hidden, share.parted + rows.own
    there, back = _moved(share, rows, "dispatch")
    cast = Fp8Products(share, "dispatch", 0, 0, _early(share)).taken(share.parted * hidden)
    whole = () if share.resolved.sequence_parallel else share.reduce("dispatch gradient", "backward")
    return Operator(
        forward=(*cast, share.memory("dispatch", "forward", _narrow(share) * hidden * copies), *there),
        input_gradient=(*back, share.memory("dispatch", "backward", share.element * hidden * copies), *whole),
        temporary=share.element * hidden * (rows.own + rows.held),
    )


def _combine(share: RankShapes, rows: _Rows) -> Operator:
    """Add the results of each token's experts; backward, copy the gradient. Where results are weighted here, backward reads them
    too.
    """
    hidden, weighs, narrow = share.model.hidden, not share.kernels.weighs_before_combining, _narrow(share)
    copies, tokens = hidden * rows.own, hidden * share.parted
    there, back = _moved(share, rows, "combine")
    cast = Fp8Products(share, "combine", 0, 0, _early(share)).gradient(tokens)
    whole = () if share.resolved.sequence_parallel else share.reduce("combine", "forward")
    read = narrow * (copies + tokens) + share.element * copies * weighs
    return Operator(
        forward=(*back, share.memory("combine", "forward", share.element * (copies + tokens)), *whole),
        input_gradient=(*cast, share.memory("combine", "backward", read), *there),
        saved={"expert results": share.element * copies} if weighs else {},
        temporary=share.element * hidden * (rows.own + rows.held),
    )


def _early(share: RankShapes) -> bool:
    """Whether tokens are cast before they are copied and sent."""
    return _narrow(share) == FP8_WIDTH


def _experts(share: RankShapes, rows: _Rows, label: str, inputs: int, outputs: int, columns: bool) -> Operator:
    """A matrix of every expert on this rank, cut by columns or rows: one batched product."""
    bias, tp = share.model.mlp_bias, rows.tp
    k, n = (inputs, outputs // tp) if columns else (inputs // tp, outputs)
    narrow = Fp8Products(share, label, n, k, share.kernels.fp8_experts, rows.experts)
    product, *adding = share.weight_gemm(f"{label} weight", n, k, rows.each, rows.busy, narrow.dtype)
    sums = (share.reduction(f"{label} bias", "backward", share.element * rows.held * n),) if bias else ()
    parameters, whole = rows.experts * n * (k + bias), rows.experts * n * (bias and not columns and not rows.whole)
    return Operator(
        forward=(
            *narrow.taken(rows.held * k, arrived=columns and _early(share)),
            _exact(share.gemm(label, "forward", rows.each, n, k, rows.busy, dtype=narrow.dtype), rows),
        ),
        input_gradient=(
            *narrow.gradient(rows.held * n, arrived=not columns and _early(share)),
            _exact(share.gemm(label, "backward", rows.each, k, n, rows.busy, dtype=narrow.dtype), rows),
        ),
        weight_gradient=(*narrow.again(rows.held * k), _exact(product, rows), *adding, *sums),
        saved={f"{label} input": narrow.kept * rows.held * k},
        temporary=share.element * rows.held * k + narrow.copies(rows.held * n),
        shapes=((n, k),) * rows.experts + ((n,),) * (rows.experts * bias),
        replicated=whole,
        experts=parameters if share.resolved.ep_of_dp > 1 else 0,
        narrow=narrow.elements,
        flops=2.0 * share.tokens * rows.moe.chosen * inputs * outputs,
    )


def _exact(kernel: Kernel, rows: _Rows) -> Kernel:
    """The kernel with the FLOPs of the copies that there are, without those that rounding up has added."""
    return replace(kernel, flops=kernel.flops / (rows.each * rows.busy) * rows.held)


def _shared(share: RankShapes, moe: Experts) -> list[Operator]:
    """Shared experts are one MLP of their joint size."""
    model, ffn = share.model, moe.shared * moe.shared_ffn
    if not ffn:
        return []
    width, elements = ffn * (2 if model.gated else 1), share.tokens * ffn // share.tp
    gated = (ffn // share.tp,) * 2 if model.gated else ()
    up = column_linear(share, "shared up", width, model.mlp_bias, source=INPUT, parts=gated)
    return [
        _part(up, "shared up output", of="shared_experts"),
        _part(
            activation(share, "shared activation", elements, saved="shared up output"), "shared down input", of="shared_experts"
        ),
        _part(row_linear(share, "shared down", ffn, model.mlp_bias), of="shared_experts"),
    ]


def _sums(share: RankShapes, branches: int) -> Operator:
    """Results of routed and shared experts are added; backward, the gradients of all that read the norm's output."""
    add = share.memory("mixture sum", "forward", 3 * share.element * share.stream)
    back = share.memory("mixture sum", "backward", 3 * share.element * share.stream)
    return Operator((add,) * (branches - 2), (back,) * (branches - 1))
