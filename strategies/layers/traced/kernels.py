"""The kernels of an operator that PyTorch dispatched, by its name in aten, and which of them make a weight's gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sim.program import ALIGNED, Kernel
from strategies.models.tracing.records import BATCH_NORMS, Tensor, TracedOp
from topologies.reading import UserError

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
# Operators that need whole rows or columns.
REDUCTIONS = frozenset(
    """sum mean amax amin max min var var_mean std norm linalg_vector_norm logsumexp prod cumsum topk sort argmax argmin any all
    _softmax _softmax_backward_data _safe_softmax _log_softmax _log_softmax_backward_data native_group_norm
    native_group_norm_backward nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward""".split()
)
# By name in aten, the operator that a machine may have been measured with (`sim.program.Kernel.variant`).
MEASURED = {
    "gelu": "gelu",
    "gelu_backward": "gelu backward",
    "silu": "silu",
    "silu_backward": "silu backward",
    "native_dropout": "dropout",
    "_softmax": "softmax",
    "_softmax_backward_data": "softmax backward",
    "_log_softmax": "log-softmax",
    "_log_softmax_backward_data": "log-softmax backward",
}
BINARY = ("add", "mul", "sub", "div")
# Operators that write and read nothing, that read the rows of a table that are looked up, and that add to or set some rows.
FILLS = frozenset(
    """zero_ fill_ zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full rand randn rand_like randn_like
    bernoulli_ uniform_ normal_ exponential_ random_ arange""".split()
)
LOOKUPS = frozenset("index index_select gather take".split())
SCATTERS = frozenset(
    """index_put index_put_ _index_put_impl_ index_add index_add_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_
    scatter_reduce scatter_reduce_""".split()
)
FREE = frozenset(
    "empty empty_strided empty_like new_empty new_empty_strided scalar_tensor lift_fresh set_ resize_ wait_tensor".split()
)
BATCH_NORM_BACKWARD = frozenset("native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward".split())
WITHOUT_PRICE = frozenset(
    """_fft_c2c _fft_r2c _fft_c2r _scaled_mm _scaled_grouped_mm cholesky_solve cholesky_inverse triangular_solve lu_unpack ormqr
    geqrf _cdist_forward _pdist_forward _ctc_loss _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _thnn_fused_lstm_cell _thnn_fused_gru_cell _cudnn_rnn miopen_rnn mkldnn_rnn_layer
    grid_sampler_3d _int_mm _weight_int4pack_mm _weight_int8pack_mm _trilinear""".split()
)
OTHERS = "::"  # in names of operators that are not PyTorch's own
ALGEBRA = ("linalg_", "_linalg_")  # decompositions and solvers, beside norms, which are sums
Priced = tuple[Kernel, bool]  # a kernel, and whether it makes a parameter's gradient


def kernels_of(op: TracedOp, phase: str, dtype: str, has_parameters: bool) -> list[Priced]:
    """The kernels that the operator launches. has_parameters: the forward operator of which this is the gradient reads some.
    Raises UserError for an operator that has no price.
    """
    return list(_kernels(op, phase, dtype, has_parameters))


def products_of(op: TracedOp) -> int:
    """How many gradients of a product's operands an operator of the backward pass makes."""
    if op.name == "convolution_backward":
        return sum(_asked(op)[:2])
    return 2 if op.name == "attention_backward" else int(op.name in PRODUCTS)


def _asked(op: TracedOp) -> tuple[bool, ...]:
    """Whether the gradients of a convolution's image, weight and bias are asked for."""
    return next(
        (tuple(each) for each in reversed(op.arguments) if isinstance(each, list | tuple) and len(each) == 3), (True,) * 3
    )


