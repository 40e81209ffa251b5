"""A part of a model under a plan: what its pieces, one after the other, cost and hold, with what is recomputed of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from sim.program import Collective, Item, Kernel
from strategies.layers import gradients
from strategies.layers import selective_recomputation as operators
from strategies.layers.operators import Operator
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items
from strategies.plan.options import FP8_WIDTH

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
    restored: float  # bytes of activations that recomputation makes anew: they exist only while its backward runs
    temporary: float  # bytes of workspace of its forward besides saved, where most is needed: not all of saved is there yet
    undoing: float  # the same of its backward besides saved and restored, of which less and less is there; without the loss
    passing: float  # the same besides its parameters' gradients too, where they are made in the backward pass, one by one
    halving: float  # the same of the first half of a split backward pass, of which stays what the weight gradients need
    loss: float  # the same of the loss, with which the backward pass of the head begins; −∞ of other parts
    stranded: float  # bytes that the caching allocator has from its forward pass, and that its loss cannot use
    parameters: int  # elements on this rank
    replicated: int  # of them, those that every tp rank holds: norms, biases of matrices cut by rows, positions
    experts: int  # of the parameters, those of routed experts that are spread over ep ranks: they have fewer copies
    narrow: int  # of the parameters, without those experts, matrices whose products are in fp8
    narrow_experts: int  # of those experts, the same
    model_flops: float  # of the whole tp and cp group, forward and backward
    recomputed_flops: float  # the same of what is recomputed
    logits: float  # bytes of the result of the head
    held: float  # bytes that weight gradients need after the input gradient: inputs of matrices and gradients of their outputs
    backward: Items  # recompute, then both gradients: the whole, piece by piece
    gradients: tuple[gradients.Made, ...]  # of every parameter, as the backward pass makes them

    def halve(self, absent: float = 0.0) -> float:
        """As `undo`, of the first half of a split backward pass."""
        return max(self.halving, self.loss - absent)

    def undo(self, width: int = 0, absent: float = 0.0) -> float:
        """Bytes of workspace of its backward besides what it keeps and restores.

        width: bytes per parameter of gradients that are made one by one, beside all of which they are counted. absent: bytes that
        are counted too, but are there only when the loss's backward is over: FSDP gathers parameters for what comes before it.
        """
        unmade = width * (self.parameters - self.experts)
        return max(self.passing if width else self.undoing, self.loss - unmade - absent)


def part_of(name: str, pieces: Sequence[Operator], share: RankShapes, recompute: str) -> LayerCost:
    """What `pieces` are together under a recomputation setting."""
    plan = share.resolved
    kept, restored = tensors_of(pieces, recompute, plan.recomputed_modules)
    again = _repeated(pieces, recompute, plan.stops_early, plan.recomputed_modules)
    parted, gather = _partitioned(share, kept, restored) if recompute == "full" else ((), ())
    gradient = share.element * share.stream  # of the residual stream, on its way from part to part
    every = {name: kept.get(name, 0.0) + restored.get(name, 0.0) for name in kept | restored}
    trunk = pieces[:-1] if name == "head" and share.model.head else pieces
    repeated = gather + tuple(_recomputed(item) for item in _chained(again, "forward"))
    back = pieces[::-1]
    weights = _chained(back, "weight_gradient")
    whole = tuple(chain.from_iterable(piece.whole or piece.input_gradient + piece.weight_gradient for piece in back))
    return LayerCost(
        name=name,
        forward=parted + _chained(pieces, "forward"),
        input_gradient=_chained(back, "input_gradient"),
        weight_gradient=weights,
        recompute=repeated,
        backward=repeated + whole,
        gradients=gradients.made(back),
        held=_held(weights, share),
        logits=float(share.element * share.tokens * share.rows) if name == "head" and share.model.head else 0.0,
        saved=sum(kept.values()),
        restored=sum(restored.values()),
        temporary=gradient + _workspace([piece.forwards for piece in pieces], kept),
        undoing=gradient + _workspace(trunk, every),
        passing=gradient + _workspace(trunk, every, plan.bytes_per_gradient),
        halving=gradient + _workspace(trunk, every, stay=[_held(piece.weight_gradient, share) for piece in trunk]),
        loss=-math.inf if trunk is pieces else pieces[-1].temporary,
        narrow=sum(piece.narrow for piece in pieces if not piece.experts),
        narrow_experts=sum(piece.narrow for piece in pieces if piece.experts),
        model_flops=3.0 * share.cp * sum(piece.flops for piece in pieces),
        recomputed_flops=share.cp * sum(piece.flops for piece in again),
        **{name: sum(getattr(piece, name) for piece in pieces) for name in ("stranded", "parameters", "replicated", "experts")},
    )


def tensors_of(pieces: Sequence[Operator], recompute: str, modules: frozenset[str] = frozenset()) -> tuple[Tensors, Tensors]:
    """Tensors (kept, restored) under a recomputation setting; full recomputation and that of operators keep what the first
    piece gets, the latter also what operators make that are not repeated; selective what `modules` neither make nor need inside.
    """
    outer: Tensors = {}
    for piece in pieces:  # of readers of one tensor that keep it in different types, the widest is counted
        outer |= {name: max(float(size), outer.get(name, 0.0)) for name, size in piece.saved.items()}
    inner = {name: float(size) for piece in pieces for name, size in piece.inner.items()}
    if recompute == "none":
        return outer | inner, {}
    if recompute == "selective":
        again = _repeated(pieces, recompute, False, modules)
        anew = {name for piece in again for name in (*piece.makes, *piece.inner)}
        every = outer | inner
        return {name: size for name, size in every.items() if name not in anew}, {
            name: size for name, size in every.items() if name in anew
        }
    first = next(iter(outer))
    kept = {first: outer[first]}
    if recompute == "operators":
        kept |= {name: float(size) for piece in pieces for name, size in piece.made.items()}
    left = {name: size - kept.get(name, 0.0) for name, size in (outer | inner).items()}
    return kept, {name: size for name, size in left.items() if size > 0}


def _partitioned(share: RankShapes, kept: Tensors, restored: Tensors) -> tuple[Items, Items]:
    """DeepSpeed's partition_activations: of the input that is kept each tp rank keeps a part (what makes it, what makes it whole
    again; deepspeed/runtime/activation_checkpointing/checkpointing.py, partition_activations, gather_partitioned_activations).
    """
    if not share.resolved.runtime.partitions_checkpoints:
        return (), ()
    name, size = next(iter(kept.items()))
    kept[name] = size / share.tp
    restored[name] = size - kept[name]
    return (share.memory("checkpoint part", "forward", 2 * kept[name]),), share.collective("all_gather", "checkpoint", size)


def _repeated(pieces: Sequence[Operator], recompute: str, stops: bool, modules: frozenset[str]) -> list[Operator]:
    """The pieces whose forward work is done again.

    torch.utils.checkpoint (torch 2.13, use_reentrant=False) stops as soon as the last tensor that backward needs is there again:
    the input of the last matrix, whose own product and all that follows it are left out; torch.compile drops what nothing needs.
    Megatron-LM's runs to the end.
    """
    if recompute in ("none", "selective"):
        return [piece for piece in pieces if recompute == "selective" and modules.intersection(piece.modules)]
    if recompute == "operators":
        pieces, stops = operators.repeated(pieces), True
    return list(pieces[: max(number for number, piece in enumerate(pieces) if piece.saved)] if stops else pieces)


def _workspace(pieces: Sequence[Operator], tensors: Tensors, width: int = 0, stay: Sequence[float] = ()) -> float:
    """Bytes beyond all of `tensors` that are needed at most while the pieces run one by one, forward or backward.

    A tensor is there while the piece that first names it and those after it run. Negative when all are never there at once.
    width: bytes per parameter of gradients, beyond all of which the bytes are then counted: backward, those of the piece and of
    the pieces after it are there. stay: bytes that each piece leaves there, backward.
    """
    left, gone, unmade, left_there = dict(tensors), sum(tensors.values()), 0.0, sum(stay)
    most = left_there - gone - width * sum(piece.parameters - piece.experts for piece in pieces)
    for number, piece in enumerate(pieces):
        gone -= sum(left.pop(name, 0.0) for name in {**piece.saved, **piece.inner, **piece.made})
        left_there -= stay[number] if stay else 0.0
        most = max(most, piece.temporary - gone - unmade + left_there)
        unmade += width * (piece.parameters - piece.experts)
    return most


def _held(weights: Items, share: RankShapes) -> float:
    """Bytes of both operands of the weight gradients' products: gradients of outputs (m features × k tokens), inputs (k × n).

    An input that sequence parallelism gathers just before is held as the rank's part of it.
    """
    total, gathered, before = 0.0, False, ""
    for item in weights:
        if isinstance(item, Collective):
            gathered = True
        elif isinstance(item, Kernel) and item.kind == "gemm":
            batch, m, n, k = item.shape
            width = FP8_WIDTH if item.dtype == "fp8" else share.element
            inputs = 0 if item.label == before else n / share.tp if gathered else n  # products of one input have one label
            total += width * batch * k * (m + inputs)
            gathered, before = False, item.label
    return total


def _recomputed(item: Item) -> Item:
    return replace(item, phase="recompute") if isinstance(item, Kernel) else item


@lru_cache(maxsize=64)
def joined(layers: tuple[LayerCost, ...]) -> LayerCost:
    """Consecutive layers that keep only the first one's input and are recomputed together before the backward pass of all."""
    if len(layers) == 1:
        return layers[0]
    back = layers[::-1]
    before = tuple(_recomputed(item) for item in _chained(layers[:-1], "forward"))  # all of it: the next layer's input
    recompute = before + layers[-1].recompute
    whole = tuple(chain.from_iterable(part.backward[len(part.recompute) :] for part in back))
    made: tuple[gradients.Made, ...] = ()
    for part in back:
        made = gradients.before(made, len(part.backward) - len(part.recompute), len(part.weight_gradient)) + part.gradients
    sums = ("parameters", "replicated", "experts", "narrow", "narrow_experts", "model_flops", "held")
    return replace(
        layers[0],
        forward=_chained(layers, "forward"),
        input_gradient=_chained(back, "input_gradient"),
        weight_gradient=_chained(back, "weight_gradient"),
        recompute=recompute,
        backward=recompute + whole,
        gradients=made,
        restored=sum(part.saved + part.restored for part in layers) - layers[0].saved,
        recomputed_flops=sum(part.model_flops for part in layers[:-1]) / 3 + layers[-1].recomputed_flops,
        halving=max(part.halving for part in layers) + sum(part.held for part in layers[1:]),
        **{name: max(getattr(part, name) for part in layers) for name in ("temporary", "undoing", "passing")},
        **{name: sum(getattr(part, name) for part in layers) for name in sums},
    )


def _chained(works: Sequence[Operator] | Sequence[LayerCost], name: str) -> Items:
    """The items that all have by that name, one after the other."""
    return tuple(chain.from_iterable(getattr(work, name) for work in works))
