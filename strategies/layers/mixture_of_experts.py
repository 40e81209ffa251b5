"""Mixture of experts in place of the MLP: router, dispatch, experts, combine, and shared experts beside them.

Shazeer et al. 2017, arXiv:1701.06538. Work follows Megatron-LM's all-to-all dispatcher without dropping
(megatron/core/transformer/moe/token_dispatcher.py):
* the router's matrix is whole on every rank; its scores are a softmax, of which the `chosen` largest are kept;
* dispatch copies each token once per chosen expert, in the order of experts; combine adds the copies. Their weights are factors
  of the experts' activation (TEGroupedMLP in megatron/core/transformer/moe/experts.py, since 2025); other kernels than
  Megatron-LM's weigh the results in combine, and keep them for the gradient of the weights;
* experts are cut by tp as an MLP is; their products are batched, one per expert, and tokens spread evenly over the experts.
  Rows per expert are rounded up for the price, not for the FLOPs.

Expert parallelism (GShard, arXiv:2006.16668): the experts of a layer are spread over ep of the cp·dp ranks, all cp ranks first.
An all-to-all takes the copies to the ranks of their experts and another takes the results back: chosen · tokens · hidden elements
each, forward and backward. `plan.imbalance` is what the busiest rank has relative to the mean, or with `plan.expert_spread` what
it is expected to have: all ranks are played as if they had so much.
With sequence parallelism a tp rank routes its own tokens; copies are gathered over tp before the experts and reduce-scattered
after them. With `expert_tp: 1` experts are whole, the tp ranks are among the ep ranks, and the all-to-all takes that gather's
place.

With a capacity factor (GShard; Switch, arXiv:2101.03961) an expert takes no more than that many times the mean, and what is above
is dropped; padded to capacity, all experts compute as much. Counted FLOPs of the model are of all copies, dropped or not.

With `ep_nodes` the exchange has two steps (DeepSeek-V3, arXiv:2412.19437, section 3.2.2): a token goes once to each of its
`routed_nodes` nodes, to the rank with the same place in it, and copies go on from there to the ranks of their experts. What has
come over the network is passed on at once: both steps run beside each other (DeepEP's kernels for training do so); how long the
first piece takes is left out.

With `token_dispatcher: allgather` (MoEAllGatherTokenDispatcher) the tokens of all tp and ep ranks are gathered, with what the
router says of them, each rank copies those of its experts, and sums of their results are put among zeros for all tokens and
reduce-scattered: as much is sent whatever `chosen` and `imbalance` are.

With `token_dispatcher` deepep or hybridep (github.com/deepseek-ai/DeepEP) a token goes once to each rank that has any of its
experts, which copies it there, and comes back as one sum: of `chosen` random experts on ep ranks that is fewer than `chosen`
ranks. Its kernels keep `dispatcher_sms` multiprocessors from compute beside them (in schedules of pairs).

With `fp8.dispatch` tokens on their way to experts, forward, and gradients of their results on theirs, backward, are cast to fp8
before they are sent; what comes back has 16 bits (the same, section 3.3.2).
"""

from __future__ import annotations

import math
from dataclasses import replace

from sim.program import Collective, Kernel
from strategies.frameworks.pytorch import operators as eager
from strategies.layers.fp8 import Fp8Products
from strategies.layers.operators import Operator, activation, column_linear, pointwise, replicated_linear, row_linear
from strategies.layers.rank_shapes import FLOAT, RankShapes
from strategies.layers.tensor_overlap import Items, pipelined
from strategies.models.parts import Experts
from strategies.plan.options import FP8_WIDTH
from strategies.plan.resolved import NODES
from strategies.plan.routing import DISPATCHER_SMS, busiest_rank, distinct

INPUT = "mlp input"
PLACES = 3 * 8  # bytes a copy: its expert, its token and its place, as PyTorch's indices, kept for gradients


