"""The kernels between matrix products, by what runs them (`plan.kernels`): how many passes over memory a norm or a softmax is.

A pass is (kind, bytes per element): "memory" streams; "reduction" needs whole rows or columns, and reaches less of the bandwidth.
`width` is the bytes of an activation element. An operator of PyTorch that a machine may have been measured with has its name.

* megatron: Megatron-LM's and Transformer Engine's fused kernels. Causal softmax loads what the mask leaves, half, and stores
  whole rows (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h); backward, it loads half of gradient and result.
* apex: Megatron-LM before Transformer Engine (2020 to 2022), with Apex's layernorm and cuBLAS before CUDA 11.7. The bias of
  queries, keys and values is added, and gradients of scaled scores are scaled, by kernels of their own
  (megatron/model/transformer.py); so is every step of the loss (megatron/mpu/cross_entropy.py).
* compiled: torch.compile, priced as megatron's but for what autograd adds up between kernels, which it fuses.
* torch: eager PyTorch, one kernel per operator, as Hugging Face's models are written; lists are what PyTorch dispatches.
"""

from __future__ import annotations

from typing import NamedTuple

from strategies.plan.computing import Kernels

FLOAT = 4  # bytes of fp32


class Pass(NamedTuple):
    """One kernel: how it is bound, bytes per element, and which operator it is (`Kernel.variant`)."""

    kind: str
    moved: float
    operator: str = ""


Passes = tuple[Pass, ...]


class Ways(NamedTuple):
    """Passes of the forward and of the backward direction."""

    forward: Passes
    backward: Passes


def _stream(*moved: float, operator: str = "") -> Passes:
    return tuple(Pass("memory", bytes_, operator) for bytes_ in moved if bytes_)


def _reduce(*moved: float, operator: str = "") -> Passes:
    return tuple(Pass("reduction", bytes_, operator) for bytes_ in moved)


def norm(kernels: Kernels, rms: bool, width: float, persistent: bool = False) -> Ways:
    """A norm over features, per element. The weight's gradient is made in the backward kernel, by Apex and PyTorch in its own.

    persistent: by Apex's FastLayerNorm, which keeps rows in registers (github.com/NVIDIA/apex pull 1037), as Transformer Engine.
    """
    if kernels in ("megatron", "compiled") or persistent:
        name = "compiled norm" if kernels == "compiled" else "persistent norm"
        return Ways(_stream(2 * width, operator=name), _reduce(3 * width, operator=f"{name} backward"))
    if kernels == "apex":
        return Ways(_stream(2 * width, operator="apex norm"), _reduce(3 * width, 2 * width))
    if not rms:
        back = (*_reduce(3 * width, operator="norm backward"), *_reduce(2 * width))
        return Ways(_stream(2 * width, operator="norm"), back)
    cast = width + FLOAT if width != FLOAT else 0.0  # statistics are of fp32 numbers
    square, mean, scale = 2 * FLOAT, FLOAT, 2 * FLOAT
    forward = (*_stream(cast, square), *_reduce(mean), *_stream(scale, cast, 2 * width))
    gradients = (2 * FLOAT, 2 * FLOAT, 2 * FLOAT, 3 * FLOAT, 3 * FLOAT)  # through the mean and the square, and their sum
    weight = (*_stream(2 * width, 3 * width), *_reduce(width))
    backward = (*weight, *_stream(cast, 3 * FLOAT, 2 * FLOAT), *_reduce(FLOAT), *_stream(*gradients, cast))
    return Ways(forward, backward)


def gate(kernels: Kernels, width: float) -> Ways:
    """A gated activation, per element of its result."""
    if kernels == "torch":  # silu, then the product; its two gradients, then silu's
        forward = (*_stream(2 * width, operator="silu"), *_stream(3 * width, operator="binary"))
        back = (*_stream(3 * width, 3 * width, operator="binary"), *_stream(3 * width, operator="silu backward"))
        return Ways(forward, back)
    return Ways(_stream(3 * width), _stream(5 * width))


def gelu(width: float) -> Ways:
    """An activation without a gate, per element: one kernel whoever runs it."""
    return Ways(_stream(2 * width, operator="gelu"), _stream(3 * width, operator="gelu backward"))