def _kernels(op: TracedOp, phase: str, dtype: str, has_parameters: bool) -> Iterator[Priced]:
    read, written = sum(t.bytes for t in op.inputs), sum(t.bytes for t in op.outputs)
    label = f"{op.label} {op.name}"
    solves = op.name.startswith(ALGEBRA) and op.name not in (*REDUCTIONS, "linalg_cross")
    if op.name in WITHOUT_PRICE or OTHERS in op.name or solves:
        raise UserError(
            f"model: operator {op.name if OTHERS in op.name else f'aten::{op.name}'} in {op.label} has no price: no class of the "
            "profile's kernels is like it; trace the module without it, or with products and sums in its place"
        )
    if op.name in FREE or not op.outputs:
        return
    if op.name in PRODUCTS:
        yield _product(op, phase, dtype, has_parameters)
    elif op.name.startswith("attention_"):
        yield _attention(op, phase, dtype), False
    elif op.name == "convolution":
        yield from _convolution(op, phase, dtype)
    elif op.name == "convolution_backward":
        yield from _convolution_backward(op, phase, dtype)
    elif op.name == "native_layer_norm":
        yield _moved("memory", label, phase, 2 * op.inputs[0].bytes, dtype, "norm"), False
    elif op.name == "native_layer_norm_backward":
        size = op.inputs[0].bytes
        yield _moved("reduction", label, phase, 3 * size, dtype, "norm backward"), False
        yield _moved("reduction", label, phase, 2 * size, dtype), False
    elif op.name in BATCH_NORMS:  # statistics, then the result
        yield _moved("reduction", label, phase, op.inputs[0].bytes, dtype), False
        yield _moved("memory", label, phase, 2 * op.inputs[0].bytes, dtype), False
    elif op.name in BATCH_NORM_BACKWARD:
        yield _moved("reduction", label, phase, 2 * op.inputs[0].bytes, dtype), False
        yield _moved("memory", label, phase, 3 * op.inputs[0].bytes, dtype), False
    elif op.name == "embedding":  # of the table, rows that are looked up
        yield _moved("memory", label, phase, 2 * written, dtype), False
    elif op.name == "embedding_dense_backward":  # zeros, to which rows are added
        yield _moved("memory", f"{label} zeros", phase, written, dtype), True
        yield _moved("memory", label, phase, 3 * op.inputs[0].bytes, dtype), True
    elif op.name in ("nll_loss_forward", "nll_loss2d_forward"):  # a number per row
        yield (
            _moved("reduction", label, phase, 2.0 * op.inputs[0].width * op.inputs[0].elements / op.inputs[0].shape[-1], dtype),
            False,
        )
    elif op.name in ("nll_loss_backward", "nll_loss2d_backward"):  # zeros, of which one per row is set
        yield _moved("memory", label, phase, written, dtype), False
    elif (moved := _of_rows(op)) is not None:
        yield _moved("memory", label, phase, moved, dtype), False
    else:
        kind = "reduction" if op.name in REDUCTIONS else "memory"
        alike = op.name in BINARY and len(op.inputs) == 2 and op.inputs[0].shape == op.inputs[1].shape
        variant = "binary" if alike else MEASURED.get(op.name, "")
        bias = has_parameters and op.name == "sum"
        moved = read if bias else read + written
        yield _moved(kind, label, phase, moved, dtype, variant), bias


def _of_rows(op: TracedOp) -> float | None:
    """Bytes that operators move which do not read all that they are given: fills, copies, lookups, scatters; None of others.

    A lookup reads as much as it writes, a scatter reads its rows, and what they are added to, which it writes; where it is not in
    place, all rows are copied before.
    """
    written = sum(t.bytes for t in op.outputs)
    numbers = sum(t.bytes for t in op.inputs if not t.floating)
    if op.name in FILLS:
        return written
    if op.name == "copy_":
        return op.inputs[-1].bytes + written
    if op.name in LOOKUPS:
        return 2 * written + numbers
    if op.name in SCATTERS:
        rows = max((float(t.elements * t.width) for t in op.inputs[1:] if t.floating), default=min(written, numbers))
        copied = not (op.backward or op.name.endswith("_"))  # autograd adds to zeros in place, but where it is being recorded
        return 3 * rows + numbers + 2 * written * copied
    if op.name in ("_embedding_bag", "_embedding_bag_forward_only"):
        table, indices = op.inputs[:2]
        return float(indices.elements * table.shape[-1] * table.width) + numbers + written
    if op.name in ("_embedding_bag_backward", "_embedding_bag_dense_backward"):  # zeros, to which rows are added
        gradient, indices = op.inputs[:2]
        return written + 3.0 * indices.elements * gradient.shape[-1] * gradient.width + numbers
    return None


def _moved(kind: str, label: str, phase: str, moved: float, dtype: str, variant: str = "") -> Kernel:
    return Kernel(kind, label, phase, 0.0, float(moved), dtype, (), variant)


def _type(tensor: Tensor, dtype: str) -> str:
    """Type of a product's operands: the plan's, or fp32 where the module has cast them."""
    return "fp32" if tensor.width == 4 and dtype not in ("fp32", "tf32") else dtype


def _product(op: TracedOp, phase: str, dtype: str, has_parameters: bool) -> Priced:
    """A matrix product, or a batch of them."""
    left, right = op.inputs[:2] if op.name == "_grouped_mm" else op.inputs[-2:]
    batch, m, n, k = _grouped(op, left, right) if op.name == "_grouped_mm" else _batched(left, right)
    of_weight = phase == "backward" and has_parameters and not (left.parameter or right.parameter)
    moved = sum(t.bytes for t in (left, right, op.outputs[0]))
    label = f"{op.label} weight" if of_weight else op.label
    alignment = math.gcd(ALIGNED, n, k)
    return Kernel("gemm", label, phase, op.flops, moved, _type(left, dtype), (batch, m, n, k), "", alignment), of_weight


