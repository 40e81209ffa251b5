"""Pieces that layers are made of: a matrix, a norm, a residual connection … with their forward and backward work on one rank.

A piece says once what it runs forward, what it runs backward, which tensors it keeps in between, and which parameters it holds;
a layer is a list of pieces. Gradients run in the reverse order of the list.

Work follows Megatron-LM with Transformer Engine's fusions, unless `plan.kernels` names others (`strategies.frameworks`;
what PyTorch's own operators keep is in `strategies.frameworks.pytorch.operators`):
* a kernel's bytes are the tensors that it reads and writes, once each; vectors of one feature or one token are left out;
* biases of matrices are added in the epilogue of the product, or in the memory kernel that follows; their gradients are sums of
  their own over all tokens;
* bias, dropout and residual addition are one kernel; scale, mask and softmax are one; the activation is one, with its gate;
* a norm's backward kernel makes its weight's gradient too; the residual gradient is added by a kernel of its own (autograd);
* gradients of biases and norms are added to those before by a kernel each, small but launched as any other;
* a weight gradient is accumulated by the product that makes it: its result is written, and read before that when a step has
  more than one microbatch; where it is not (`plan.accumulation_fusion`), a kernel of its own adds it to those before.

Tensor parallelism cuts matrices by columns, then rows (arXiv:1909.08053 section 3). Forward, an all-reduce follows a matrix cut
by rows; backward, one follows the input gradient of a matrix cut by columns. With sequence parallelism (arXiv:2205.05198 section
4.2.2) a reduce-scatter takes the all-reduce's place and an all-gather stands before the other matrix; and as only 1/tp of the
input is kept, backward gathers it once more for the weight gradient. With `overlap_tp: weight_gradient` that gather runs beside
the product that makes the input gradient, and the input gradient's reduction beside the one that makes the weight gradient, as
Megatron-LM does by default (megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication); a
backward pass that a schedule splits in two has nothing to hide them behind. With `overlap_tp: pieces` also the gather before a
product, and the reduce-scatter after one, go round a ring of tp ranks beside the product of the tokens that have come
(Transformer Engine's userbuffers, PyTorch's async TP).
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
    whole: Items = ()  # both gradients, where they are not simply one after the other
    saved: Mapping[str, float] = field(default_factory=dict)  # tensors kept for backward: name -> bytes; one name, one tensor
    modules: tuple[str, ...] = ()  # of `plan.recompute_modules`, those that it is part of
    makes: tuple[str, ...] = ()  # tensors that it makes and later pieces keep: recomputing its module restores them
    inner: Mapping[str, float] = field(default_factory=dict)  # as `saved`, of tensors that recomputing its module restores
    temporary: float = 0.0  # bytes of tensors that exist only while it runs
    before: float | None = None  # the same while its forward runs, where that is less
    stranded: float = 0.0  # bytes in blocks of its forward pass that nothing reuses where its backward needs most
    shapes: tuple[Shape, ...] = ()  # of its parameters on this rank, matrices in the order in which gradients are made
    tied: tuple[Shape, ...] = ()  # of matrices that are parameters of another piece
    replicated: int = 0  # elements of its parameters that every tp rank holds
    experts: int = 0  # of the parameters, those of routed experts that are spread over ep ranks
    narrow: int = 0  # of the parameters, those of matrices whose products are in fp8
    made: Mapping[str, float] = field(default_factory=dict)  # recompute=operators: what it makes and keeps besides `saved`
    again: Items | None = None  # recompute=operators: what of `forward` is repeated, where that is not all
    flops: float = 0.0  # of forward matrix products of the whole tp group on this cp rank's tokens, attention counted in full

    @property
    def parameters(self) -> int:
        """Elements on this rank."""
        return sum(map(math.prod, self.shapes))

    @property
    def forwards(self) -> Operator:
        """As far as the forward pass needs memory."""
        return self if self.before is None else replace(self, temporary=self.before)


def column_linear(
    share: RankShapes,
    label: str,
    outputs: int,
    bias: bool,
    local: int | None = None,
    source: str = "",
    inputs: int = 0,
    parts: tuple[int, ...] = (),
) -> Operator:
    """Matrix `inputs` (hidden) → `outputs`, of which this rank has `local` (outputs / tp); `source` names its input. `parts`:
    `local` of each of the matrices that it is where a model has one for each.
    """
    hidden, tokens = inputs or share.model.hidden, share.tokens
    local = local or outputs // share.tp
    sizes = parts if share.kernels.separate_products and parts else (local,)
    inside = label != "head"  # of a layer, which torch.compile takes and Transformer Engine makes; the head is PyTorch's own
    narrow = Fp8Products(share, label, local, hidden, on=inside)
    gathered = share.element * tokens * hidden
    gather = share.gather(f"{label} input", "forward", hidden, narrow.moved, inside and not narrow.late)
    again = () if share.gathers_once else gather
    kept = (tokens if share.gathers_once else share.parted) * hidden  # elements of the input
    reduce = share.reduce(f"{label} input gradient", "backward", hidden, inside and len(sizes) == 1)
    taken = narrow.taken((tokens if narrow.late else share.parted) * hidden, bool(gather))
    cast, recast = narrow.gradient(tokens * local), narrow.again(kept, bool(gather) and share.gathers_once)
    result: Items = ()
    if inside:
        result = share.made(label, "forward", share.element * tokens * local)
        cast += share.made(f"{label} input gradient", "backward", gathered)
    products = tuple(share.gemm(label, "forward", tokens, size, hidden, dtype=narrow.dtype) for size in sizes)
    gradients = tuple(share.gemm(label, "backward", tokens, hidden, size, dtype=narrow.dtype) for size in sizes)
    summed = (*gradients, *_added(share, label, gathered, len(sizes)))
    back = share.before_reduce(summed, reduce, inside) if share.gathers_once else (*summed, *reduce)
    weights = _weight_gradients(share, label, sizes, hidden, bias, narrow.dtype)
    whole: Items = ()
    if share.overlap("weight_gradient") and not share.gathers_once:
        whole = (*recast, *beside((*cast, *summed), again), *beside(weights, reduce))
    apart = bias and label == "qkv" and share.kernels.adds_qkv_bias
    added = (share.memory(f"{label} bias", "forward", 2 * share.element * tokens * local),) if apart else ()
    return Operator(
        forward=(*result, *_multiplied(share, narrow, gather, taken, products, inside), *added),
        input_gradient=(*cast, *back),
        weight_gradient=(*recast, *again, *weights),
        whole=whole,
        saved={source or f"{label} input": narrow.kept * kept},
        temporary=gathered + (gathered if again else 0) + narrow.copies(tokens * local),  # input's gradient, all tokens' input
        shapes=(*((size, hidden) for size in sizes), *((size,) for size in sizes if bias)),
        narrow=narrow.elements,
        flops=2.0 * tokens * hidden * outputs,
    )


def _multiplied(
    share: RankShapes, narrow: Fp8Products, gather: Items, casts: Items, products: tuple[Kernel, ...], fused: bool = True
) -> Items:
    """Products of tokens that are cast, and gathered before or after that."""
    return (*gather, *casts, *products) if narrow.late else (*casts, *share.after_gather(gather, products, fused))


def _weight_gradients(share: RankShapes, label: str, sizes: tuple[int, ...], inputs: int, bias: bool, dtype: str) -> Items:
    """Of matrices `inputs` → each of `sizes`, then of their biases."""
    matrices = (share.weight_gemm(f"{label} weight", size, inputs, share.tokens, dtype=dtype) for size in sizes)
    biases = (_bias_gradient(share, label, share.tokens, size) for size in sizes if bias)
    return tuple(chain.from_iterable(chain(matrices, biases)))


def _bias_gradient(share: RankShapes, label: str, tokens: int, size: int) -> tuple[Kernel, ...]:
    """The sum over tokens of the gradients of `size` features."""
    moved = share.element * tokens * size
    return (share.reduction(f"{label} bias", "backward", moved), *share.vectors(f"{label} bias", size))


def _added(share: RankShapes, label: str, size: int, ways: int) -> tuple[Kernel, ...]:
    """The sum of an input's gradients of `size` bytes that come from several products; torch.compile adds them up in the kernel
    that takes them, which then reads more.
    """
    if share.kernels.compiled:
        return (share.memory(f"{label} gradients", "backward", (ways - 1) * size),) * (ways > 1)
    return (share.memory(f"{label} gradients", "backward", 3 * size),) * (ways - 1)


def row_linear(share: RankShapes, label: str, inputs: int, bias: bool) -> Operator:
    """Matrix `inputs` → hidden, of which this rank has inputs / tp; its bias is whole on every rank."""
    hidden, tokens = share.model.hidden, share.tokens
    local = inputs // share.tp
    narrow = Fp8Products(share, label, hidden, local)
    gather = share.gather(f"{label} gradient", "backward", width=narrow.moved, fused=not narrow.late)
    product = share.gemm(label, "forward", tokens, hidden, local, dtype=narrow.dtype)
    result = share.made(label, "forward", share.element * tokens * hidden)
    forward = share.before_reduce((product,), share.reduce(label, "forward"))
    cast = narrow.gradient((tokens if narrow.late else share.parted) * hidden, bool(gather))
    product_back = (share.gemm(label, "backward", tokens, local, hidden, dtype=narrow.dtype),)
    backward = _multiplied(share, narrow, gather, cast, product_back)
    weights = share.weight_gemm(f"{label} weight", hidden, local, tokens, dtype=narrow.dtype)
    if bias:
        weights += _bias_gradient(share, label, share.parted, hidden)
    made = share.made(f"{label} input gradient", "backward", share.element * tokens * local)
    return Operator(
        forward=(*narrow.taken(tokens * local), *result, *forward),
        input_gradient=(*made, *backward),
        weight_gradient=(*narrow.again(tokens * local), *weights),
        saved={f"{label} input": narrow.kept * tokens * local},
        temporary=share.element * tokens * (local + (hidden if gather else 0)) + narrow.copies(tokens * hidden),
        shapes=((hidden, local), *([(hidden,)] if bias else [])),
        narrow=narrow.elements,
        replicated=hidden * bias,
        flops=2.0 * tokens * inputs * hidden,
    )


def whole_linear(
    share: RankShapes,
    label: str,
    tokens: int,
    outputs: int,
    ranks: int = 1,
    bias: bool = True,
    source: str = "",
    in_fp8: bool = False,
) -> Operator:
    """Matrix hidden → `outputs`, whole on every rank, on `tokens` tokens; `ranks` ranks have different tokens."""
    hidden, elements = share.model.hidden, share.element * tokens
    narrow = Fp8Products(share, label, outputs, hidden, on=in_fp8)
    weights = share.weight_gemm(f"{label} weight", outputs, hidden, tokens, dtype=narrow.dtype)
    bias_gradient = (share.reduction(f"{label} bias", "backward", elements * outputs),)
    forward = share.gemm(label, "forward", tokens, outputs, hidden, dtype=narrow.dtype)
    backward = share.gemm(label, "backward", tokens, hidden, outputs, dtype=narrow.dtype)
    return Operator(
        forward=(*narrow.taken(tokens * hidden), forward),
        input_gradient=(*narrow.gradient(tokens * outputs), backward),
        weight_gradient=(*narrow.again(tokens * hidden), *weights, *(bias_gradient if bias else ())),
        saved={source or f"{label} input": narrow.kept * tokens * hidden},
        temporary=elements * hidden,
        shapes=((outputs, hidden), *([(outputs,)] if bias else [])),
        narrow=narrow.elements,
        replicated=outputs * (hidden + bias),
        flops=2.0 * outputs * hidden * tokens * ranks,
    )


def norm(share: RankShapes, label: str, residual: bool = False, source: str = "", features: int = 0) -> Operator:
    """A norm of the residual stream, or of so many features. With `residual`, its input also goes another way: gradients add."""
    features = features or share.model.hidden
    size, parameters = share.element * share.parted * features, share.model.norm_parameters(features)
    kernels, elements = share.kernels, share.parted * features
    ways = kernels.norm(share.model.norm == "rmsnorm", share.element)
    apart = residual and not kernels.compiled
    addition = (share.memory(f"{label} residual", "backward", 3 * size),)
    kept = {source or f"{label} input": size}
    if share.eager:
        whole = share.model.norm == "layernorm"
        kept[f"{label} statistics"] = FLOAT * (size // share.element // features) * (2 if whole else 1)
        if not whole:  # written out: see strategies.frameworks.pytorch.operators
            kept[f"{label} normed"] = size
    forward: Items = (*share.made(label, "forward", size), *share.run(label, "forward", elements, ways.forward))
    backward: Items = (*share.made(label, "backward", size), *share.run(label, "backward", elements, ways.backward))
    if share.resolved.sync_norm:
        gather, reduce = share.statistics(label, features)
        forward = (share.memory(f"{label} statistics", "forward", size), gather, *forward)
        backward = (share.memory(f"{label} sums", "backward", 2 * size), reduce, *backward)
    return Operator(
        forward=forward,
        input_gradient=(*backward, *share.vectors(label, features, parameters // features), *(addition if apart else ())),
        saved=kept,
        shapes=((features,),) * (parameters // features),
        replicated=parameters,
    )


def residual(share: RankShapes, label: str) -> Operator:
    """Bias, dropout and residual addition. The mask has a byte per element."""
    ways = share.kernels.residual(share.element, share.dropout)
    forward, backward = (
        share.run(label, "forward", share.stream, ways.forward),
        share.run(label, "backward", share.stream, ways.backward),
    )
    return Operator(forward, backward, saved={f"{label} dropout mask": share.stream} if share.dropout else {})


def pointwise(share: RankShapes, label: str, read: int, written: int, saved: str = "") -> Operator:
    """A function of every element: `read` elements to `written`; with `saved` its input is kept under this name for backward."""
    moved = share.element * (read + written)
    return Operator(
        forward=(share.memory(label, "forward", moved),),
        input_gradient=(share.memory(label, "backward", moved + (share.element * read if saved else 0)),),
        saved={saved: share.element * read} if saved else {},
        temporary=moved,
    )


def activation(share: RankShapes, label: str, elements: int, saved: str) -> Operator:
    """The activation of an MLP of so many results; a gate beside it doubles what is read."""
    plain = pointwise(share, label, elements * (2 if share.model.gated else 1), elements, saved)
    width = share.element
    ways = share.kernels.gate(width) if share.model.gated else passes.gelu(width)
    forward, backward = (share.run(label, phase, elements, way) for phase, way in zip(("forward", "backward"), ways, strict=True))
    fp8 = share.resolved.fp8
    if fp8 is None or not fp8.activation_func_input_store:
        return replace(plain, forward=forward, input_gradient=backward)
    number = elements * (2 if share.model.gated else 1)  # cast to be kept, and cast back
    there, back = (
        share.memory(f"{label} input in fp8", phase, number * (width + FP8_WIDTH)) for phase in ("forward", "backward")
    )
    return replace(plain, forward=(*forward, there), input_gradient=(back, *backward), saved={saved: FP8_WIDTH * number})


def rotary(share: RankShapes, elements: int) -> Operator:
    """Rotary embedding of so many elements of queries and keys."""
    ways = share.kernels.rotary(share.element)
    forward, backward = (
        share.run("rotary", phase, elements, way) for phase, way in zip(("forward", "backward"), ways, strict=True)
    )
    return replace(pointwise(share, "rotary", elements, elements), forward=forward, input_gradient=backward)
