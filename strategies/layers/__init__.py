"""Layer work: what the embedding, one layer and the head cost on one rank for one microbatch.

`parts(model, plan)` gives kernels, collectives, activation bytes and parameters; `saved_tensors(model, plan)` lists the
activations of a layer by name. Which kernels there are and what they move is stated in `strategies.layers.pieces`.

FLOPs of a kernel are those that it executes: a causal flash kernel executes half of its products. `model_flops` follows the rule
of Megatron-LM and most papers (arXiv:2104.04473 appendix): matrix products only, attention in full even when causal, backward
twice forward, no recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from sim.program import Collective, Kernel
from strategies.layers.ends import embedding, head
from strategies.layers.pieces import Item, Items, Piece, Share
from strategies.layers.transformer import transformer_layer
from strategies.model import Experts, Model
from strategies.plan import Resolved
from topologies.reading import UserError

__all__ = ["Item", "Items", "Part", "Parts", "parts", "restored_tensors", "saved_tensors"]

Tensors = dict[str, float]


@dataclass(frozen=True, slots=True)
class Part:
    """Work of the embedding, one layer or the head on one rank for one microbatch. Bytes, FLOPs, elements."""

    name: str  # "embedding", "layer" or "head"
    forward: Items
    input_gradient: Items  # backward with respect to activations
    weight_gradient: Items  # backward with respect to parameters: may wait
    recompute: Items  # forward work repeated just before the backward pass
    saved: float  # bytes of activations kept from its forward to its backward
    restored: float  # bytes of activations that recomputation makes anew: they exist only while its backward runs
    temporary: float  # bytes of the largest workspace of its backward or forward, besides saved and restored
    parameters: int  # elements on this rank
    replicated: int  # of them, those that every tp rank holds: norms, biases of matrices cut by rows, positions
    experts: int  # of the parameters, those of routed experts that are spread over ep ranks: they have fewer copies
    model_flops: float  # of the whole tp and cp group, forward and backward
    recomputed_flops: float  # the same of what is recomputed
    held: float  # bytes that weight gradients need after the input gradient: inputs of matrices and gradients of their outputs
    backward: Items  # recompute, input gradient, weight gradient: an order in which the whole can run


@dataclass(frozen=True, slots=True)
class Parts:
    """A model under a plan: the embedding, one `Part` per kind of layer, the head."""

    embedding: Part
    layers: tuple[Part, ...]  # one per kind
    kinds: tuple[int, ...]  # for each layer of the model, its index in `layers`
    head: Part  # final norm, language-model head and loss
    tied: int  # elements of the token embedding on this rank that the head uses too; 0 when it has a matrix of its own

    def layer(self, index: int) -> Part:
        """Layer 0 … layers − 1 of the model."""
        return self.layers[self.kinds[index]]


@lru_cache(maxsize=1024)
def parts(model: Model, plan: Resolved) -> Parts:
    """Work of `model` under `plan`. Raises UserError for layers that are not simulated yet."""
    _check(model, plan)
    share, recompute = Share(model, plan), plan.plan.recompute
    kinds = list(dict.fromkeys(_experts(model, layer) for layer in range(model.layers)))
    return Parts(
        embedding=_part("embedding", embedding(share), share, "none"),
        layers=tuple(_part("layer", transformer_layer(share, moe), share, recompute) for moe in kinds),
        kinds=tuple(kinds.index(_experts(model, layer)) for layer in range(model.layers)),
        head=_part("head", head(share), share, "none"),
        tied=share.rows * model.hidden if model.head and model.tied else 0,
    )


def _experts(model: Model, layer: int) -> Experts | None:
    """The experts of a layer; None when it is dense."""
    return model.experts if model.is_mixture(layer) else None


def saved_tensors(model: Model, plan: Resolved, layer: int = 0) -> Tensors:
    """Activations of a layer that a rank keeps from forward to backward of a microbatch: name -> bytes.

    As arXiv:2205.05198 counts them, section 4: tensors of tokens × features and masks of a byte per element; the mean and
    deviation of a norm are left out. A gated activation is one kernel that keeps gate and up, and the next matrix its product.
    """
    _check(model, plan)
    return _tensors(transformer_layer(Share(model, plan), _experts(model, layer)), plan.plan.recompute)[0]


def restored_tensors(model: Model, plan: Resolved, layer: int = 0) -> Tensors:
    """Activations of a layer that recomputation makes anew in the backward pass: name -> bytes."""
    _check(model, plan)
    return _tensors(transformer_layer(Share(model, plan), _experts(model, layer)), plan.plan.recompute)[1]


def _check(model: Model, plan: Resolved) -> None:
    where = f"model {model.name}"
    if model.latent is not None and (plan.plan.cp > 1 or plan.plan.attention != "flash"):
        rule = (
            f"latent attention with cp={plan.plan.cp}, attention={plan.plan.attention} is not simulated yet: only cp=1, flash is"
        )
        raise UserError(f"{where}: latent.kv_rank={model.latent.kv_rank}: {rule}")
    if plan.plan.kernels == "torch":
        _check_eager(model, plan)
    if model.norms != 2:
        raise UserError(f"{where}: norms={model.norms} is not simulated yet: layers must have 2 norms")
    if model.window is not None and model.window < plan.sequence and plan.plan.attention == "flash":
        rule = f"a sliding window shorter than sequence={plan.sequence} is not simulated yet with attention=flash"
        raise UserError(f"{where}: window={model.window}: {rule}")


def _check_eager(model: Model, plan: Resolved) -> None:
    """What PyTorch's own operators are not written down for."""
    share = Share(model, plan)
    unknown = {
        "dropout": share.dropout or share.attention_dropout, "experts": model.experts is not None,
        "latent attention": model.latent is not None, "qk_norm": model.qk_norm, "cp": share.cp > 1,
        "recompute=selective": plan.plan.recompute == "selective",
    }  # fmt: skip
    for what, there in unknown.items():
        if there:
            raise UserError(f"model {model.name}: kernels=torch is not simulated with {what}: use kernels=megatron")


