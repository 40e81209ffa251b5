"""Eager PyTorch, one kernel per operator, as Hugging Face's models are written; lists are what PyTorch dispatches.

What the operators keep for backward is in `strategies.frameworks.pytorch.operators`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from sim.program import Launching
from strategies.frameworks import TRANSFORMER_ENGINE, KernelSet, dropout_backward, kernel_sets
from strategies.frameworks.options import Options
from strategies.frameworks.passes import FLOAT, Ways, complex_rotary, pytorch_loss, pytorch_softmax, reduce, stream
from strategies.frameworks.pytorch.options import PyTorchOptions

# Kernels of gradients, from autograd's C++ engine: layers of Llama 0.60 and of GPT-2 0.71 of a forward pass's (Hugging Face's, on
# a CPU, as `python -m calibration.measure.launches` measures).
AUTOGRAD = 0.65

ALONE = "PyTorch's own operators run one by one, and wait for each collective"


class InPyTorch(KernelSet):
    """Models written in PyTorch's operators, whatever runs these."""

    options: PyTorchOptions = PyTorchOptions.model_validate({})
    of_pytorch = True
    update_blocks = 2240  # torch 2.13 built with CUDA 13 (ATen/native/cuda/MultiTensorApply.cuh, depth_to_max_blocks), before 320
    # torch 2.13, distributed/pipelining/schedules.py: ScheduleGPipe and Schedule1F1B ask for what a pass needs right before it,
    # and the latter sends with that what the pass before has made; the runtime of the others asks as soon as it is on its way
    asks_late = frozenset({"gpipe", "1f1b"})
    waits_for_sends = frozenset({"1f1b"})

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        given = self.options
        self.separate_products, self.repeats_keys = not given.joined_products, given.repeated_keys
        self.unpads, self.loss_metrics, self.flat_parameters = given.unpad, given.loss_metrics, given.flat_parameters
        self.root_unit, self.keeps_last_unit = given.root_unit, given.keep_last_unit
        self.frees_gradients, self.bucket_views = given.set_to_none, given.gradient_as_bucket_view
        self.broadcast_buffers = given.broadcast_buffers

    def rotary(self, width: float) -> Ways:
        """In complex or in real numbers."""
        return complex_rotary(width) if self.options.complex_rotary else self.real_rotary(width)

    @abstractmethod
    def real_rotary(self, width: float) -> Ways:
        """Rotary embedding in real numbers, per element."""


@kernel_sets("torch")
class PyTorch(InPyTorch):
    """`kernels: torch` in a plan: a kernel per operator."""

    eager = prefetches_backward = pipeline_buffers = True
    launching = Launching(backward=AUTOGRAD)
    refused_overlaps: ClassVar[Mapping[str, str]] = {"weight_gradient": ALONE, "pieces": ALONE}
    fp8_scalings = TRANSFORMER_ENGINE

    def norm(self, rms: bool, width: float) -> Ways:
        """A layernorm is one operator, and its weight's gradient another; an rmsnorm is written out, with statistics in fp32."""
        if not rms:
            back = (*reduce(3 * width, operator="norm backward"), *reduce(2 * width))
            return Ways(stream(2 * width, operator="norm"), back)
        cast = width + FLOAT if width != FLOAT else 0.0  # statistics are of fp32 numbers
        square, mean, scale = 2 * FLOAT, FLOAT, 2 * FLOAT
        forward = (*stream(cast, square), *reduce(mean), *stream(scale, cast, 2 * width))
        gradients = (2 * FLOAT, 2 * FLOAT, 2 * FLOAT, 3 * FLOAT, 3 * FLOAT)  # through the mean and the square, and their sum
        weight = (*stream(2 * width, 3 * width), *reduce(width))
        backward = (*weight, *stream(cast, 3 * FLOAT, 2 * FLOAT), *reduce(FLOAT), *stream(*gradients, cast))
        return Ways(forward, backward)

    def gate(self, width: float) -> Ways:
        """silu, then the product; its two gradients, then silu's."""
        forward = (*stream(2 * width, operator="silu"), *stream(3 * width, operator="binary"))
        back = (*stream(3 * width, 3 * width, operator="binary"), *stream(3 * width, operator="silu backward"))
        return Ways(forward, back)

    def real_rotary(self, width: float) -> Ways:
        """Two products, a turned copy and a sum."""
        turned = (width, 2 * width)  # half is negated, the halves are joined
        back = (1.5 * width, width, 1.5 * width, 3 * width)  # slices put back, negated, summed
        forward = (2 * width, *turned, 2 * width, 3 * width)
        return Ways(stream(*forward), stream(2 * width, *back, 2 * width, 3 * width))

    def residual(self, width: float, mask: bool) -> Ways:
        """Dropout, then the sum."""
        dropped = stream(2 * width + 1, operator="dropout") if mask else ()
        return Ways((*dropped, *stream(3 * width, operator="binary")), dropout_backward(width, mask))

    def softmax(self, causal: bool, width: float) -> Ways:
        """Operator by operator."""
        return pytorch_softmax(width)

    def loss(self, width: float) -> Ways:
        """Log-softmax and a gather."""
        return pytorch_loss(width)