def rotary(kernels: Kernels, width: float, in_complex: bool = False) -> Ways:
    """Rotary embedding of queries and keys, per element; in eager PyTorch two products, a turned copy and a sum.

    Of complex numbers (apply_rotary_emb of torchtitan's model.py): a cast to fp32, the product, a cast back. torch.compile
    generates no code for the product (github.com/pytorch/torchtitan issue 15), so that the casts, too, are kernels of their own.
    """
    if in_complex:
        cast = width + FLOAT if width != FLOAT else 0.0
        return Ways(_stream(cast, 2 * FLOAT, cast), _stream(cast, 2 * FLOAT, cast))
    if kernels == "torch":
        turned = (width, 2 * width)  # half is negated, the halves are joined
        back = (1.5 * width, width, 1.5 * width, 3 * width)  # slices put back, negated, summed
        forward = (2 * width, *turned, 2 * width, 3 * width)
        return Ways(_stream(*forward), _stream(2 * width, *back, 2 * width, 3 * width))
    if kernels == "compiled":
        return Ways(_stream(2 * width, operator="compiled rotary"), _stream(2 * width, operator="compiled rotary backward"))
    return Ways(_stream(2 * width), _stream(2 * width))


def residual(kernels: Kernels, width: float, mask: bool) -> Ways:
    """Bias, dropout with a mask of a byte per element, and the sum with the residual stream."""
    back = _stream(2 * width + 1) if mask else ()  # otherwise the gradient passes unchanged
    if kernels == "torch":
        dropped = _stream(2 * width + 1, operator="dropout") if mask else ()
        return Ways((*dropped, *_stream(3 * width, operator="binary")), back)
    return Ways(_stream(3 * width + mask), back)


def softmax(kernels: Kernels, causal: bool, width: float) -> Ways:
    """Scale, mask and softmax of scores, per score."""
    if kernels == "torch":  # scale, add the mask, softmax in fp32, cast back
        cast = width + FLOAT if width != FLOAT else 0.0
        names = ("softmax", "softmax backward") if not cast else ("", "")  # measured in one type, without a cast inside
        forward = (*_stream(2 * width, 2 * width), *_reduce(width + FLOAT, operator=names[0]), *_stream(cast))
        return Ways(forward, (*_stream(cast), *_reduce(2 * FLOAT + width, operator=names[1]), *_stream(2 * width)))
    read = 0.5 if causal else 1.0
    mask = 0.0 if causal else 1.0  # a byte per score is read where some are padding
    return Ways(_reduce((read + 1) * width + mask), _reduce((2 * read + 1) * width))


def fused_loss(width: float) -> Ways:
    """Cross-entropy in one kernel each way, per logit: read; read and its gradient written (flash-attn's and Apex's xentropy)."""
    return Ways(_reduce(width), _reduce(2 * width))


def loss(kernels: Kernels, width: float) -> Ways:
    """Cross-entropy, per logit. Megatron-LM's is computed in fp32: a pass that casts and takes the maximum, one for
    exponentials and their sum, one that divides; the gradient is made from the probabilities. Before Transformer Engine each
    is an operator: cast, maximum, difference, exponential, sum, quotient; backward a product and a cast. Eager PyTorch: cast,
    log-softmax, gather; backward zeros, the gradient of log-softmax, cast.
    """
    cast = width != FLOAT
    if kernels == "torch":
        turned = width + FLOAT if cast else 0.0
        back = _reduce(3 * FLOAT, operator="log-softmax backward")
        forward = (*_stream(turned), *_reduce(2 * FLOAT, operator="log-softmax"))
        return Ways(forward, (*_stream(FLOAT), *back, *_stream(turned)))
    if kernels == "apex":
        turned, both = width + FLOAT if cast else 0.0, 2 * FLOAT
        forward = (*_stream(turned), *_reduce(FLOAT), *_stream(both, both), *_reduce(FLOAT), *_stream(both))
        return Ways(forward, _stream(both, turned))
    first = width + FLOAT * cast
    return Ways(_reduce(first, 2 * FLOAT, 2 * FLOAT), _stream(FLOAT + width))
