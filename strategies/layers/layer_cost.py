"""A part of a model under a plan: what its operators, one after the other, cost and hold, with what is recomputed of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from sim.program import Collective, Item, Kernel, SharedItems
from strategies.layers import gradients, selective_recomputation
from strategies.layers.operators import Operator, Shape
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items
from strategies.layers.tiling import in_tiles
from strategies.plan.options import WIDTHS

Tensors = dict[str, float]  # name -> bytes


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Work of the embedding, one layer or the head on one rank for one microbatch. Bytes, FLOPs, elements."""

    name: str  # "embedding", "layer" or "head"
    forward: Items
    input_gradient: Items  # backward with respect to activations
    weight_gradient: Items  # backward with respect to parameters: may wait
    recompute: Items  # forward work repeated just before the backward pass
    saved: float  # bytes of activations kept from its forward to its backward
    restored: float  # bytes of activations that recomputation makes again: they exist only while its backward pass runs
    temporary: float  # bytes of workspace of its forward besides saved, where most is needed: not all of saved is there yet
    backward_workspace: float  # bytes of workspace of its backward pass besides saved and restored; without the loss
    gradient_workspace: float  # as backward_workspace, besides its parameters' gradients too, which are made one by one
    input_gradient_workspace: float  # bytes of workspace of the first half of a split backward pass
    loss_workspace: float  # bytes of workspace of the loss, with which the backward pass of the head begins; −∞ elsewhere
    stranded: float  # bytes that the caching allocator has from its forward pass, and that its loss cannot use
    parameters: int  # elements on this rank that have gradients; by default all of them
    replicated: int  # elements of parameters that every tp rank holds: norms, biases of matrices cut by rows, positions
    experts: int  # elements of parameters of routed experts that are spread over ep ranks: they have fewer copies
    fp8_parameters: int  # elements of matrices whose products are in fp8, without routed experts
    fp8_expert_parameters: int  # elements of routed experts' matrices whose products are in fp8
    model_flops: float  # of the whole tp and cp group, forward and backward
    recomputed_flops: float  # FLOPs of what is recomputed
    logits: float  # bytes of the result of the head
    held: float  # bytes that weight gradients need after the input gradient: inputs of matrices and gradients of their outputs
    backward: Items  # recompute, then both gradients, operator by operator
    gradients: tuple[gradients.CompletedGradient, ...]  # of every parameter that has one, as the backward pass makes them
    frozen_shapes: tuple[Shape, ...] = ()  # of the other parameters
    frozen_bytes: float = 0.0  # that these take
    partial: int = 0  # elements of a module's parameters whose gradients tp ranks sum before the update
    buffers: tuple[tuple[int, int], ...] = ()  # bytes of an element and elements of each buffer of a module
    spared_flops: float = 0.0  # of gradients that are not made, by the rule of `model_flops`

    def __post_init__(self) -> None:
        for name in ("forward", "input_gradient", "weight_gradient", "recompute", "backward"):
            items = getattr(self, name)
            if not isinstance(items, SharedItems):
                object.__setattr__(self, name, SharedItems(items))

    @property
    def frozen(self) -> int:
        """Elements on this rank that have no gradients."""
        return sum(map(math.prod, self.frozen_shapes))

    @property
    def forward_flops(self) -> float:
        """The forward pass's part of `model_flops`."""
        return (self.model_flops + self.spared_flops) / 3

    def input_gradient_peak(self, absent: float = 0.0) -> float:
        """Bytes of workspace of the first half of a split backward pass, as `backward_peak`."""
        return max(self.input_gradient_workspace, self.loss_workspace - absent)

    def backward_peak(self, width: int = 0, absent: float = 0.0) -> float:
        """Bytes of workspace of its backward besides what it keeps and restores.

        width: bytes per parameter of gradients that are made one by one, beside all of which they are counted. absent: bytes that
        are counted too, but are there only when the loss's backward is over: FSDP gathers parameters for what comes before it.
        """
        unmade = width * (self.parameters - self.experts)
        return max(self.gradient_workspace if width else self.backward_workspace, self.loss_workspace - unmade - absent)


