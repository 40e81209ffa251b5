"""Layer costs of a traced module: every operator that PyTorch dispatched is a kernel, at the price of its class.

Products are products; a convolution is the product that it is by im2col, with the bytes of its tensors, as implicit GEMMs read
them; what is left is bound by the bytes that it reads and writes, each once. Views cost nothing. What autograd keeps, and what
else is there meanwhile, was recorded with the passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from sim.program import Collective, Kernel
from strategies.layers.layer_cost import LayerCost, part_of
from strategies.layers.operators import Operator
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items
from strategies.layers.traced.collectives import COLLECTIVES, collective_of
from strategies.layers.traced.kernels import BATCH_NORM_BACKWARD, Priced, kernels_of, products_of
from strategies.models.tracing.records import BATCH_NORMS, Trace, TracedOp
from strategies.models.tracing.tracer import trace_of


class TracedParts(NamedTuple):
    """Costs before the blocks; of each kind of block under the plan's recomputation and without it; for each block its kind;
    costs after the blocks, with the loss.
    """

    before: LayerCost
    blocks: tuple[LayerCost, ...]
    kept: tuple[LayerCost, ...]
    kinds: tuple[int, ...]
    after: LayerCost


@lru_cache(maxsize=64)
def traced_parts(rank: RankShapes) -> TracedParts:
    """Costs of the module that the rank's model is."""
    plan, module = rank.resolved, rank.model.module
    assert module is not None
    trace = trace_of(module, plan.microbatch, plan.precision, plan.fused_attention, plan.tp)
    by_part: list[list[TracedOp]] = [[] for _ in range(trace.parts)]
    for op in trace.ops:
        by_part[op.part].append(op)
    group = _flops(trace_of(module, plan.microbatch, plan.precision, plan.fused_attention))
    keys = [_signature(trace, ops) for ops in by_part[1:-1]]
    kinds = list(dict.fromkeys(keys))
    # the second of a kind: when the first runs, more of what is before or after it may still be there
    chosen = [[number for number, key in enumerate(keys) if key == kind][:2][-1] for kind in kinds]
    needed = {0, trace.parts - 1, *(number + 1 for number in chosen)}
    every, used = dict[int, list[Operator]](), set[str]()
    for part, ops in enumerate(by_part):
        if part not in needed:
            used.update(tensor.parameter for op in ops if not op.backward for tensor in op.inputs if tensor.parameter)
            continue
        own = sum(op.flops for op in ops if not op.backward)
        more = group[part] / own if own else 1.0  # FLOPs are of the whole tp group
        every[part] = [
            replace(each, flops=each.flops * more, recomputed=each.recomputed * more)
            for each in _operators(rank, trace, ops, used)
        ]
    unused = [name for name in trace.parameters if name not in used]
    every[0].append(_holding(rank, trace, Operator(), unused, []))
    blocks = [_kept_input(every[number + 1], trace, number) for number in chosen]
    buffers: list[tuple[tuple[int, int], ...]] = [
        tuple(sizes for name, sizes in trace.buffers.items() if trace.part_of(name) == part) for part in range(trace.parts)
    ]
    mine = [buffers[number + 1] for number in chosen]

    users = {name: parts[0] if parts else 0 for name, parts in trace.users.items()}

    def summed(part: int) -> int:
        return sum(math.prod(trace.parameters[name]) for name in trace.partial if users[name] == part)

    def costs(recompute: str) -> tuple[LayerCost, ...]:
        each = (part_of("layer", block, rank, recompute if _returns(block) else "none") for block in blocks)
        return tuple(
            replace(cost, buffers=held, partial=summed(number + 1)) for cost, held, number in zip(each, mine, chosen, strict=True)
        )

    losses = len({op.node for op in by_part[-1] if op.node >= trace.loss_begins})
    return TracedParts(
        replace(part_of("embedding", every[0], rank, "none"), buffers=buffers[0], partial=summed(0)),
        costs(plan.recompute),
        costs("none"),
        tuple(kinds.index(key) for key in keys),
        replace(
            part_of("head", every[trace.parts - 1], rank, "none", losses),
            partial=summed(len(trace.blocks) + 1),
            logits=trace.result,
        ),
    )


def _flops(trace: Trace) -> list[float]:
    """FLOPs of each part's forward pass."""
    result = [0.0] * trace.parts
    for op in trace.ops:
        result[op.part] += 0.0 if op.backward else op.flops
    return result


def _returns(operators: Sequence[Operator]) -> bool:
    """Whether gradients reach a block."""
    return any(operator.backward for operator in operators)


def _signature(trace: Trace, ops: Sequence[TracedOp]) -> tuple[object, ...]:
    """Equal of blocks that do the same."""
    nodes = {op.node for op in ops}
    kept = tuple(size for node in sorted(nodes) for _, size in trace.saved.get(node, ()))
    work = tuple(
        (op.name, op.backward, op.label, tuple(t.shape for t in op.inputs), tuple(t.shape for t in op.outputs)) for op in ops
    )
    return kept, work


