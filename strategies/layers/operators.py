"""Operators of a layer: a matrix, a norm, a residual connection … with their forward and backward work on one rank.

An operator says once what it runs forward, what it runs backward, which tensors it keeps in between, and which parameters it
holds; a layer is a list of operators. Gradients run in the reverse order of the list.

Work follows Megatron-LM with Transformer Engine's fusions, unless `plan.kernels` names others (`strategies.frameworks`;
what PyTorch's own operators keep is in `strategies.frameworks.pytorch.operators`):
* a kernel's bytes are the tensors that it reads and writes, once each; vectors of one feature or one token are left out;
* biases of matrices are added in the epilogue of the product, or in the memory kernel that follows; their gradients are sums of
  their own over all tokens;
* bias, dropout and residual addition are one kernel; scale, mask and softmax are one; the activation is one, with its gate;
* a norm's backward kernel makes its weight's gradient too; the residual gradient is added by a kernel of its own (autograd);
* gradients of biases and norms are accumulated by a kernel each, small but launched as any other;
* a weight gradient is accumulated by the product that makes it: its result is written, and read before that when a step has
  more than one microbatch; where it is not (`plan.accumulation_fusion`), a kernel of its own accumulates it.

Tensor parallelism cuts matrices by columns, then rows (arXiv:1909.08053 section 3). Forward, an all-reduce follows a matrix cut
by rows; backward, one follows the input gradient of a matrix cut by columns. With sequence parallelism (arXiv:2205.05198 section
4.2.2) a reduce-scatter takes the all-reduce's place and an all-gather stands before the other matrix; and as only 1/tp of the
input is kept, backward gathers it once more for the weight gradient. With `overlap_tp: weight_gradient` that gather runs beside
the product that makes the input gradient, and the input gradient's reduction beside the one that makes the weight gradient, as
Megatron-LM does by default (megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication); a
backward pass that a schedule splits in two has nothing to hide them behind. With `overlap_tp: pieces` the gather before a product
goes round a ring of tp ranks, too, beside the product of the tokens that have come, and so does the reduce-scatter after one in
PyTorch's async TP; Transformer Engine's userbuffers scatter the sums of a quarter of the tokens beside the product of the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from sim.program import Kernel
from strategies.frameworks import passes
from strategies.layers.fp8 import Fp8Products
from strategies.layers.rank_shapes import FLOAT, RankShapes
from strategies.layers.tensor_overlap import Items, beside
from strategies.plan.options import FP8_WIDTH

Shape = tuple[int, ...]  # of a parameter: (rows, columns) of a matrix, (features,) of a vector


@dataclass(frozen=True, slots=True)
class Operator:
    """Work, tensors and parameters of one step of a layer on one rank, for one microbatch."""

    forward: Items = ()
    input_gradient: Items = ()
    weight_gradient: Items = ()
    both_gradients: Items = ()  # in the order in which they run, where that is not one after the other
    saved: Mapping[str, float] = field(default_factory=dict)  # tensors kept for backward: name -> bytes; one name, one tensor
    modules: tuple[str, ...] = ()  # names of `plan.recompute_modules` that it is part of
    makes: tuple[str, ...] = ()  # tensors that it makes and later operators keep: recomputing its module restores them
    inner: Mapping[str, float] = field(default_factory=dict)  # name -> bytes of saved tensors that its module restores
    temporary: float = 0.0  # bytes of tensors that exist only while it runs
    before: float | None = None  # bytes of temporary tensors of its forward pass, where these are fewer
    stranded: float = 0.0  # bytes in blocks of its forward pass that nothing reuses where its backward needs most
    shapes: tuple[Shape, ...] = ()  # of its parameters on this rank, matrices in the order in which gradients are made
    tied: tuple[Shape, ...] = ()  # shapes of matrices that are parameters of another operator
    replicated: int = 0  # elements of its parameters that every tp rank holds
    experts: int = 0  # elements of parameters of routed experts that are spread over ep ranks
    fp8_parameters: int = 0  # elements of matrices whose products are in fp8
    kept_results: Mapping[str, float] = field(default_factory=dict)  # recompute=operators: results kept besides `saved`
    again: Items | None = None  # recompute=operators: what of `forward` is repeated, where that is not all
    flops: float = 0.0  # of forward matrix products of the tp group on this cp rank's tokens, attention counted in full
    recomputed: float = 0.0  # FLOPs of the forward pass that its backward pass does again by itself
    passes: int = 3  # how many times `flops` a microbatch takes: forward, for gradients of inputs, for gradients of weights
    for_weights: tuple[str, ...] = ()  # names of saved tensors that only its weights' gradients need
    frozen_shapes: tuple[Shape, ...] = ()  # of parameters that have no gradients
    frozen_bytes: float = 0.0  # that these take
    beside: str = ""  # the label of a frozen product whose input it reads too

    @property
    def backward(self) -> Items:
        """Work of the backward pass, both gradients."""
        return self.both_gradients or self.input_gradient + self.weight_gradient

    @property
    def names(self) -> Mapping[str, float]:
        """Tensors that are there from its forward to its backward pass."""
        return {**self.saved, **self.inner, **self.kept_results}

    @property
    def parameters(self) -> int:
        """Elements on this rank."""
        return sum(map(math.prod, self.shapes))

    @property
    def forwards(self) -> Operator:
        """As far as the forward pass needs memory."""
        return self if self.before is None else replace(self, temporary=self.before)


def column_linear(
    rank: RankShapes,
    label: str,
    outputs: int,
    bias: bool,
    local: int | None = None,
    source: str = "",
    inputs: int = 0,
    parts: tuple[int, ...] = (),
    normed: bool = False,
) -> Operator:
    """Matrix `inputs` (hidden) → `outputs`, cut by columns: this rank has `local` (outputs / tp) of them. source: name of its
    input. parts: `local` of each matrix where a model has several in its place. normed: its input is a norm's result, and nothing
    else reads it.
    """
    hidden, tokens = inputs or rank.model.hidden, rank.tokens
    local = local or outputs // rank.tp
    sizes = parts if rank.kernels.separate_products and parts else (local,)
    inside = label != "head"  # of a layer, which torch.compile takes and Transformer Engine makes; the head is PyTorch's own
    fp8 = Fp8Products(rank, label, local, hidden, on=inside)
    gathered = rank.element * tokens * hidden
    gather = rank.gather(f"{label} input", "forward", hidden, fp8.moved, inside and not fp8.late)
    again = () if rank.gathers_once else gather
    kept = (tokens if rank.gathers_once else rank.local_tokens) * hidden  # elements of the input
    reduce = rank.reduce(f"{label} input gradient", "backward", hidden, inside and len(sizes) == 1)
    casts = fp8.input_casts((tokens if fp8.late else rank.local_tokens) * hidden, bool(gather), normed and rank.norms_in_fp8)
    turned = fp8.turned("input", tokens * hidden, bool(gather))
    cast, recast = fp8.gradient(tokens * local), fp8.again(kept, bool(gather) and rank.gathers_once)
    result: Items = ()
    if inside:
        result = rank.fills(label, "forward", rank.element * tokens * local)
        cast += rank.fills(f"{label} input gradient", "backward", gathered)
    products = tuple(rank.gemm(label, "forward", tokens, size, hidden, dtype=fp8.dtype) for size in sizes)
    gradients = tuple(rank.gemm(label, "backward", tokens, hidden, size, dtype=fp8.dtype) for size in reversed(sizes))
    sums = _added(rank, label, gathered, len(sizes))
    summed = (*gradients, *sums)
    back = rank.before_reduce(summed, reduce, inside) if rank.gathers_once else (*summed, *reduce)
    summed_in_cast = label == "qkv" and fp8.sums_in_casts
    each = [
        (*_weight_gradients(rank, label, size, hidden, bias, fp8.dtype, summed_in_cast), *fp8.rescaled("weight", size * hidden))
        for size in reversed(sizes)
    ]
    weights: Items = tuple(chain.from_iterable(each))
    both: Items = ()
    if rank.overlap("weight_gradient") and not rank.gathers_once:
        both = (*recast, *beside((*cast, *summed), again), *beside((*turned, *weights), reduce))
    elif len(sizes) > 1 and not reduce and not gather:  # autograd makes both gradients of a matrix, the last matrix first
        both = (
            *cast,
            *recast,
            *turned,
            *chain.from_iterable((product, *own) for product, own in zip(gradients, each, strict=True)),
            *sums,
        )
    apart = bias and label == "qkv" and rank.kernels.adds_qkv_bias
    added = (rank.memory(f"{label} bias", "forward", 2 * rank.element * tokens * local),) if apart else ()
    return Operator(
        forward=(*result, *_multiplied(rank, fp8, gather, casts, products, inside), *added),
        input_gradient=(*cast, *back),
        weight_gradient=(*recast, *again, *turned, *weights),
        both_gradients=both,
        saved={source or f"{label} input": fp8.kept * kept},
        for_weights=(source or f"{label} input",),
        temporary=gathered + (gathered if again else 0) + fp8.copies(tokens * local),  # input's gradient, all tokens' input
        shapes=(*((size, hidden) for size in sizes), *((size,) for size in sizes if bias)),
        fp8_parameters=fp8.elements,
        flops=2.0 * tokens * hidden * outputs,
    )


def _multiplied(
    rank: RankShapes, fp8: Fp8Products, gather: Items, casts: Items, products: tuple[Kernel, ...], fused: bool = True
) -> Items:
    """Products of tokens that are cast, and gathered before or after that."""
    return (*gather, *casts, *products) if fp8.late else (*casts, *rank.after_gather(gather, products, fused))


def _weight_gradients(rank: RankShapes, label: str, size: int, inputs: int, bias: bool, dtype: str, summed: bool) -> Items:
    """Gradients of a matrix `inputs` → `size` and of its bias. summed: as of `_bias_gradient`."""
    matrix = rank.weight_gemm(f"{label} weight", size, inputs, rank.tokens, dtype=dtype)
    return matrix + _bias_gradient(rank, label, rank.tokens, size, summed) if bias else matrix


def _bias_gradient(rank: RankShapes, label: str, tokens: int, size: int, summed: bool = False) -> tuple[Kernel, ...]:
    """The sum over tokens of the gradients of `size` features. summed: the kernel that casts them adds them up."""
    moved = rank.element * tokens * size
    there = () if summed else (rank.reduction(f"{label} bias", "backward", moved),)
    return (*there, *rank.vectors(f"{label} bias", size))


def _added(rank: RankShapes, label: str, size: int, ways: int) -> tuple[Kernel, ...]:
    """The sum of an input's gradients of `size` bytes that come from several products; torch.compile adds them up in the kernel
    that takes them, which then reads more.
    """
    if rank.kernels.compiled:
        return (rank.memory(f"{label} gradients", "backward", (ways - 1) * size),) * (ways > 1)
    return (rank.memory(f"{label} gradients", "backward", 3 * size),) * (ways - 1)


def row_linear(rank: RankShapes, label: str, inputs: int, bias: bool) -> Operator:
    """Matrix `inputs` → hidden, cut by rows: this rank has inputs / tp of them; every rank has its bias."""
    hidden, tokens = rank.model.hidden, rank.tokens
    local = inputs // rank.tp
    fp8 = Fp8Products(rank, label, hidden, local)
    gather = rank.gather(f"{label} gradient", "backward", width=fp8.moved, fused=not fp8.late)
    product = rank.gemm(label, "forward", tokens, hidden, local, dtype=fp8.dtype)
    result = rank.fills(label, "forward", rank.element * tokens * hidden)
    forward = rank.before_reduce((product,), rank.reduce(label, "forward"))
    cast = fp8.gradient((tokens if fp8.late else rank.local_tokens) * hidden, bool(gather))
    product_back = (rank.gemm(label, "backward", tokens, local, hidden, dtype=fp8.dtype),)
    backward = _multiplied(rank, fp8, gather, cast, product_back)
    weights: Items = (
        *rank.weight_gemm(f"{label} weight", hidden, local, tokens, dtype=fp8.dtype),
        *fp8.rescaled("weight", hidden * local),
    )
    if bias:
        weights += _bias_gradient(rank, label, rank.local_tokens, hidden)
    read = label == "mlp down"  # by its activation's gradient
    scales = () if read else fp8.rescaled("input gradient", tokens * local)
    fills = rank.fills(f"{label} input gradient", "backward", rank.element * tokens * local)
    return Operator(
        forward=(*fp8.input_casts(tokens * local), *result, *forward),
        input_gradient=(*fills, *backward, *scales),
        weight_gradient=(*fp8.again(tokens * local), *fp8.turned("gradient", tokens * hidden, bool(gather)), *weights),
        saved={f"{label} input": fp8.kept * tokens * local},
        for_weights=(f"{label} input",),
        temporary=rank.element * tokens * (local + (hidden if gather else 0)) + fp8.copies(tokens * hidden),
        shapes=((hidden, local), *([(hidden,)] if bias else [])),
        fp8_parameters=fp8.elements,
        replicated=hidden * bias,
        flops=2.0 * tokens * inputs * hidden,
    )


def replicated_linear(
    rank: RankShapes,
    label: str,
    tokens: int,
    outputs: int,
    ranks: int = 1,
    bias: bool = True,
    source: str = "",
    in_fp8: bool = False,
) -> Operator:
    """Matrix hidden → `outputs`, whole on every rank, on `tokens` tokens; `ranks` ranks have different tokens."""
    hidden, elements = rank.model.hidden, rank.element * tokens
    fp8 = Fp8Products(rank, label, outputs, hidden, on=in_fp8)
    weights = rank.weight_gemm(f"{label} weight", outputs, hidden, tokens, dtype=fp8.dtype)
    bias_gradient = (rank.reduction(f"{label} bias", "backward", elements * outputs),)
    forward = rank.gemm(label, "forward", tokens, outputs, hidden, dtype=fp8.dtype)
    backward = rank.gemm(label, "backward", tokens, hidden, outputs, dtype=fp8.dtype)
    return Operator(
        forward=(*fp8.input_casts(tokens * hidden), forward),
        input_gradient=(*fp8.gradient(tokens * outputs), backward),
        weight_gradient=(*fp8.again(tokens * hidden), *weights, *(bias_gradient if bias else ())),
        saved={source or f"{label} input": fp8.kept * tokens * hidden},
        for_weights=(source or f"{label} input",),
        temporary=elements * hidden,
        shapes=((outputs, hidden), *([(outputs,)] if bias else [])),
        fp8_parameters=fp8.elements,
        replicated=outputs * (hidden + bias),
        flops=2.0 * outputs * hidden * tokens * ranks,
    )


def norm(
    rank: RankShapes, label: str, residual: bool = False, source: str = "", features: int = 0, into_product: bool = False
) -> Operator:
    """A norm of the residual stream, or of so many features. With `residual`, its input also goes another way: gradients add.
    into_product: nothing but a matrix reads its result.
    """
    features = features or rank.model.hidden
    size, parameters = rank.element * rank.local_tokens * features, rank.model.norm_parameters(features)
    kernels, elements = rank.kernels, rank.local_tokens * features
    ways = kernels.norm(rank.model.norm == "rmsnorm", rank.element)
    there = passes.narrowed(ways.forward, rank.element - FP8_WIDTH) if into_product and rank.norms_in_fp8 else ways.forward
    apart = residual and not kernels.compiled
    addition = (rank.memory(f"{label} residual", "backward", 3 * size),)
    kept = {source or f"{label} input": size}
    if rank.eager:
        one_operator = rank.model.norm == "layernorm"
        kept[f"{label} statistics"] = FLOAT * (size // rank.element // features) * (2 if one_operator else 1)
        if not one_operator:  # written out: see strategies.frameworks.pytorch.operators
            kept[f"{label} normed"] = size
    forward: Items = (*rank.fills(label, "forward", size), *rank.run(label, "forward", elements, there))
    backward: Items = (*rank.fills(label, "backward", size), *rank.run(label, "backward", elements, ways.backward))
    if rank.resolved.sync_norm:
        gather, reduce = rank.statistics(label, features)
        forward = (rank.memory(f"{label} statistics", "forward", size), gather, *forward)
        backward = (rank.memory(f"{label} sums", "backward", 2 * size), reduce, *backward)
    return Operator(
        forward=forward,
        input_gradient=(*backward, *rank.vectors(label, features, parameters // features), *(addition if apart else ())),
        saved=kept,
        for_weights=(f"{label} normed",),
        shapes=((features,),) * (parameters // features),
        replicated=parameters,
    )


def residual(rank: RankShapes, label: str) -> Operator:
    """Bias, dropout and residual addition. The mask has a byte per element."""
    ways = rank.kernels.residual(rank.element, rank.dropout)
    forward, backward = (
        rank.run(label, "forward", rank.stream, ways.forward),
        rank.run(label, "backward", rank.stream, ways.backward),
    )
    return Operator(forward, backward, saved={f"{label} dropout mask": rank.stream} if rank.dropout else {})


def pointwise(rank: RankShapes, label: str, read: int, written: int, saved: str = "") -> Operator:
    """A function of every element: `read` elements to `written`; with `saved` its input is kept under this name for backward."""
    moved = rank.element * (read + written)
    return Operator(
        forward=(rank.memory(label, "forward", moved),),
        input_gradient=(rank.memory(label, "backward", moved + (rank.element * read if saved else 0)),),
        saved={saved: rank.element * read} if saved else {},
        temporary=moved,
    )


def activation(rank: RankShapes, label: str, elements: int, saved: str) -> Operator:
    """The activation of an MLP of so many results; a gate beside it doubles what is read."""
    plain = pointwise(rank, label, elements * (2 if rank.model.gated else 1), elements, saved)
    width = rank.element
    ways = rank.kernels.gate(width) if rank.model.gated else passes.gelu(width)
    forward, backward = (rank.run(label, phase, elements, way) for phase, way in zip(("forward", "backward"), ways, strict=True))
    fp8 = rank.resolved.fp8
    if fp8 is None or not fp8.activation_func_input_store:
        return replace(plain, forward=forward, input_gradient=backward)
    number = elements * (2 if rank.model.gated else 1)  # cast to be kept, and cast back
    there, back = (rank.memory(f"{label} input in fp8", phase, number * (width + FP8_WIDTH)) for phase in ("forward", "backward"))
    return replace(plain, forward=(*forward, there), input_gradient=(back, *backward), saved={saved: FP8_WIDTH * number})