def part_of(name: str, operators: Sequence[Operator], rank: RankShapes, recompute: str, losses: int = 0) -> LayerCost:
    """What `operators` are together under a recomputation setting. losses: how many of the last ones make the loss."""
    plan, operators = rank.resolved, in_tiles(rank, operators) if name == "layer" else operators
    kept, restored = tensors_of(operators, recompute, plan.recomputed_modules)
    again = _repeated(operators, recompute, plan.stops_early, plan.recomputed_modules)
    partition, gather = _partitioned(rank, kept, restored) if recompute == "full" else ((), ())
    gradient = rank.element * rank.stream  # of the residual stream, on its way from part to part
    every = {name: kept.get(name, 0.0) + restored.get(name, 0.0) for name in kept | restored}
    trunk, loss = operators[: len(operators) - losses], operators[len(operators) - losses :]
    repeated = gather + _checkpointed(tuple(_recomputed(item) for item in _chained(again, "forward")), rank)
    back = operators[::-1]
    weights = _chained(back, "weight_gradient")
    inputs = [_held(operator.weight_gradient, rank) for operator in trunk]
    backward = tuple(chain.from_iterable(operator.backward for operator in back))
    return LayerCost(
        name=name,
        forward=partition + _chained(operators, "forward"),
        input_gradient=_chained(back, "input_gradient"),
        weight_gradient=weights,
        recompute=repeated,
        backward=repeated + backward,
        gradients=gradients.completed(back),
        held=_held(weights, rank),
        logits=float(rank.element * rank.tokens * rank.rows) if name == "head" and rank.model.head else 0.0,
        saved=sum(kept.values()),
        restored=sum(restored.values()),
        temporary=gradient + _workspace([operator.forwards for operator in operators], kept),
        backward_workspace=gradient + _workspace(trunk, every),
        gradient_workspace=gradient + _workspace(trunk, every, plan.bytes_per_gradient),
        input_gradient_workspace=gradient + _workspace(trunk, every, stay=inputs),
        loss_workspace=_of_loss(trunk, loss, every),
        fp8_parameters=sum(operator.fp8_parameters for operator in operators if not operator.experts),
        fp8_expert_parameters=sum(operator.fp8_parameters for operator in operators if operator.experts),
        model_flops=float(rank.cp * sum(operator.passes * operator.flops for operator in operators)),
        recomputed_flops=rank.cp
        * (sum(operator.flops for operator in again) + sum(operator.recomputed for operator in operators)),
        stranded=sum(operator.stranded for operator in operators),
        parameters=sum(operator.parameters for operator in operators),
        frozen_shapes=tuple(chain.from_iterable(operator.frozen_shapes for operator in operators)),
        frozen_bytes=float(sum(operator.frozen_bytes for operator in operators)),
        spared_flops=float(rank.cp * sum((3 - operator.passes) * operator.flops for operator in operators)),
        replicated=sum(operator.replicated for operator in operators),
        experts=sum(operator.experts for operator in operators),
    )


def tensors_of(operators: Sequence[Operator], recompute: str, modules: frozenset[str] = frozenset()) -> tuple[Tensors, Tensors]:
    """Tensors (kept, restored) under a recomputation setting; full recomputation and recompute=operators keep the input of the
    first operator, the latter also results of operators that are not repeated; selective keeps what `modules` neither make nor
    need inside.
    """
    outer: Tensors = {}
    for operator in operators:  # of readers of one tensor that keep it in different types, the widest is counted
        outer |= {name: max(float(size), outer.get(name, 0.0)) for name, size in operator.saved.items()}
    inner = {name: float(size) for operator in operators for name, size in operator.inner.items()}
    if recompute == "none" or not outer:
        return outer | inner, {}
    if recompute == "selective":
        again = _repeated(operators, recompute, False, modules)
        anew = {name for operator in again for name in (*operator.makes, *operator.inner)}
        every = outer | inner
        return {name: size for name, size in every.items() if name not in anew}, {
            name: size for name, size in every.items() if name in anew
        }
    first = next(iter(outer))
    kept = {first: outer[first]}
    if recompute == "operators":
        kept |= {name: float(size) for operator in operators for name, size in operator.kept_results.items()}
    left = {name: size - kept.get(name, 0.0) for name, size in (outer | inner).items()}
    return kept, {name: size for name, size in left.items() if size > 0}


def _partitioned(rank: RankShapes, kept: Tensors, restored: Tensors) -> tuple[Items, Items]:
    """DeepSpeed's partition_activations: of the input that is kept each tp rank keeps a part (what makes it, what makes it whole
    again; deepspeed/runtime/activation_checkpointing/checkpointing.py, partition_activations, gather_partitioned_activations).
    """
    if not rank.resolved.runtime.partitions_checkpoints:
        return (), ()
    name, size = next(iter(kept.items()))
    kept[name] = size / rank.tp
    restored[name] = size - kept[name]
    return (rank.memory("checkpoint part", "forward", 2 * kept[name]),), rank.collective("all_gather", "checkpoint", size)


def _repeated(operators: Sequence[Operator], recompute: str, stops: bool, modules: frozenset[str]) -> list[Operator]:
    """The operators whose forward work is done again.

    torch.utils.checkpoint (torch 2.13, use_reentrant=False) stops as soon as the last tensor that backward needs is there again:
    the input of the last matrix, whose own product and all that follows it are left out; torch.compile drops what nothing needs.
    Megatron-LM's runs to the end.
    """
    if recompute in ("none", "selective"):
        return [operator for operator in operators if recompute == "selective" and modules.intersection(operator.modules)]
    if recompute == "operators":
        operators, stops = selective_recomputation.repeated(operators), True
    return list(operators[: max(number for number, operator in enumerate(operators) if operator.saved)] if stops else operators)