def _kept_input(operators: list[Operator], trace: Trace, block: int) -> list[Operator]:
    """A block's operators after one that keeps what the block was given: recomputation begins with it. It may be kept before, by
    an operator of the block before; then it takes nothing here. A block that no gradient reaches keeps nothing.
    """
    if not _returns(operators):
        return operators
    name = trace.kept_inputs[block]
    own = next((each.saved[name] for each in operators if name in each.saved), None)
    without = [replace(each, saved={key: size for key, size in each.saved.items() if key != name}) for each in operators]
    size = own if own is not None else 0.0 if name else trace.boundaries[block]
    return [Operator(saved={"block input": size}), *without]


def _operators(rank: RankShapes, trace: Trace, ops: Sequence[TracedOp], used: set[str]) -> list[Operator]:
    """An operator for each node of autograd's graph, in the order of the forward pass. used: parameters that were met before."""
    nodes: dict[int, tuple[list[TracedOp], list[TracedOp]]] = {}
    for op in ops:
        if not op.backward:
            nodes.setdefault(op.node, ([], []))[0].append(op)
    for op in ops:
        if op.backward:
            nodes.setdefault(op.node, ([], []))[1].append(op)
    return [_operator(rank, trace, node, *nodes[node], used) for node in sorted(nodes)]


def _operator(
    rank: RankShapes, trace: Trace, node: int, forward: list[TracedOp], backward: list[TracedOp], used: set[str]
) -> Operator:
    gradient = rank.element * rank.stream  # of the residual stream, which layer costs add
    back_there = 0.0 if node >= trace.loss_begins else gradient  # the loss makes it
    names = [tensor.parameter for op in forward for tensor in op.inputs if tensor.parameter]
    own = [name for name in dict.fromkeys(names) if name not in used]
    again = [name for name in dict.fromkeys(names) if name in used]
    used.update(own)
    dtype = rank.resolved.precision
    there = tuple(item for op in forward for item, _ in _items(rank, op, kernels_of(op, "forward", dtype, False)))
    back = [each for op in backward for each in _items(rank, op, _kernels_back(op, dtype, bool(names)))]
    added: Items = tuple(
        kernel
        for name in own
        if name not in trace.frozen
        for kernel in rank.vectors(f"{name.rpartition('.')[2]} gradient", math.prod(trace.parameters[name]))
    )
    operator = Operator(
        forward=there,
        input_gradient=tuple(kernel for kernel, of_weight in back if not of_weight),
        weight_gradient=(*(kernel for kernel, of_weight in back if of_weight), *added),
        both_gradients=(*(kernel for kernel, _ in back), *added),
        saved=dict(trace.saved.get(node, ())),
        temporary=max((max(0.0, op.live - back_there) for op in backward), default=0.0),
        before=max((max(0.0, op.live - gradient) for op in forward), default=0.0),
        flops=sum(op.flops for op in forward),
        recomputed=sum(op.flops for op in backward if op.recomputed),
        passes=_passes(trace, forward, backward),
    )
    return _holding(rank, trace, operator, own, again)


def _kernels_back(op: TracedOp, dtype: str, has_parameters: bool) -> list[Priced]:
    """The kernels of an operator of the backward pass, what it runs again of the forward pass among them."""
    return kernels_of(op, "recompute", dtype, False) if op.recomputed else kernels_of(op, "backward", dtype, has_parameters)


def _items(rank: RankShapes, op: TracedOp, kernels: list[Priced]) -> list[tuple[Kernel | Collective, bool]]:
    """The kernels of an operator, or the collective of tp ranks that it is; between the two kernels of a batch normalisation over
    all ranks, what these exchange.
    """
    plan = rank.resolved
    if op.name.startswith(f"{COLLECTIVES}."):
        return [(item, False) for item in collective_of(rank, op)]
    if op.name not in BATCH_NORMS | BATCH_NORM_BACKWARD or plan.copies == 1 or not (op.synchronised or plan.sync_norm):
        return list(kernels)
    first, second = kernels
    exchanged = rank.statistics(op.label, op.inputs[0].shape[1])[op.name in BATCH_NORM_BACKWARD]
    return [first, (exchanged, False), second]


def _passes(trace: Trace, forward: list[TracedOp], backward: list[TracedOp]) -> int:
    """Products of both passes for each of the forward pass: 3 where every operand has a gradient. Of a module that is trained
    as a whole the input's, which nobody asks for, counts, too, as in the papers' rule.
    """
    if not trace.frozen:
        return 3
    gradients = sum(products_of(op) for op in backward if not op.recomputed)
    return 1 + min(2, round(gradients / max(1, sum(op.flops > 0 for op in forward))))


def _holding(rank: RankShapes, trace: Trace, operator: Operator, own: list[str], again: list[str]) -> Operator:
    """The operator with the parameters that it reads first, and those that others have."""
    still = tuple(trace.parameters[name] for name in own if name in trace.frozen)
    return replace(
        operator,
        shapes=tuple(trace.parameters[name] for name in own if name not in trace.frozen),
        tied=tuple(trace.parameters[name] for name in again if name not in trace.frozen),
        replicated=sum(math.prod(trace.parameters[name]) for name in own if name in trace.replicated - trace.frozen),
        frozen_shapes=still,
        frozen_bytes=float(rank.element * sum(map(math.prod, still))),
    )