def mixture(rank: RankShapes, moe: Experts) -> list[Operator]:
    """The pieces of a layer's mixture, in the order of the forward pass, after its norm."""
    model, rows = rank.model, Rows(rank, moe)
    width = moe.ffn * (2 if model.gated else 1)
    elements = rows.held * moe.ffn // rows.tp
    tokens, token = rank.local_tokens, rank.element * model.hidden
    router = replicated_linear(rank, "router", tokens, moe.experts, rank.tokens // tokens, moe.router_bias, INPUT)
    scores = tokens * moe.experts
    routed = [
        _part(router, "router scores"),
        _part(pointwise(rank, "router softmax", scores, scores, saved="router scores")),
        _part(_routing(rank, scores)),
        _part(_dispatch(rank, rows), "expert up input"),
        *_padded(rank, rows, token, FLOAT),
        _part(_experts(rank, rows, "expert up", model.hidden, width, columns=True), "expert up output"),
        _part(_activation(rank, elements), "expert down input", of="moe_act"),
        _part(_experts(rank, rows, "expert down", moe.ffn, model.hidden, columns=False), "expert results"),
        *_padded(rank, rows, token),
        _part(_combine(rank, rows)),
    ]
    return [*routed, *_shared(rank, moe), _part(_sums(rank, branches=2 + bool(moe.shared)))]


def _routing(rank: RankShapes, scores: int) -> Operator:
    """Choice of experts, balance and counts, kernel by kernel. The last one copies counts to the host, which waits for them
    unless every expert is padded to its capacity.
    """
    routing, plan = rank.kernels.routing, rank.resolved
    waits = rank.kernels.waits_for_counts(plan.ep > 1) and not plan.pad_to_capacity
    over = rank.memory("routing", "forward", FLOAT * scores)
    few, back = rank.memory("routing", "forward", 0.0), rank.memory("routing", "backward", FLOAT * scores)
    forward = (over,) * routing.scores + (few,) * max(routing.counts - 1, 0)
    last = (replace(few, waits=waits),) if waits or routing.counts else ()
    return Operator(forward=(*forward, *last), input_gradient=(back,) * routing.backward)


def _activation(rank: RankShapes, elements: int) -> Operator:
    """The experts' activation of so many results."""
    if rank.eager and rank.model.gated:
        return eager.gated(rank, "expert activation", elements, saved="expert up output")
    return activation(rank, "expert activation", elements, saved="expert up output")


def _part(operator: Operator, *makes: str, of: str = "") -> Operator:
    """Part of Megatron-LM's module moe, and of a module in it."""
    return replace(operator, modules=("moe", of) if of else ("moe",), makes=makes)


class Rows:
    """Copies of tokens: `own` that this rank dispatches, `held` by its experts (at ep > 1 of the busiest rank)."""

    def __init__(self, rank: RankShapes, moe: Experts) -> None:
        plan = rank.resolved
        self.whole_experts = plan.whole_experts
        self.moe, self.tp, self.experts = moe, (1 if self.whole_experts else plan.tp), moe.experts // plan.ep
        limit = plan.capacity_factor or math.inf
        self.load = (
            limit if plan.pad_to_capacity else min(_busiest(rank, moe), limit)
        )  # of the busiest rank, relative to the mean
        self.own = math.ceil(rank.local_tokens * moe.chosen * (limit if plan.pad_to_capacity else min(1.0, limit)))
        self.sent = rank.local_tokens * moe.chosen * self.load
        self.held = math.ceil((rank.local_tokens if self.whole_experts else rank.tokens) * moe.chosen * self.load)
        self.once = 1.0  # of the copies that are sent: those to the same rank go as one
        self.sms: int | None = None  # multiprocessors that the exchange takes
        gathers = plan.token_dispatcher == "allgather"
        self.sharing = ((1 if self.whole_experts else plan.tp) * plan.ep) if gathers else 0  # ranks whose tokens are gathered
        if plan.token_dispatcher in DISPATCHER_SMS:
            self.once = distinct(moe.experts, plan.ep, moe.chosen) / moe.chosen
            self.sms = DISPATCHER_SMS[plan.token_dispatcher] if plan.dispatcher_sms is None else plan.dispatcher_sms
        self.busy = max(1, min(self.experts, self.held))  # experts that have anything to do
        self.each = math.ceil(self.held / self.busy)  # copies of one of them


def _busiest(rank: RankShapes, moe: Experts) -> float:
    """What the busiest of the ep ranks has relative to the mean."""
    plan = rank.resolved
    if plan.expert_spread is None:
        return plan.imbalance
    each = rank.local_tokens if plan.whole_experts else rank.tokens
    return busiest_rank(moe.experts, plan.ep, each * moe.chosen * plan.ep, plan.expert_spread)


def _moved(rank: RankShapes, rows: Rows, label: str) -> tuple[Items, Items]:
    """(exchange of copies to their experts, of results back); gradients take them in reverse."""
    plan, hidden, sent = rank.resolved, rank.model.hidden, _sent_width(rank)
    if rows.sharing:
        return _gathered(rank, rows, label)
    there, back = (_swapped(rank, rows, label, width) for width in (sent, rank.element))
    if not plan.sequence_parallel or rows.whole_experts:
        return there, back
    gather = rank.collective("all_gather", label, sent * rows.held * hidden, sent)
    return (*there, *gather), (*rank.collective("reduce_scatter", label, rank.element * rows.held * hidden), *back)


def _gathered(rank: RankShapes, rows: Rows, label: str) -> tuple[Items, Items]:
    """(gather of all tokens, of dispatch with the map of their experts and their weights before them; scatter of sums)."""
    plan, experts, routed = rank.resolved, rows.moe.experts, label == "dispatch"
    axes = tuple(dict.fromkeys((*(("tp",) if plan.tp > 1 else ()), *plan.spreading)))
    name = "ep" if plan.ep > 1 else "tp"

    def along(operation: str, what: str, size: float, width: float) -> Items:
        whole = size * rank.local_tokens * rows.sharing
        return rank.along(name, rows.sharing, operation, what, whole, width=width, axes=axes)

    tokens, weights = rank.element * rank.model.hidden, rank.element * experts
    there, back = along("all_gather", label, tokens, rank.element), along("reduce_scatter", label, tokens, rank.element)
    if not routed:
        return there, back
    maps = along("all_gather", "routing map", experts, 1), along("all_gather", "routing weights", weights, rank.element)
    return (*maps[0], *maps[1], *there), (*back, *along("reduce_scatter", "routing weights", weights, rank.element))


def _sent_width(rank: RankShapes) -> int:
    """Bytes of an element on its way to an expert."""
    fp8 = rank.resolved.fp8
    return FP8_WIDTH if fp8 is not None and fp8.dispatch else rank.element


def _swapped(rank: RankShapes, rows: Rows, label: str, width: int) -> Items:
    """Copies of tokens, in elements of `width` bytes, exchanged between the ranks of the tokens and the ranks of their
    experts.
    """
    plan, size = rank.resolved, rows.sent * rows.once * width * rank.model.hidden
    axes = plan.spreading if len(plan.spreading) > 1 else ()
    inside = rank.along("ep", plan.ep // plan.ep_nodes, "all_to_all", label, size, width=width, axes=axes)
    swap: Items = tuple(replace(item, sms=rows.sms) for item in inside if isinstance(item, Collective))
    if not plan.routed_nodes:
        return swap
    once, named = size / rows.once / rows.moe.chosen * plan.routed_nodes, f"{label} across nodes"
    across = Collective("all_to_all", once, "ep", named, plan.algorithm, width=width, along=(NODES,), sms=rows.sms)
    return pipelined(across, swap)


def _dispatch(rank: RankShapes, rows: Rows) -> Operator:
    """Copy each token for each of its experts; backward, add the gradients of the copies."""
    hidden, copies, sent = rank.model.hidden, rank.local_tokens + rows.own, _sent_width(rank)
    there, back = _moved(rank, rows, "dispatch")
    if rows.sharing:
        return _taken(rank, rows, "dispatch", there, back)
    cast = Fp8Products(rank, "dispatch", 0, 0, _early(rank)).input_casts(rank.local_tokens * hidden)
    reduce = () if rank.resolved.sequence_parallel else rank.reduce("dispatch gradient", "backward")
    in_order, unordered = _sorted(rank, rows)
    added = copies + 2 * rows.own * rank.eager  # to zeros, one after the other
    places = (rank.memory("routing", "forward", PLACES * rows.own),) * rank.kernels.routing.places
    return Operator(
        forward=(*cast, *places, rank.memory("dispatch", "forward", sent * hidden * copies), *there, *in_order),
        input_gradient=(*unordered, *back, rank.memory("dispatch", "backward", rank.element * hidden * added), *reduce),
        saved={"places of copies": PLACES * rows.own} if rank.eager else {},
        temporary=rank.element * hidden * (rows.own + rows.held),
    )


def _combine(rank: RankShapes, rows: Rows) -> Operator:
    """Add the results of each token's experts; backward, copy the gradient. Where results are weighted here, backward reads them
    too.
    """
    hidden, weighs, sent = rank.model.hidden, not rank.kernels.weighs_before_combining, _sent_width(rank)
    copies, tokens = hidden * rows.own, hidden * rank.local_tokens
    there, back = _moved(rank, rows, "combine")
    if rows.sharing:
        taken = _taken(rank, rows, "combine", there, back)
        return replace(taken, forward=taken.input_gradient, input_gradient=taken.forward, saved=_weighed(rank, rows))
    cast = Fp8Products(rank, "combine", 0, 0, _early(rank)).gradient(tokens)
    reduce = () if rank.resolved.sequence_parallel else rank.reduce("combine", "forward")
    read = sent * (copies + tokens) + rank.element * copies * weighs
    in_order, unordered = _sorted(rank, rows)
    forward: Items = (rank.memory("combine", "forward", rank.element * (copies + tokens)),)
    backward: Items = (rank.memory("combine", "backward", read),)
    if rank.eager:  # weighted, then added to zeros; gradients of copies, of their results and, as sums, of their weights
        there_moved, back_moved = (2 * copies, tokens + 3 * copies), (tokens + copies, 2 * copies, 3 * copies)
        forward = tuple(rank.memory("combine", "forward", rank.element * each) for each in there_moved)
        backward = tuple(rank.memory("combine", "backward", rank.element * each) for each in back_moved)
        backward += (rank.reduction("combine", "backward", rank.element * copies),)
    return Operator(
        forward=(*unordered, *back, *forward, *reduce),
        input_gradient=(*cast, *backward, *there, *in_order),
        saved=_weighed(rank, rows),
        temporary=rank.element * hidden * (rows.own + rows.held),
    )


def _weighed(rank: RankShapes, rows: Rows) -> dict[str, float]:
    """Results of experts that are kept for the gradients of their weights."""
    results = rows.held if rows.sharing else rows.own
    return {} if rank.kernels.weighs_before_combining else {"expert results": float(rank.element * rank.model.hidden * results)}


def _taken(rank: RankShapes, rows: Rows, label: str, there: Items, back: Items) -> Operator:
    """Gather all tokens and copy those of this rank's experts; backward, put sums among zeros for all tokens, and scatter them.
    To combine results is the same the other way round.
    """
    every, width = rank.local_tokens * rows.sharing, rank.element * rank.model.hidden
    phases = ("forward", "backward") if label == "dispatch" else ("backward", "forward")
    copied = rank.memory(label, phases[0], width * (min(every, rows.held) + rows.held))
    summed = rank.memory(label, phases[1], width * (rows.held + 2 * every))
    places = (rank.memory("routing", phases[0], PLACES * rows.held),) * (rank.kernels.routing.places * (label == "dispatch"))
    return Operator(
        forward=(*there, *places, copied),
        input_gradient=(summed, *back),
        temporary=width * (every + rows.held),
    )


def _sorted(rank: RankShapes, rows: Rows) -> tuple[Items, Items]:
    """Copies of what has come, rank by rank, in the order of experts, and back, where a rank has several; Megatron-LM's also
    where all come from one rank (dispatch_postprocess in megatron/core/transformer/moe/token_dispatcher.py). DeepEP's kernels
    put copies there themselves.
    """
    plan, kernels = rank.resolved, rank.kernels
    sorts = rank.eager or (kernels.sorts_copies and plan.token_dispatcher == "alltoall")
    if not sorts or rows.sharing or rows.experts == 1 or (plan.ep == 1 and not kernels.experts_apart):
        return (), ()
    moved = 2 * rank.element * rank.model.hidden * rows.held
    return (rank.memory("expert order", "forward", moved),), (rank.memory("expert order", "backward", moved),)


def _padded(rank: RankShapes, rows: Rows, *sizes: int) -> list[Operator]:
    """Copies of tensors, of so many bytes for each row of the experts, with padding for products in fp8, or without it; backward
    the other way round. The few rows that are added are not counted. What comes in fp8 has been padded on its way
    (expert_alignment in deep_ep).
    """
    plan = rank.resolved
    alone = plan.fp8 is None or plan.fp8.dispatch or plan.token_dispatcher == "hybridep" or plan.pad_to_capacity
    if alone or not rank.kernels.pads_experts:
        return []
    there, back = (
        tuple(rank.memory("expert padding", way, 2 * size * rows.held) for size in sizes) for way in ("forward", "backward")
    )
    return [_part(Operator(there, back, temporary=max(sizes) * rows.held))]


def _early(rank: RankShapes) -> bool:
    """Whether tokens are cast before they are copied and sent."""
    return _sent_width(rank) == FP8_WIDTH


def _experts(rank: RankShapes, rows: Rows, label: str, inputs: int, outputs: int, columns: bool) -> Operator:
    """A matrix of every expert on this rank, cut by columns or rows: products that take as long as one batched product."""
    bias, tp = rank.model.mlp_bias, rows.tp
    k, n = (inputs, outputs // tp) if columns else (inputs // tp, outputs)
    fp8 = Fp8Products(rank, label, n, k, rank.kernels.fp8_experts, rows.experts)
    product, *adding = rank.weight_gemm(f"{label} weight", n, k, rows.each, rows.busy, fp8.dtype)
    sums = (rank.reduction(f"{label} bias", "backward", rank.element * rows.held * n),) if bias else ()
    parameters, replicated = rows.experts * n * (k + bias), rows.experts * n * (bias and not columns and not rows.whole_experts)
    forward = (
        *fp8.input_casts(rows.held * k, in_fp8=columns and _early(rank)),
        exact(rank.gemm(label, "forward", rows.each, n, k, rows.busy, dtype=fp8.dtype), rows),
    )
    input_gradient = (
        *fp8.gradient(rows.held * n, in_fp8=not columns and _early(rank)),
        exact(rank.gemm(label, "backward", rows.each, k, n, rows.busy, dtype=fp8.dtype), rows),
    )
    return Operator(
        forward=_apart(rank, rows, forward),
        input_gradient=_apart(rank, rows, input_gradient),
        weight_gradient=(*_apart(rank, rows, (*fp8.again(rows.held * k), exact(product, rows), *adding)), *sums),
        saved={f"{label} input": fp8.kept * rows.held * k},
        for_weights=(f"{label} input",),
        temporary=rank.element * rows.held * k + fp8.copies(rows.held * n),
        shapes=((n, k),) * rows.experts + ((n,),) * (rows.experts * bias),
        replicated=replicated,
        experts=parameters if rank.resolved.ep_of_copies > 1 else 0,
        fp8_parameters=fp8.elements,
        flops=2.0 * rank.tokens * rows.moe.chosen * inputs * outputs,
    )


def _apart(rank: RankShapes, rows: Rows, items: Items) -> Items:
    """Work on every expert, with a launch for each of them where the framework has no kernel for all. Casts of delayed scaling
    have one; weights are cast in the first microbatch only, which is left out.
    """
    fp8 = rank.resolved.fp8
    kinds = ("gemm",) if fp8 is not None and fp8.scaling == "delayed" else ("gemm", "memory", "reduction")
    if not rank.kernels.experts_apart:
        return items
    return tuple(
        replace(item, launches=rows.experts)
        if isinstance(item, Kernel) and item.kind in kinds and not item.label.endswith("weight in fp8")
        else item
        for item in items
    )


def exact(kernel: Kernel, rows: Rows) -> Kernel:
    """The kernel with the FLOPs of the copies that there are, without what rounding up has added."""
    return replace(kernel, flops=kernel.flops / (rows.each * rows.busy) * rows.held)


def _shared(rank: RankShapes, moe: Experts) -> list[Operator]:
    """Shared experts are one MLP of their joint size."""
    model, ffn = rank.model, moe.shared * moe.shared_ffn
    if not ffn:
        return []
    width, elements = ffn * (2 if model.gated else 1), rank.tokens * ffn // rank.tp
    gated = (ffn // rank.tp,) * 2 if model.gated else ()
    up = column_linear(rank, "shared up", width, model.mlp_bias, source=INPUT, parts=gated)
    return [
        _part(up, "shared up output", of="shared_experts"),
        _part(
            activation(rank, "shared activation", elements, saved="shared up output"), "shared down input", of="shared_experts"
        ),
        _part(row_linear(rank, "shared down", ffn, model.mlp_bias), of="shared_experts"),
        *(_weighted(rank) if moe.shared_gate else []),
    ]


def _weighted(rank: RankShapes) -> list[Operator]:
    """The result of the shared experts times the sigmoid of a number per token; both are kept for the product's gradients."""
    tokens = rank.local_tokens
    gate = replicated_linear(rank, "shared gate", tokens, 1, rank.tokens // tokens, bias=False, source=INPUT)
    product = pointwise(rank, "shared gate product", rank.stream, rank.stream, saved="shared result")
    return [_part(gate, of="shared_experts"), _part(product, of="shared_experts")]


def _sums(rank: RankShapes, branches: int) -> Operator:
    """Results of routed and shared experts are added; backward, the gradients of all that read the norm's output."""
    add = rank.memory("mixture sum", "forward", 3 * rank.element * rank.stream)
    back = rank.memory("mixture sum", "backward", 3 * rank.element * rank.stream)
    return Operator((add,) * (branches - 2), (back,) * (branches - 1))
