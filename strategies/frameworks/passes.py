"""Passes over memory of the kernels between matrix products.

A pass is (kind, bytes per element): "memory" streams; "reduction" needs whole rows or columns, and reaches less of the bandwidth.
`width` is the bytes of an activation element. An operator of PyTorch that a machine may have been measured with has its name.
"""

from __future__ import annotations

from typing import NamedTuple

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


def stream(*moved: float, operator: str = "") -> Passes:
    """A streaming kernel for each number of bytes that is not 0."""
    return tuple(Pass("memory", size, operator) for size in moved if size)


def reduce(*moved: float, operator: str = "") -> Passes:
    """A kernel that needs whole rows or columns for each number of bytes."""
    return tuple(Pass("reduction", size, operator) for size in moved)


def narrowed(passes: Passes, less: float) -> Passes:
    """The same, whose last one writes so many bytes less per element."""
    return (*passes[:-1], passes[-1]._replace(moved=passes[-1].moved - less))


def gelu(width: float) -> Ways:
    """An activation without a gate, per element: one kernel in every framework."""
    return Ways(stream(2 * width, operator="gelu"), stream(3 * width, operator="gelu backward"))


def fused_loss(width: float) -> Ways:
    """Cross-entropy in one kernel each way, per logit: read; read and its gradient written (flash-attn's and Apex's xentropy)."""
    return Ways(reduce(width), reduce(2 * width))


def apex_norm(width: float, persistent: bool) -> Ways:
    """Apex's layer norm, whose weight gradient is a kernel of its own; persistent: FastLayerNorm."""
    return persistent_norm(width) if persistent else Ways(stream(2 * width, operator="apex norm"), reduce(3 * width, 2 * width))


def persistent_norm(width: float, name: str = "persistent norm") -> Ways:
    """A norm that keeps rows in registers: Transformer Engine's, Apex's FastLayerNorm (github.com/NVIDIA/apex pull 1037)."""
    return Ways(stream(2 * width, operator=name), reduce(3 * width, operator=f"{name} backward"))


def operator_loss(width: float, computed: float = FLOAT) -> Ways:
    """Megatron-LM's cross-entropy operator by operator: cast, maximum, difference, exponential, sum, quotient; backward a product
    and a cast (megatron/mpu/cross_entropy.py). computed: bytes per logit of the type that all but the casts are in.
    """
    turned, both = width + computed if width != computed else 0.0, 2 * computed
    forward = (*stream(turned), *reduce(computed), *stream(both, both), *reduce(computed), *stream(both))
    return Ways(forward, stream(both, turned))


def pytorch_loss(width: float) -> Ways:
    """PyTorch's cross-entropy: cast, log-softmax, gather; backward zeros, the gradient of log-softmax, cast."""
    turned = width + FLOAT if width != FLOAT else 0.0
    back = reduce(3 * FLOAT, operator="log-softmax backward")
    forward = (*stream(turned), *reduce(2 * FLOAT, operator="log-softmax"))
    return Ways(forward, (*stream(FLOAT), *back, *stream(turned)))


def pytorch_softmax(width: float) -> Ways:
    """PyTorch's operators: scale, add the mask, softmax in fp32, cast back, per score."""
    cast = width + FLOAT if width != FLOAT else 0.0
    names = ("softmax", "softmax backward") if not cast else ("", "")  # measured in one type, without a cast inside
    forward = (*stream(2 * width, 2 * width), *reduce(width + FLOAT, operator=names[0]), *stream(cast))
    return Ways(forward, (*stream(cast), *reduce(2 * FLOAT + width, operator=names[1]), *stream(2 * width)))


def complex_rotary(width: float) -> Ways:
    """Rotary embedding as products of complex numbers (apply_rotary_emb of torchtitan's model.py): a cast to fp32, the product, a
    cast back. torch.compile generates no code for the product (github.com/pytorch/torchtitan issue 15), so that the casts, too,
    are kernels of their own.
    """
    cast = width + FLOAT if width != FLOAT else 0.0
    return Ways(stream(cast, 2 * FLOAT, cast), stream(cast, 2 * FLOAT, cast))