def _batched(left: Tensor, right: Tensor) -> tuple[int, ...]:
    """(products, rows, columns, common dimension)."""
    return left.shape[0] if len(left.shape) == 3 else 1, left.shape[-2], right.shape[-1], left.shape[-1]


def _grouped(op: TracedOp, left: Tensor, right: Tensor) -> tuple[int, ...]:
    """The same of a product in groups (torch.nn.functional.grouped_mm), of which experts are made: rows are taken to be spread
    evenly over the groups. Rows of several matrices, or, as the gradient of these, a matrix of each group's rows.
    """
    if (len(left.shape), len(right.shape)) == (2, 3):
        groups = min(right.shape[0], left.shape[0])
        return groups, math.ceil(left.shape[0] / groups), right.shape[-1], right.shape[-2]
    if (len(left.shape), len(right.shape)) == (2, 2):
        groups = min(op.outputs[0].shape[0], left.shape[-1])
        return groups, left.shape[-2], right.shape[-1], math.ceil(left.shape[-1] / groups)
    shapes = " and ".join("×".join(map(str, each.shape)) for each in (left, right))
    raise UserError(f"model: aten::_grouped_mm of {shapes} in {op.label} has no price: only rows by groups' matrices have one")


def _attention(op: TracedOp, phase: str, dtype: str) -> Kernel:
    """A fused kernel; the mask leaves half of the products, and backward has five for two."""
    q, k = op.inputs[:2]
    (batch, heads, rows, dim), (_, kv_heads, columns, _) = q.shape, k.shape
    causal = int(bool(op.arguments[0]))
    dim = (dim + op.inputs[2].shape[-1]) // 2
    flops = 4.0 * batch * heads * rows * columns * dim * (0.5 if causal else 1.0) * (2.5 if phase == "backward" else 1.0)
    sums = 4.0 * batch * heads * rows
    moved = sum(t.bytes for t in (*op.inputs, *op.outputs)) + sums
    shape = (batch, heads, kv_heads, rows, columns, dim, causal)
    return Kernel(op.name, "attention", phase, flops, moved, dtype, shape)


def _convolution(op: TracedOp, phase: str, dtype: str) -> Iterator[Priced]:
    image, weight, result = op.inputs[0], op.inputs[1], op.outputs[0]
    yield from _convolved(op, (image, weight, result), (image, weight, result), phase, dtype, "forward")


def _convolution_backward(op: TracedOp, phase: str, dtype: str) -> Iterator[Priced]:
    """Gradients of the image, the weight and the bias, as far as they are asked for."""
    gradient, image, weight = op.inputs[:3]
    mask = _asked(op)
    if mask[0]:
        yield from _convolved(op, (image, weight, gradient), (gradient, weight, image), phase, dtype, "input")
    if mask[1]:
        yield from _convolved(op, (image, weight, gradient), (gradient, image, weight), phase, dtype, "weight")
    if mask[2]:
        yield _moved("reduction", f"{op.label} bias", phase, gradient.bytes, dtype), True


def _convolved(
    op: TracedOp, sizes: tuple[Tensor, Tensor, Tensor], moves: tuple[Tensor, ...], phase: str, dtype: str, way: str
) -> Iterator[Priced]:
    """A convolution as a product for each group: positions of the result × what a position sees × channels of the result. Where a
    group has one channel, nothing is shared: the kernel is bound by memory. sizes: image, weight, result; of a transposed
    convolution its result takes the image's place.
    """
    image, weight, result = sizes
    transposed = next((each for each in op.arguments if isinstance(each, bool)), False)
    groups = next((each for each in reversed(op.arguments) if isinstance(each, int) and not isinstance(each, bool)), 1)
    seen = math.prod(weight.shape[1:])  # of one channel of the result
    channels, positions = weight.shape[0] // groups, math.prod(result.shape) // result.shape[1]
    if transposed:
        positions = math.prod(image.shape) // image.shape[1]
    flops, moved = 2.0 * groups * channels * positions * seen, sum(t.bytes for t in moves)
    of_weight, label = way == "weight", f"{op.label} weight" if way == "weight" else op.label
    if weight.shape[1] == 1 and groups > 1:
        yield Kernel("memory", label, phase, flops, float(moved), dtype), of_weight
        return
    shape = {
        "forward": (groups, positions, channels, seen),
        "input": (groups, positions, seen, channels),
        "weight": (groups, channels, seen, positions),
    }[way]
    alignment = math.gcd(ALIGNED, shape[2], shape[3])
    yield Kernel("gemm", label, phase, flops, float(moved), _type(image, dtype), shape, "", alignment), of_weight