def _workspace(operators: Sequence[Operator], tensors: Tensors, width: int = 0, stay: Sequence[float] = ()) -> float:
    """Bytes beyond all of `tensors` that are needed at most while the operators run one by one, forward or backward.

    A tensor is there while the operator that first names it and later ones run. Negative when all are never there at once.
    width: bytes per parameter of gradients, beyond all of which the bytes are then counted: backward, the gradients of
    the operator and of later ones are there. stay: bytes that each operator leaves there, backward.
    """
    left, gone, unmade, left_there = dict(tensors), sum(tensors.values()), 0.0, sum(stay)
    most = left_there - gone - width * sum(operator.parameters - operator.experts for operator in operators)
    for number, operator in enumerate(operators):
        gone -= sum(left.pop(name, 0.0) for name in operator.names)
        left_there -= stay[number] if stay else 0.0
        most = max(most, operator.temporary - gone - unmade + left_there)
        unmade += width * (operator.parameters - operator.experts)
    return most


def _of_loss(trunk: Sequence[Operator], loss: Sequence[Operator], tensors: Tensors) -> float:
    """Bytes of workspace of a loss, before whose backward pass nothing of `tensors` is gone; −∞ without one."""
    if not loss:
        return -math.inf
    before = set(chain.from_iterable(operator.names for operator in trunk))
    return _workspace(loss, {name: size for name, size in tensors.items() if name not in before})


def _held(weights: Items, rank: RankShapes) -> float:
    """Bytes of both operands of the weight gradients' products: gradients of outputs (m features × k tokens), inputs (k × n).

    An input that sequence parallelism gathers just before is held as the rank's part of it.
    """
    total, gathered, before = 0.0, False, ""
    for item in weights:
        if isinstance(item, Collective):
            gathered = True
        elif isinstance(item, Kernel) and item.kind == "gemm":
            batch, m, n, k = item.shape
            width = WIDTHS.get(item.dtype, rank.element)
            inputs = 0 if item.label == before else n / rank.tp if gathered else n  # products of one input have one label
            total += width * batch * k * (m + inputs)
            gathered, before = False, item.label
    return total


def _recomputed(item: Item) -> Item:
    return replace(item, phase="recompute") if isinstance(item, Kernel) else item


def _checkpointed(repeated: Items, rank: RankShapes) -> Items:
    """Forward work that is done again, before whose first kernel the host may restore generators."""
    for number, item in enumerate(repeated if rank.kernels.tracks_generators else ()):
        if isinstance(item, Kernel):
            return (*repeated[:number], replace(item, calls="checkpoint"), *repeated[number + 1 :])
    return repeated


@lru_cache(maxsize=64)
def joined(layers: tuple[LayerCost, ...]) -> LayerCost:
    """Consecutive layers that keep only the first one's input and are recomputed together before the backward pass of all."""
    if len(layers) == 1:
        return layers[0]
    back = layers[::-1]
    before = tuple(_recomputed(item) for item in _chained(layers[:-1], "forward"))  # all of it: the next layer's input
    recompute = before + layers[-1].recompute
    backward = tuple(chain.from_iterable(part.backward[len(part.recompute) :] for part in back))
    completed: tuple[gradients.CompletedGradient, ...] = ()
    for part in back:
        items = len(part.backward) - len(part.recompute)
        completed = gradients.before(completed, items, len(part.weight_gradient)) + part.gradients
    sums = ("parameters", "replicated", "experts", "fp8_parameters", "fp8_expert_parameters", "model_flops", "held")
    more = ("frozen_bytes", "spared_flops", "partial")
    return replace(
        layers[0],
        forward=_chained(layers, "forward"),
        input_gradient=_chained(back, "input_gradient"),
        weight_gradient=_chained(back, "weight_gradient"),
        recompute=recompute,
        backward=recompute + backward,
        gradients=completed,
        frozen_shapes=tuple(chain.from_iterable(part.frozen_shapes for part in layers)),
        buffers=tuple(chain.from_iterable(part.buffers for part in layers)),
        restored=sum(part.saved + part.restored for part in layers) - layers[0].saved,
        recomputed_flops=sum(part.forward_flops for part in layers[:-1]) + layers[-1].recomputed_flops,
        input_gradient_workspace=max(part.input_gradient_workspace for part in layers) + sum(part.held for part in layers[1:]),
        temporary=max(part.temporary for part in layers),
        backward_workspace=max(part.backward_workspace for part in layers),
        gradient_workspace=max(part.gradient_workspace for part in layers),
        **{name: sum(getattr(part, name) for part in layers) for name in sums + more},
    )


def _chained(works: Sequence[Operator] | Sequence[LayerCost], name: str) -> Items:
    """The items that all have by that name, one after the other."""
    return tuple(chain.from_iterable(getattr(work, name) for work in works))