def _tensors(pieces: Sequence[Piece], recompute: str) -> tuple[Tensors, Tensors]:
    """Tensors (kept, restored) under a recomputation setting; full recomputation keeps what the first piece gets."""
    outer = {name: float(size) for piece in pieces for name, size in piece.saved.items()}
    inner = {name: float(size) for piece in pieces for name, size in piece.inner.items()}
    if recompute == "none":
        return outer | inner, {}
    if recompute == "selective":
        return outer, inner
    first = next(iter(outer))
    return {first: outer[first]}, {name: size for name, size in (outer | inner).items() if name != first}


def _part(name: str, pieces: Sequence[Piece], share: Share, recompute: str) -> Part:
    kept, restored = _tensors(pieces, recompute)
    again = [piece for piece in pieces if recompute == "full" or (recompute == "selective" and piece.core)]
    gradient = share.element * share.stream  # of the residual stream, on its way from part to part
    repeated = tuple(_recomputed(item) for piece in again for item in piece.forward)
    inputs = tuple(chain.from_iterable(piece.input_gradient for piece in reversed(pieces)))
    weights = tuple(chain.from_iterable(piece.weight_gradient for piece in reversed(pieces)))
    return Part(
        name=name,
        forward=tuple(chain.from_iterable(piece.forward for piece in pieces)),
        input_gradient=inputs,
        weight_gradient=weights,
        recompute=repeated,
        backward=repeated + inputs + weights,
        held=_held(weights, share),
        saved=sum(kept.values()),
        restored=sum(restored.values()),
        temporary=float(gradient + max((piece.temporary for piece in pieces), default=0)),
        parameters=sum(piece.parameters for piece in pieces),
        replicated=sum(piece.replicated for piece in pieces),
        experts=sum(piece.experts for piece in pieces),
        model_flops=3.0 * share.cp * sum(piece.flops for piece in pieces),
        recomputed_flops=share.cp * sum(piece.flops for piece in again),
    )


def _held(weights: Items, share: Share) -> float:
    """Bytes of both operands of the weight gradients' products: gradients of outputs (m features × k tokens), inputs (k × n).

    An input that sequence parallelism gathers just before is held as the rank's part of it.
    """
    total, gathered = 0.0, False
    for item in weights:
        if isinstance(item, Collective):
            gathered = True
        elif item.kind == "gemm":
            batch, m, n, k = item.shape
            total += batch * k * (m + (n / share.tp if gathered else n))
            gathered = False
    return total * share.element


def _recomputed(item: Item) -> Item:
    return replace(item, phase="recompute") if isinstance(item, Kernel) else item
